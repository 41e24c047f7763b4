"""The llama decoder for CUDA: com.microsoft.PagedAttention over pages of 256 slots, everything in float16.

Ten nodes a layer, each one launch or, attention, few. Inputs and names are those of onnxruntime-genai's
builder, so its engine runs these folders too. Must not know the host's bookkeeping.

Why these nodes: ONNX Runtime may give a MatMul of [columns, rows] to a kernel made for few rows (config.py
asks for it), a Gemm not, hence MatMul in the layers. The head is too large for that kernel; as a Gemm it
reads the embedding as it is stored, where a MatMul needs it transposed, in a second copy or anew each step.
gate and up stay two matrices: packed into one they would need a Split, a launch and a copy of both.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from worker.build.attention import PAST_KEYS, PAST_VALUES, PRESENT_KEYS, PRESENT_VALUES
from worker.build.graph import Decoder
from worker.build.onnx_writer import OnnxWriter
from worker.build.source import Architecture

PAGE_SIZE = 256  # slots per block: the only size all of ONNX Runtime's attention backends read in place
STEP_INPUTS = (
    "input_ids", "block_table", "cumulative_sequence_lengths", "past_sequence_lengths",
    "attention_metadata", "logits_indices",
)  # fmt: skip
_MICROSOFT = "com.microsoft"
_NOTHING = ""  # an optional input left out


class PagedAttention:
    """One node a layer: rotates, stores, attends. T tokens of B rows, W blocks per table, n logits rows.

    ``bounds``: tell the node its bounds in CPU memory. It then reads nothing back from the device and may be
    captured in a CUDA graph; ONNX Runtime before 1.29 knows no such input.
    """

    def __init__(self, writer: OnnxWriter, sizes: Architecture, *, bounds: bool = True) -> None:
        self._writer, self._sizes, self._bounds = writer, sizes, bounds

    def declare(self) -> None:
        """The graph inputs of a step, and the rotary tables."""
        writer, sizes = self._writer, self._sizes
        writer.input("block_table", TensorProto.INT32, ["batch_size", "max_num_blocks"])
        writer.input("cumulative_sequence_lengths", TensorProto.INT32, ["batch_size + 1"])
        writer.input("past_sequence_lengths", TensorProto.INT32, ["batch_size"])
        if self._bounds:
            writer.input("attention_metadata", TensorProto.INT32, [3])
        writer.input("logits_indices", TensorProto.INT32, ["num_logits"])
        angles = np.outer(np.arange(sizes.context_length), sizes.inverse_frequencies)  # [context, h / 2] f64
        writer.constant("cos", np.cos(angles).astype(np.float16))
        writer.constant("sin", np.sin(angles).astype(np.float16))

    def attend(self, layer: int, qkv: str, out: str) -> str:
        """f16[T, (H + 2K) h] -> f16[T, H h]; layer ``layer``'s pages gain the new tokens."""
        writer, sizes = self._writer, self._sizes
        shape: list[int | str] = ["num_blocks", PAGE_SIZE, sizes.num_kv_heads, sizes.head_size]
        past = [
            writer.input(name.format(layer), TensorProto.FLOAT16, shape) for name in (PAST_KEYS, PAST_VALUES)
        ]
        present = [
            writer.output(name.format(layer), TensorProto.FLOAT16, shape)
            for name in (PRESENT_KEYS, PRESENT_VALUES)
        ]
        inputs = [
            qkv, _NOTHING, _NOTHING, *past, "cumulative_sequence_lengths", "past_sequence_lengths",
            "block_table", "cos", "sin",
        ]  # fmt: skip
        if self._bounds:  # between: slots, sinks, q and k norms, cache scales
            inputs += [_NOTHING] * 6 + ["attention_metadata"]
        return writer.node(
            "PagedAttention", inputs, out, *present, domain=_MICROSOFT,
            num_heads=sizes.num_heads, kv_num_heads=sizes.num_kv_heads, scale=sizes.head_size**-0.5,
            do_rotary=1, rotary_interleaved=0,
        )  # fmt: skip


class CudaDecoder(Decoder):
    """The same layers over [T, D], in float16; logits too, half of what the sampler would read else."""

    LOGITS_TYPE = TensorProto.FLOAT16

    def _embed(self) -> str:
        return self._weights.embed("input_ids")  # [T, D]

    def _needed(self, layer: int, attended: str, stream: str) -> tuple[str, str]:
        """Behind the last attention only the rows of wanted logits matter: few of a prefill's. [n, ...]"""
        if layer + 1 < self._sizes.num_layers:
            return attended, stream
        chosen = [
            self._writer.node("Gather", [name, "logits_indices"], f"chosen.{what}", axis=0)
            for name, what in ((attended, "attended"), (stream, "stream"))
        ]
        return chosen[0], chosen[1]

    def _silu(self, x: str, p: str) -> str:
        """QuickGelu is x * sigmoid(alpha x): SiLU in one launch."""
        return self._writer.node("QuickGelu", [x], p + "silu", domain=_MICROSOFT, alpha=1.0)

    def _logits(self, normed: str) -> None:
        self._weights.head(normed, "logits")
