"""What a model folder is built of: sizes, metadata under GGUF's keys, matrices under GGUF's names.

A GGUF file is one such source; numbers drawn at random in a given shape are another (benchmarks).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from producer.errors import UsageError

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Architecture:
    """The sizes and constants of a llama decoder."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context_length: int
    norm_epsilon: float
    inverse_frequencies: tuple[float, ...]  # [head_size / 2] rotary angles per position, scaling applied


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One tensor as the source holds it: rows of blocks (bytes) or rows of floats."""

    name: str
    rows: NDArray[Any]  # [rows, bytes] u8 when quantised, else [rows, columns] or [columns]
    kind: GGMLQuantizationType

    @property
    def columns(self) -> int:
        """Values in a row."""
        if self.rows.dtype != np.uint8:
            return int(self.rows.shape[-1])
        return quants.quant_shape_from_byte_shape(self.rows.shape, self.kind)[-1]

    def floats(self) -> Floats:
        """The exact values the blocks stand for, [rows, columns] f32."""
        try:
            return np.ascontiguousarray(quants.dequantize(self.rows, self.kind), dtype=np.float32)
        except NotImplementedError as error:
            raise UsageError(
                f"tensor '{self.name}' is stored as {self.kind.name}, which cannot be read: choose a GGUF of "
                "another quantisation, such as Q8_0 or Q4_K_M."
            ) from error


class Source(Protocol):
    """Where a folder's sizes, metadata and weights come from."""

    path: Path  # for messages
    architecture: Architecture

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value, or ``default`` where the source does not have it."""

    def text(self, key: str) -> str:
        """A metadata value that must be there, as text. UsageError without it."""

    def has(self, tensor: str) -> bool:
        """Whether the source holds a tensor of this name."""

    def matrix(self, tensor: str) -> StoredMatrix:
        """A tensor; q and k rows in half-split rotary order. UsageError if it is missing."""
