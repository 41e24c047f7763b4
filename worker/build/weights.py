"""How weights enter the graph: as floats, or as 8-bit blocks. One class each, the same methods.

Knows ONNX operators for multiplying and looking up; must not know attention or the order of layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from producer.errors import UsageError
from worker.build.onnx_writer import OnnxWriter
from worker.build.quantize import BLOCK, Blocks, concatenate, quantize
from worker.build.source import Source

EMBEDDING = "token_embd.weight"
HEAD = "output.weight"  # absent when the head is the embedding transposed (tied)


class Weights(Protocol):
    """Shapes: T tokens, D hidden size, V vocabulary; "..." is 1 where a token is a row of its own."""

    def embed(self, ids: str) -> str:
        """i64[T, ...] -> [T, ..., D]."""

    def vector(self, tensor: str) -> str:
        """The weights of a norm, [D]."""

    def project(self, x: str, tensors: Sequence[str], out: str) -> str:
        """x @ concatenate(tensors).T; [T, ..., columns] -> [T, ..., rows]."""

    def head(self, x: str, out: str) -> str:
        """[n, D] -> [n, V]."""


class FloatWeights:
    """Dequantised exactly to float32, or rounded to float16."""

    def __init__(
        self, writer: OnnxWriter, source: Source, dtype: type[np.float32 | np.float16] = np.float32
    ) -> None:
        self._writer, self._source, self._dtype = writer, source, dtype

    def embed(self, ids: str) -> str:
        table = self._writer.constant(EMBEDDING, self._rows([EMBEDDING]))  # [V, D]
        return self._writer.node("Gather", [table, ids], "embedded", axis=0)

    def vector(self, tensor: str) -> str:
        return self._writer.constant(tensor, self._rows([tensor]))

    def project(self, x: str, tensors: Sequence[str], out: str) -> str:
        weight = self._writer.constant(f"{out}.weight", self._rows(tensors).T)  # [columns, rows]
        return self._writer.node("MatMul", [x, weight], out)

    def head(self, x: str, out: str) -> str:
        """Gemm takes the matrix as [V, D], so a tied head shares the embedding's bytes on disk."""
        if not self._source.has(HEAD):
            return self._writer.node("Gemm", [x, EMBEDDING], out, transB=1)
        table = self._writer.constant(HEAD, self._rows([HEAD]))
        return self._writer.node("Gemm", [x, table], out, transB=1)

    def _rows(self, tensors: Sequence[str]) -> NDArray[Any]:
        """Tensors of the same width, row upon row."""
        parts = [self._source.matrix(tensor).floats().astype(self._dtype, copy=False) for tensor in tensors]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


class Q8Weights:
    """8-bit blocks of 32; activations are rounded to 8 bits per block too (accuracy_level 4)."""

    _MICROSOFT = "com.microsoft"
    _INT8_ACTIVATIONS = 4  # accuracy_level; level 0 takes 20 times as long on a CPU

    def __init__(self, writer: OnnxWriter, source: Source) -> None:
        self._writer, self._source = writer, source

    def vector(self, tensor: str) -> str:
        return self._writer.constant(tensor, self._source.matrix(tensor).floats())

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
