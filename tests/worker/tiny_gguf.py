"""A tiny llama in GGUF, with weights known to the test, and what such a model computes, in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

Floats = NDArray[np.float32]

LETTERS = [chr(code) for code in range(ord("a"), ord("z") + 1)]
DIGITS = [str(digit) for digit in range(10)]
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file>", *LETTERS, *DIGITS, "Ġ", "he", "Ġa", "12"]
MERGES = ["h e", "Ġ a", "1 2"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"


@dataclass
class TinyLlama:
    """Sizes, and weights as a textbook (and ONNX) orders them: [rows, columns], halves of a head apart."""

    layers: int = 2
    hidden: int = 64
    ffn: int = 96
    heads: int = 4
    kv_heads: int = 2
    context: int = 96
    base: float = 10000.0
    epsilon: float = 1e-5
    tied: bool = True
    kind: GGMLQuantizationType = GGMLQuantizationType.F32
    weights: dict[str, Floats] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(5)
        for name, shape in self.shapes().items():
            norm = name.endswith("norm.weight")
            values = 1 + 0.1 * rng.standard_normal(shape) if norm else 0.3 * rng.standard_normal(shape)
            self.weights[name] = self._as_stored(values.astype(np.float32))

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    def shapes(self) -> dict[str, tuple[int, ...]]:
        keys, hidden = self.kv_heads * self.head_size, self.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (len(TOKENS), hidden),
            "output_norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["output.weight"] = (len(TOKENS), hidden)
        for layer in range(self.layers):
            p = f"blk.{layer}."
            shapes |= {p + "attn_norm.weight": (hidden,), p + "ffn_norm.weight": (hidden,)}
            shapes |= {p + "attn_q.weight": (hidden, hidden), p + "attn_output.weight": (hidden, hidden)}
            shapes |= {p + "attn_k.weight": (keys, hidden), p + "attn_v.weight": (keys, hidden)}
            shapes |= {p + "ffn_gate.weight": (self.ffn, hidden), p + "ffn_up.weight": (self.ffn, hidden)}
            shapes |= {p + "ffn_down.weight": (hidden, self.ffn)}
        return shapes

    def write(
        self, path: Path, metadata: Mapping[str, Any] | None = None, extra: Mapping[str, Floats] | None = None
    ) -> Path:
        """Writes the file. ``metadata`` overrides keys (None leaves one out), ``extra`` adds tensors."""
        keys = self.metadata() | dict(metadata or {})
        writer = gguf.GGUFWriter(path, str(keys.pop("general.architecture")))
        for key, value in keys.items():
            if value is not None:
                _add(writer, key, value)
        for name, values in self.weights.items():
            self._add_tensor(writer, name, self._as_llama_cpp_orders(name, values))
        for name, values in (extra or {}).items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def metadata(self) -> dict[str, Any]:
        return {
            "general.architecture": "llama",
            "general.name": "Tiny",
            "llama.block_count": self.layers,
            "llama.context_length": self.context,
            "llama.embedding_length": self.hidden,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.rope.freq_base": self.base,
            "llama.attention.layer_norm_rms_epsilon": self.epsilon,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": TOKENS,
            "tokenizer.ggml.token_type": [3, 3, 3, 4, *[1] * (len(TOKENS) - 4)],
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.chat_template": TEMPLATE,
        }

    def logits(self, ids: list[int], angles: NDArray[np.float64] | None = None) -> Floats:
        """What the model says behind every token of ``ids``, in float64 and by the textbook. [T, V]"""
        w = {name: values.astype(np.float64) for name, values in self.weights.items()}
        if angles is None:
            angles = self.base ** (-np.arange(0, self.head_size, 2) / self.head_size)
        x = w["token_embd.weight"][ids]
        for layer in range(self.layers):
            p = f"blk.{layer}."
            x = x + self._attention(w, p, self._norm(x, w[p + "attn_norm.weight"]), angles)
            normed = self._norm(x, w[p + "ffn_norm.weight"])
            gate, up = normed @ w[p + "ffn_gate.weight"].T, normed @ w[p + "ffn_up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "ffn_down.weight"].T
        head = w["token_embd.weight" if self.tied else "output.weight"]
        return np.asarray(self._norm(x, w["output_norm.weight"]) @ head.T, np.float32)

    def _norm(self, x: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.epsilon) * weight

    def _attention(
        self, w: dict[str, NDArray[np.float64]], p: str, x: NDArray[np.float64], angles: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        def heads(name: str, count: int) -> NDArray[np.float64]:
            return (x @ w[p + name].T).reshape(len(x), count, self.head_size).transpose(1, 0, 2)

        group = self.heads // self.kv_heads
        q = _rotate(heads("attn_q.weight", self.heads), angles)
        k = _rotate(heads("attn_k.weight", self.kv_heads), angles).repeat(group, axis=0)
        v = heads("attn_v.weight", self.kv_heads).repeat(group, axis=0)
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(self.head_size)
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = weights / weights.sum(-1, keepdims=True) @ v
        return mixed.transpose(1, 0, 2).reshape(len(x), -1) @ w[p + "attn_output.weight"].T

    def _as_stored(self, values: Floats) -> Floats:
        """The values that the file's block type can hold; norms stay float32."""
        if values.ndim == 1 or self.kind == GGMLQuantizationType.F32:
            return values
        return quants.dequantize(quants.quantize(values, self.kind), self.kind)

    def _as_llama_cpp_orders(self, name: str, values: Floats) -> Floats:
        """llama.cpp's converter puts the two halves of each q and k head alternately."""
        count = {"attn_q.weight": self.heads, "attn_k.weight": self.kv_heads}.get(name.split(".", 2)[-1])
        if count is None:
            return values
        halves = values.reshape(count, 2, self.head_size // 2, -1)
        return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))

    def _add_tensor(self, writer: gguf.GGUFWriter, name: str, values: Floats) -> None:
        if values.ndim == 1 or self.kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quants.quantize(values, self.kind), raw_dtype=self.kind)


def _rotate(x: NDArray[np.float64], angles: NDArray[np.float64]) -> NDArray[np.float64]:
    """[heads, T, h], halves apart."""
    turn = np.arange(x.shape[1])[:, None] * angles
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * np.cos(turn) - b * np.sin(turn), b * np.cos(turn) + a * np.sin(turn)], -1)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
