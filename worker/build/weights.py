"""How matrices enter the graph: as float32, or as 8-bit blocks. One class each, the same three methods.

Knows ONNX operators for multiplying and looking up; must not know attention or the order of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from producer.errors import UsageError
from worker.build.gguf_source import GgufSource
from worker.build.onnx_writer import OnnxWriter
from worker.build.quantize import BLOCK, Blocks, concatenate, quantize

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"  # absent when the head is the embedding transposed (tied)


class Weights(Protocol):
    """Shapes: T tokens, D hidden size, V vocabulary."""

    def embed(self, ids: str) -> str:
        """i64[T, 1] -> f32[T, 1, D]."""

    def project(self, x: str, tensors: Sequence[str], out: str) -> str:
        """x @ concatenate(tensors).T; f32[T, 1, columns] -> f32[T, 1, rows]."""

    def head(self, x: str, out: str) -> str:
        """f32[n, D] -> f32[n, V]."""


class FloatWeights:
    """Dequantised exactly to float32."""

    def __init__(self, writer: OnnxWriter, source: GgufSource) -> None:
        self._writer, self._source = writer, source

    def embed(self, ids: str) -> str:
        table = self._writer.constant(EMBEDDING, self._source.matrix(EMBEDDING).floats())  # [V, D]
        return self._writer.node("Gather", [table, ids], "embedded", axis=0)

    def project(self, x: str, tensors: Sequence[str], out: str) -> str:
        rows = np.concatenate([self._source.matrix(tensor).floats() for tensor in tensors])
        weight = self._writer.constant(f"{out}.weight", rows.T)  # [columns, rows]
        return self._writer.node("MatMul", [x, weight], out)

    def head(self, x: str, out: str) -> str:
        """Gemm takes the matrix as [V, D], so a tied head shares the embedding's bytes on disk."""
        if not self._source.has(HEAD):
            return self._writer.node("Gemm", [x, EMBEDDING], out, transB=1)
        table = self._writer.constant(HEAD, self._source.matrix(HEAD).floats())
        return self._writer.node("Gemm", [x, table], out, transB=1)


class Q8Weights:
    """8-bit blocks of 32; activations are rounded to 8 bits per block too (accuracy_level 4)."""

    _MICROSOFT = "com.microsoft"
    _INT8_ACTIVATIONS = 4  # accuracy_level; level 0 takes 20 times as long on a CPU

    def __init__(self, writer: OnnxWriter, source: GgufSource) -> None:
        self._writer, self._source = writer, source

    def embed(self, ids: str) -> str:
        blocks = self._blocks(EMBEDDING)
        codes, scales, zeros = self._store(EMBEDDING, blocks)
        table = self._writer.view(f"{EMBEDDING}.table", codes, [len(blocks.codes), blocks.columns])
        inputs = [table, ids, scales, zeros]
        return self._writer.node(
            "GatherBlockQuantized", inputs, "embedded",
            domain=self._MICROSOFT, bits=8, block_size=BLOCK, gather_axis=0, quantize_axis=1,
        )  # fmt: skip

    def project(self, x: str, tensors: Sequence[str], out: str) -> str:
        blocks = concatenate([self._blocks(tensor) for tensor in tensors])
        return self._multiply(x, out, blocks, f"{out}.weight")

    def head(self, x: str, out: str) -> str:
        tensor = HEAD if self._source.has(HEAD) else EMBEDDING
        return self._multiply(x, out, self._blocks(tensor), tensor)

    def _multiply(self, x: str, out: str, blocks: Blocks, name: str) -> str:
        return self._writer.node(
            "MatMulNBits", [x, *self._store(name, blocks)], out,
            domain=self._MICROSOFT, K=blocks.columns, N=len(blocks.codes), bits=8, block_size=BLOCK,
            accuracy_level=self._INT8_ACTIVATIONS,
        )  # fmt: skip

    def _store(self, name: str, blocks: Blocks) -> tuple[str, str, str]:
        return (
            self._writer.constant(f"{name}.codes", blocks.codes),
            self._writer.constant(f"{name}.scales", blocks.scales),
            self._writer.constant(f"{name}.zeros", blocks.zeros),
        )

    def _blocks(self, tensor: str) -> Blocks:
        stored = self._source.matrix(tensor)
        if stored.columns % BLOCK:
            raise UsageError(
                f"{self._source.path}: tensor '{tensor}' has rows of {stored.columns} values, no multiple of "
                f"{BLOCK}: q8 is not possible; use fp32."
            )
        return quantize(stored)
