"""Attention over a pool of cache blocks, in plain ONNX operators.

The CPU has no PagedAttention kernel, so the same bookkeeping is spelled out: scatter the new keys and
values into the pool in place, gather each token's blocks through its table, attend. Every token is its own
row of query length 1, which lets prompts, chunks and decode rows share one run and makes a row's result
independent of its neighbours.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from worker.build.onnx_writer import OnnxWriter
from worker.build.source import Architecture

BLOCK_SIZE = 16  # slots per block; also keeps every table a multiple of the CPU's vector width
STEP_INPUTS = ("input_ids", "position_ids", "slot_mapping", "block_table", "logits_indices")
PAST_KEYS, PAST_VALUES = "past_key_values.{}.key", "past_key_values.{}.value"
PRESENT_KEYS, PRESENT_VALUES = "present.{}.key", "present.{}.value"


class PoolAttention:
    """Scatter, gather, attend. T tokens, W blocks per table, H query and K key/value heads of size h."""

    def __init__(self, writer: OnnxWriter, sizes: Architecture) -> None:
        self._writer, self._sizes = writer, sizes

    def declare(self) -> None:
        """The graph inputs of a step, and what all layers share."""
        writer, sizes = self._writer, self._sizes
        writer.input("position_ids", TensorProto.INT64, ["tokens"])
        writer.input("slot_mapping", TensorProto.INT64, ["tokens", 2])  # each token's (block, offset)
        writer.input("block_table", TensorProto.INT32, ["tokens", "table_width"])
        angles = np.outer(np.arange(sizes.context_length), sizes.inverse_frequencies)  # [context, h / 2] f64
        writer.constant("cos", np.cos(angles).astype(np.float32))
        writer.constant("sin", np.sin(angles).astype(np.float32))
        width = sizes.num_kv_heads * sizes.head_size
        writer.constant("shape.update", np.array([-1, sizes.num_kv_heads, sizes.head_size]))
        writer.constant("shape.context", np.array([0, -1, width]))
        writer.constant("axis.1", np.array([1]))
        writer.constant("one", np.array([1]))
        writer.node("Unsqueeze", ["position_ids", "axis.1"], "positions")  # [T, 1]
        writer.node("Add", ["position_ids", "one"], "kv_lengths")  # [T]

    def attend(self, layer: int, qkv: str, out: str) -> str:
        """f32[T, 1, (H + 2K) h] -> f32[T, 1, H h]; layer ``layer``'s pool gains the new tokens."""
        writer, sizes, p = self._writer, self._sizes, f"layer{layer}."
        key_width = sizes.num_kv_heads * sizes.head_size
        widths = writer.constant("split", np.array([sizes.num_heads * sizes.head_size, key_width, key_width]))
        writer.node("Split", [qkv, widths], p + "q", p + "k", p + "v", axis=-1)
        queries = self._rotate(p + "q", sizes.num_heads)
        keys = self._remember(self._rotate(p + "k", sizes.num_kv_heads), PAST_KEYS, PRESENT_KEYS, layer)
        values = self._remember(p + "v", PAST_VALUES, PRESENT_VALUES, layer)
        return writer.node(
            "Attention", [queries, keys, values, "", "", "", "kv_lengths"], out,
            q_num_heads=sizes.num_heads, kv_num_heads=sizes.num_kv_heads, scale=sizes.head_size**-0.5,
        )  # fmt: skip

    def _rotate(self, x: str, heads: int) -> str:
        return self._writer.node(
            "RotaryEmbedding", [x, "cos", "sin", "positions"], x + ".rotated", num_heads=heads
        )

    def _remember(self, x: str, past: str, present: str, layer: int) -> str:
        """Writes f32[T, 1, K h] into the pool; gives every token's whole context, f32[T, W * block, K h].

        The pool is bound to one buffer as ``past`` and ``present``: the scatter touches new slots only.
        """
        writer, sizes = self._writer, self._sizes
        shape: list[int | str] = ["num_blocks", BLOCK_SIZE, sizes.num_kv_heads, sizes.head_size]
        before = writer.input(past.format(layer), TensorProto.FLOAT, shape)
        after = writer.output(present.format(layer), TensorProto.FLOAT, shape)
        update = writer.node("Reshape", [x, "shape.update"], x + ".update")
        writer.node("ScatterND", [before, "slot_mapping", update], after)
        blocks = writer.node("Gather", [after, "block_table"], x + ".blocks", axis=0)
        return writer.node("Reshape", [blocks, "shape.context"], x + ".context")
