"""Reads a CUDA graph node by node in float64 NumPy: what the graph says, without a GPU to run it on.

Only the operators that such a graph may hold; any other is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Array = NDArray[Any]


class CudaGraph:
    """The graph of a folder, and what its nodes compute."""

    def __init__(self, folder: Path) -> None:
        self.graph = onnx.load(folder / "model.onnx").graph
        self.weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in self.graph.initializer}

    def run(self, feeds: dict[str, Array]) -> dict[str, Array]:
        """Every value by name. Caches in ``feeds`` are written in place, as on the device."""
        values = {name: _wide(array) for name, array in self.weights.items()} | feeds
        for node in self.graph.node:
            attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
            inputs = [values[name] if name else None for name in node.input]
            results = getattr(self, f"_{node.op_type}")(inputs, attributes)
            values |= {name: result for name, result in zip(node.output, results, strict=False) if name}
        return values

    def _Gather(self, inputs: list[Array], attributes: dict[str, Any]) -> list[Array]:
        return [np.take(inputs[0], inputs[1], axis=attributes["axis"])]

    def _MatMul(self, inputs: list[Array], attributes: dict[str, Any]) -> list[Array]:
        return [inputs[0] @ inputs[1]]

    def _Gemm(self, inputs: list[Array], attributes: dict[str, Any]) -> list[Array]:
        return [inputs[0] @ (inputs[1].T if attributes["transB"] else inputs[1])]

    def _Mul(self, inputs: list[Array], attributes: dict[str, Any]) -> list[Array]:
        return [inputs[0] * inputs[1]]

    def _QuickGelu(self, inputs: list[Array], attributes: dict[str, Any]) -> list[Array]:
        return [inputs[0] / (1 + np.exp(-attributes["alpha"] * inputs[0]))]

    def _SimplifiedLayerNormalization(self, inputs: list[Array], attributes: dict[str, Any]) -> list[Array]:
        x, weight = inputs
        return [x / np.sqrt((x * x).mean(-1, keepdims=True) + attributes["epsilon"]) * weight]

    def _SkipSimplifiedLayerNormalization(
        self, inputs: list[Array], attributes: dict[str, Any]
    ) -> list[Array]:
        summed = inputs[0] + inputs[1]
        [normed] = self._SimplifiedLayerNormalization([summed, inputs[2]], attributes)
        return [normed, np.empty(0), np.empty(0), summed]

    def _PagedAttention(self, inputs: list[Array], attributes: dict[str, Any]) -> list[Array]:
        """The operator's documentation: rotate, store through the table, attend to all that is stored."""
        qkv, _, _, keys, values, cumulative, past, table, cos, sin = inputs[:10]
        heads, groups = attributes["num_heads"], attributes["kv_num_heads"]
        size = keys.shape[-1]
        assert attributes["do_rotary"] == 1 and attributes["rotary_interleaved"] == 0
        split = qkv.reshape(len(qkv), heads + 2 * groups, size)
        out = np.empty((len(qkv), heads * size))
        for row, start in enumerate(cumulative[:-1]):
            for token in range(start, cumulative[row + 1]):
                position = past[row] + token - start
                turned = _rotate(split[token, : heads + groups], cos[position], sin[position])
                block, offset = table[row, position // keys.shape[1]], position % keys.shape[1]
                keys[block, offset], values[block, offset] = turned[heads:], split[token, heads + groups :]
                stored = [
                    pages[table[row]].reshape(-1, groups, size)[: position + 1] for pages in (keys, values)
                ]
                out[token] = _attend(turned[:heads], *stored, attributes["scale"])
        return [out, keys, values]


def _attend(queries: Array, keys: Array, values: Array, scale: float) -> Array:
    """[H, h], [P, K, h], [P, K, h] -> [H h]."""
    group = len(queries) // keys.shape[1]
    keys, values = keys.repeat(group, axis=1), values.repeat(group, axis=1)
    scores = np.einsum("hd,phd->hp", queries, keys) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hp,phd->hd", weights / weights.sum(-1, keepdims=True), values).reshape(-1)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Pairs a head's halves apart. x [heads, h], cos and sin [h / 2]."""
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _wide(array: Array) -> Array:
    return array.astype(np.float64) if array.dtype.kind == "f" else array
