"""The llama decoder as a graph: packed tokens in, logits of the chosen tokens out.

Owns the order of layers and the names of GGUF tensors in them. How matrices are stored is ``weights``'
business, where keys and values live is ``attention``'s. ``Decoder`` is the graph for the CPU, its heir
``CudaDecoder`` (cuda_graph) changes what that device wants otherwise.
"""

from __future__ import annotations

from typing import Protocol

from onnx import TensorProto

from worker.build.onnx_writer import OnnxWriter
from worker.build.source import Source
from worker.build.weights import Weights


class Attention(Protocol):
    """Keys and values of the tokens before, wherever they live."""

    def declare(self) -> None:
        """The graph inputs of a step, and what all layers share."""

    def attend(self, layer: int, qkv: str, out: str) -> str:
        """[T, ..., queries + keys + values] -> [T, ..., queries]; the layer's cache gains the new tokens."""


class Decoder:
    """Builds one graph. Shapes: T tokens, D hidden size, F feed-forward size, n logits rows, V vocabulary."""

    LOGITS_TYPE: int = TensorProto.FLOAT

    def __init__(self, writer: OnnxWriter, source: Source, weights: Weights, attention: Attention) -> None:
        self._writer, self._weights, self._attention = writer, weights, attention
        self._sizes = source.architecture

    def write(self) -> None:
        """Adds every node, input and output to the writer."""
        writer = self._writer
        writer.input("input_ids", TensorProto.INT64, ["tokens"])
        writer.output("logits", self.LOGITS_TYPE, ["num_logits", self._sizes.vocab_size])
        self._attention.declare()
        stream = self._embed()  # [T, 1, D]: the residual stream
        normed = self._first_norm(stream)
        for layer in range(self._sizes.num_layers):
            normed, stream = self._attention_part(layer, normed, stream)
            normed, stream = self._feed_forward_part(layer, normed, stream)
        self._logits(normed)

    def _embed(self) -> str:
        """Every token is a row of its own: [T] -> [T, 1, D]."""
        return self._weights.embed(self._writer.node("Unsqueeze", ["input_ids", "axis.1"], "ids"))

    def _attention_part(self, layer: int, normed: str, stream: str) -> tuple[str, str]:
        p, tensors = f"layer{layer}.", f"blk.{layer}."
        qkv = self._weights.project(normed, [f"{tensors}attn_{part}.weight" for part in "qkv"], p + "qkv")
        attended = self._attention.attend(layer, qkv, p + "attended")
        attended, stream = self._needed(layer, attended, stream)
        added = self._weights.project(attended, [tensors + "attn_output.weight"], p + "attention_out")
        return self._add_and_norm(stream, added, tensors + "ffn_norm.weight")

    def _needed(self, layer: int, attended: str, stream: str) -> tuple[str, str]:
        """What the rest of the layer is computed for: here, every token."""
        return attended, stream

    def _feed_forward_part(self, layer: int, normed: str, stream: str) -> tuple[str, str]:
        """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""
        p, tensors = f"layer{layer}.", f"blk.{layer}."
        gate = self._weights.project(normed, [tensors + "ffn_gate.weight"], p + "gate")  # [T, 1, F]
        up = self._weights.project(normed, [tensors + "ffn_up.weight"], p + "up")
        inner = self._writer.node("Mul", [self._silu(gate, p), up], p + "inner")
        added = self._weights.project(inner, [tensors + "ffn_down.weight"], p + "down")
        last = layer + 1 == self._sizes.num_layers
        return self._add_and_norm(
            stream, added, "output_norm.weight" if last else f"blk.{layer + 1}.attn_norm.weight"
        )

    def _silu(self, x: str, p: str) -> str:
        return self._writer.node("Mul", [x, self._writer.node("Sigmoid", [x], p + "sigmoid")], p + "silu")

    def _first_norm(self, stream: str) -> str:
        return self._writer.node(
            "SimplifiedLayerNormalization", [stream, self._weights.vector("blk.0.attn_norm.weight")],
            "normed", axis=-1, epsilon=self._sizes.norm_epsilon, stash_type=1,
        )  # fmt: skip

    def _add_and_norm(self, stream: str, added: str, tensor: str) -> tuple[str, str]:
        """One fused node: the new residual stream and its RMS norm (Zhang & Sennrich 2019)."""
        normed, summed = added + ".normed", added + ".stream"
        self._writer.node(
            "SkipSimplifiedLayerNormalization", [stream, added, self._weights.vector(tensor)],
            normed, "", "", summed, domain="com.microsoft", epsilon=self._sizes.norm_epsilon,
        )  # fmt: skip
        return normed, summed

    def _logits(self, normed: str) -> None:
        """Only the tokens named in logits_indices reach the head: it is a quarter of a small model's work."""
        writer = self._writer
        writer.input("logits_indices", TensorProto.INT64, ["num_logits"])
        flat = writer.node("Squeeze", [normed, "axis.1"], "final")  # [T, D]
        chosen = writer.node("Gather", [flat, "logits_indices"], "chosen", axis=0)  # [n, D]
        self._weights.head(chosen, "logits")
