"""Staging: a step's small arrays on their way to the device, side by side in pinned memory, sent by one copy.

Must not know what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 256  # bytes; what a kernel may want of a pointer
RING = 4  # buffers: one is filled while the copies out of the others are under way


class Staging:
    """The same shapes always come to lie at the same addresses, so a captured graph finds them again."""

    def __init__(self, capacity: int, stream: Any) -> None:
        """``capacity``: bytes of the largest step, alignment apart."""
        size = capacity + 16 * ALIGNMENT
        self._ring = [np.frombuffer(cp.cuda.alloc_pinned_memory(size), np.uint8, size) for _ in range(RING)]
        self._copied = [cp.cuda.Event(disable_timing=True) for _ in range(RING)]
        self._device = cp.empty(size, cp.uint8)
        self._stream = stream
        self._turn = 0

    def send(self, arrays: Sequence[NDArray[Any]]) -> list[int]:
        """Enqueues the copy of all ``arrays``; their device addresses, good until the next ``send``."""
        buffer, copied = self._ring[self._turn], self._copied[self._turn]
        copied.synchronize()  # of RING sends ago: over, unless somebody sends without ever waiting
        self._turn = (self._turn + 1) % RING
        addresses, end = [], 0
        for array in arrays:
            addresses.append(self._device.data.ptr + end)
            buffer[end : end + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        self._device.data.copy_from_host_async(buffer.ctypes.data, end, self._stream)
        copied.record(self._stream)
        return addresses
