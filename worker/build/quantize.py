"""GGUF blocks as 8-bit blocks of 32 with a scale and a zero point, the layout of com.microsoft.MatMulNBits.

NumPy only. value = (code - zero) * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from worker.build.source import StoredMatrix

BLOCK = 32  # values that share a scale, in GGUF's Q4_x and Q8_0 as here


@dataclass(frozen=True, slots=True)
class Blocks:
    """An 8-bit matrix of ``rows`` x ``columns``, columns a multiple of BLOCK."""

    codes: NDArray[np.uint8]  # [rows, columns / 32, 32]
    scales: NDArray[np.float32]  # [rows, columns / 32]
    zeros: NDArray[np.uint8]  # [rows, columns / 32]

    @property
    def columns(self) -> int:
        return int(self.codes.shape[1]) * BLOCK

    def floats(self) -> NDArray[np.float32]:
        """The values the codes stand for, [rows, columns] f32."""
        values = (self.codes.astype(np.float32) - self.zeros[..., None]) * self.scales[..., None]
        return values.reshape(len(values), -1)


def quantize(matrix: StoredMatrix) -> Blocks:
    """8-bit blocks of a stored matrix: exact for Q8_0, else off by at most a step of (max - min) / 255."""
    if matrix.kind == GGMLQuantizationType.Q8_0:
        return _from_q8_0(matrix.rows)
    return quantize_floats(matrix.floats())


def quantize_floats(values: NDArray[np.float32]) -> Blocks:
    """Asymmetric 8-bit blocks of [rows, columns] f32. A Q4 block's 16 even steps fall on every 17th code."""
    blocks = values.reshape(len(values), -1, BLOCK)
    low = np.minimum(blocks.min(-1), 0)
    high = np.maximum(blocks.max(-1), 0)
    scales = np.maximum(high - low, np.finfo(np.float32).tiny) / np.float32(255)
    zeros = np.rint(-low / scales)
    codes = np.clip(np.rint(blocks / scales[..., None]) + zeros[..., None], 0, 255)
    return Blocks(codes.astype(np.uint8), scales, zeros.astype(np.uint8))


def concatenate(parts: list[Blocks]) -> Blocks:
    """Matrices of the same width stacked row upon row."""
    return Blocks(
        np.concatenate([part.codes for part in parts]),
        np.concatenate([part.scales for part in parts]),
        np.concatenate([part.zeros for part in parts]),
    )


def _from_q8_0(rows: NDArray[np.uint8]) -> Blocks:
    """Q8_0 block: f16 scale, then 32 signed bytes."""
    blocks = rows.reshape(len(rows), -1, 2 + BLOCK)
    scales = blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32)
    codes = blocks[..., 2:] ^ np.uint8(0x80)  # two's complement to offset by 128
    return Blocks(codes, scales, np.full(scales.shape, 128, np.uint8))
