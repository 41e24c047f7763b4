"""A GGUF file of the llama family: its sizes, its metadata and its matrices in the order ONNX graphs expect.

Owns everything that is particular to GGUF (key names, block types, the permuted q and k rows).
Must not know ONNX. Refuses by name whatever would make the built graph compute something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from producer.errors import UsageError
from worker.build.source import Architecture, StoredMatrix


class GgufSource:
    """Reads one GGUF file. Every tensor must be asked for: ``refuse_unused`` names those nobody wanted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._used: set[str] = set()
        family = self.text("general.architecture")
        if family != "llama":
            raise UsageError(
                f"{path}: the architecture is '{family}'; only 'llama' can be built. "
                "Choose a GGUF of a llama-family model (Llama, SmolLM2, TinyLlama with a BPE tokenizer)."
            )
        self.architecture = self._architecture()

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value, or ``default`` where the file does not have it."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def text(self, key: str) -> str:
        return str(self._need(key))

    def has(self, tensor: str) -> bool:
        return tensor in self._tensors

    def matrix(self, tensor: str) -> StoredMatrix:
        """A tensor by its GGUF name; q and k rows in half-split rotary order. UsageError if it is missing."""
        if tensor not in self._tensors:
            raise UsageError(
                f"{self.path}: tensor '{tensor}' is missing; the file is not a complete llama model."
            )
        self._used.add(tensor)
        stored = self._tensors[tensor]
        rows = stored.data
        if tensor.endswith("attn_q.weight"):
            rows = rows[half_split_rows(len(rows), self.architecture.num_heads)]
        elif tensor.endswith("attn_k.weight"):
            rows = rows[half_split_rows(len(rows), self.architecture.num_kv_heads)]
        return StoredMatrix(tensor, rows, stored.tensor_type)

    def refuse_unused(self) -> None:
        """UsageError when the file holds weights that the built graph leaves out: biases, experts, norms."""
        unused = sorted(self._tensors.keys() - self._used)
        if unused:
            shown = ", ".join(unused[:4]) + (", ..." if len(unused) > 4 else "")
            raise UsageError(
                f"{self.path}: {len(unused)} tensors have no place in a plain llama decoder ({shown}); "
                "attention biases, experts and q/k norms are not supported."
            )

    def _need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise UsageError(f"{self.path}: the metadata key '{key}' is missing; convert the model again.")
        return value

    def _architecture(self) -> Architecture:
        for key in ("llama.attention.sliding_window", "llama.expert_count"):
            if self.get(key):
                raise UsageError(f"{self.path}: '{key}' = {self.get(key)} is not supported.")
        hidden, heads = (
            int(self._need("llama.embedding_length")),
            int(self._need("llama.attention.head_count")),
        )
        head_size = int(self.get("llama.attention.key_length", hidden // heads))
        for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
            if int(self.get(key, head_size)) != head_size:
                raise UsageError(
                    f"{self.path}: '{key}' differs from the head size {head_size}: not supported."
                )
        return Architecture(
            num_layers=int(self._need("llama.block_count")),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=int(self.get("llama.attention.head_count_kv", heads)),
            head_size=head_size,
            vocab_size=len(self._need("tokenizer.ggml.tokens")),
            context_length=int(self._need("llama.context_length")),
            norm_epsilon=float(self._need("llama.attention.layer_norm_rms_epsilon")),
            inverse_frequencies=tuple(self._inverse_frequencies(head_size)),
        )

    def _inverse_frequencies(self, head_size: int) -> list[float]:
        """RoPE angles per position: base**(-2i/d) (Su et al. 2021) over Llama 3's factors or a scale."""
        base = float(self.get("llama.rope.freq_base", 10000.0))
        angles = base ** (-np.arange(0, head_size, 2, dtype=np.float64) / head_size)
        scaling = str(self.get("llama.rope.scaling.type", "none"))
        if scaling == "linear":
            angles /= float(self._need("llama.rope.scaling.factor"))
        elif scaling != "none":
            raise UsageError(
                f"{self.path}: rope scaling '{scaling}' is not supported (only none, linear, Llama 3)."
            )
        if self.has("rope_freqs.weight"):
            angles /= self.matrix("rope_freqs.weight").floats().astype(np.float64)
        return [float(angle) for angle in angles]


def half_split_rows(num_rows: int, num_heads: int) -> NDArray[np.intp]:
    """Row order that undoes GGUF's interleaving of rotary pairs within each head, i64[num_rows].

    llama.cpp's converter makes the pair (i, i + d/2) neighbours; ONNX's RotaryEmbedding wants halves apart.
    """
    pairs = np.arange(num_rows).reshape(num_heads, num_rows // num_heads // 2, 2)
    return pairs.transpose(0, 2, 1).reshape(-1)


def _open(path: Path) -> gguf.GGUFReader:
    if not path.is_file():
        raise UsageError(f"{path}: no such file. Give the path of a GGUF file.")
    try:
        return gguf.GGUFReader(path)
    except Exception as error:  # the reader raises whatever a damaged file makes it stumble over
        raise UsageError(f"{path}: not a readable GGUF file ({error}). Download it again.") from error
