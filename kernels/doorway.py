"""Doorway: rows that enter and leave their slots between two steps, told to the device together.

A launch and a copy for each took 60 us of the host, and rows that end together are followed by as many.
Owns the order: who leaves goes first. Must not know sampling.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kernels.rows import Status
from kernels.staging import Staging

THREADS = 512
ENDED = np.int32(Status.FAILED)  # a slot without a row
LEAST_BYTES = 4 << 20  # of rows told together


class Doorway:
    """``enter`` and ``leave`` take notes; ``flush`` enqueues one copy and at most two launches."""

    def __init__(
        self, code: Any, largest: int, max_batch: int, parameters: tuple[Any, ...], stream: Any
    ) -> None:
        """``largest``: bytes of the largest row; ``parameters``: the kernels' tables (slots.cu)."""
        self._admit, self._release = code.get_function("admit_rows"), code.get_function("release_rows")
        self._room = max(largest, LEAST_BYTES)
        self._staging = Staging(self._room + 12 * max_batch, stream)
        self._parameters, self._stream = parameters, stream
        self._leaving: list[int] = []
        self._entering: list[tuple[int, int]] = []  # slot, and where its row begins, in i32
        self._rows: list[bytes] = []
        self._size = 0

    def leave(self, slot: int) -> None:
        if self._entering:  # it may be this very slot's row
            self.flush()
        self._leaving.append(slot)

    def enter(self, slot: int, row: bytes) -> None:
        """``row`` as slots.cu reads it, a multiple of 8 bytes long."""
        if self._size + len(row) > self._room:
            self.flush()
        self._entering.append((slot, self._size // 4))
        self._rows.append(row)
        self._size += len(row)

    def flush(self) -> None:
        """Behind what the stream holds, and before what follows."""
        if not self._leaving and not self._entering:
            return
        rows = np.frombuffer(b"".join(self._rows), np.int32)
        notes = [np.array(self._leaving, np.int32), np.array(self._entering, np.int32).reshape(-1, 2)]
        blob, leaving, entering = map(np.uint64, self._staging.send([rows, *notes]))
        with self._stream:
            if self._leaving:
                self._release((len(self._leaving),), (THREADS,), (leaving, ENDED, *self._parameters))
            if self._entering:
                self._admit((len(self._entering),), (THREADS,), (blob, entering, *self._parameters))
        self._leaving, self._entering, self._rows, self._size = [], [], [], 0
