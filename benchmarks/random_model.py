"""Writes a CUDA model folder of a given shape with random float16 weights: speed without a download.

    python benchmarks/random_model.py --shape llama-1b --out models/random-1b

Weights are normal with standard deviation 1 / sqrt(inputs), so activations keep their size through the layers
and logits stay in float16's range and apart. Text is meaningless: each byte is a token, the rest of the
vocabulary are placeholders. The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers

from worker.build import write_cuda_model
from worker.build.source import Architecture, StoredMatrix

_BASE = 500_000.0  # Llama 3's rotary base


class Shape(NamedTuple):
    """What a model of random weights is made of."""

    architecture: Architecture
    ffn_size: int


def llama(*, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int) -> Shape:
    head_size = hidden // heads
    angles = _BASE ** (-np.arange(0, head_size, 2) / head_size)
    architecture = Architecture(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=vocab,
        context_length=8192,
        norm_epsilon=1e-5,
        inverse_frequencies=tuple(float(angle) for angle in angles),
    )
    return Shape(architecture, ffn)


SHAPES = {
    "tiny": llama(layers=2, hidden=128, ffn=256, heads=4, kv_heads=2, vocab=1024),
    "smollm2-135m": llama(layers=30, hidden=576, ffn=1536, heads=9, kv_heads=3, vocab=49152),
    "llama-1b": llama(layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, vocab=128256),
    "llama-8b": llama(layers=32, hidden=4096, ffn=14336, heads=32, kv_heads=8, vocab=128256),
}


class RandomSource:
    """A source (worker.build.source) of tied random weights, drawn when asked for."""

    def __init__(self, name: str, seed: int) -> None:
        """``name`` is one of SHAPES."""
        self.path, self._seed = Path(name), seed
        self.architecture, self._ffn_size = SHAPES[name]
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = letters + [f"<|{token}|>" for token in range(len(letters), self.architecture.vocab_size)]
        self._metadata: dict[str, Any] = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "gpt-2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [1] * len(letters) + [3] * (len(tokens) - len(letters)),
            "tokenizer.ggml.merges": [],
            "tokenizer.ggml.bos_token_id": len(letters),
            "tokenizer.ggml.eos_token_id": len(letters) + 1,
            "tokenizer.ggml.padding_token_id": len(letters) + 2,
        }

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(key, default)

    def text(self, key: str) -> str:
        return str(self._metadata[key])

    def has(self, tensor: str) -> bool:
        return tensor != "output.weight"  # the head is tied

    def matrix(self, tensor: str) -> StoredMatrix:
        """Each tensor has its own stream, so the order of asking does not matter."""
        shape = self._shape(tensor)
        if tensor.endswith("norm.weight"):
            return StoredMatrix(tensor, np.ones(shape, np.float32), GGMLQuantizationType.F32)
        rng = np.random.default_rng([self._seed, zlib.crc32(tensor.encode())])
        values = rng.standard_normal(shape, np.float32)
        values *= np.float32(shape[-1] ** -0.5)
        return StoredMatrix(tensor, values, GGMLQuantizationType.F32)

    def _shape(self, tensor: str) -> tuple[int, ...]:
        sizes, ffn = self.architecture, self._ffn_size
        hidden, keys = sizes.hidden_size, sizes.num_kv_heads * sizes.head_size
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd": (sizes.vocab_size, hidden),
            "attn_q": (sizes.num_heads * sizes.head_size, hidden),
            "attn_k": (keys, hidden),
            "attn_v": (keys, hidden),
            "attn_output": (hidden, sizes.num_heads * sizes.head_size),
            "ffn_gate": (ffn, hidden),
            "ffn_up": (ffn, hidden),
            "ffn_down": (hidden, ffn),
        }
        return shapes.get(tensor.split(".")[-2], (hidden,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-1b")
    parser.add_argument("--out", type=Path, required=True, help="the model folder to make")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-bounds", action="store_true", help="for ONNX Runtime before 1.29")
    told = parser.parse_args()
    told.out.mkdir(parents=True)
    start = time.perf_counter()
    write_cuda_model(RandomSource(told.shape, told.seed), told.out, bounds=not told.no_bounds)
    size = sum(path.stat().st_size for path in told.out.iterdir())
    print(f"{told.out}: {told.shape}, {size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
