"""Feed: the kernel that gives a decode step its tokens, without the host having seen them."""

from __future__ import annotations

from importlib import resources
from typing import Any

import cupy as cp
import numpy as np

from kernels.cuda import BatchedSampler
from kernels.packed import ROW

THREADS = 256
LENGTH_AT = dict(ROW.fields or {})["length"][1]  # byte offset in a row


class Feed:
    """Reads the histories that ``sampler`` keeps by slot, on its stream."""

    def __init__(self, sampler: BatchedSampler) -> None:
        code = resources.files("kernels").joinpath("feed.cu").read_text()
        self._function = cp.RawModule(code=code).get_function("feed")
        self.stream = sampler.stream
        self._flush = sampler.flush
        rows, tokens = sampler.history
        sizes = (np.int64(ROW.itemsize), np.int32(LENGTH_AT), np.int64(tokens.shape[1]))
        self._history = (rows, tokens, *sizes)

    def enqueue(self, given: int, slots: int, input_ids: Any, count: int) -> None:
        """``given``, ``slots``: device addresses of i32[count]; writes ``input_ids`` i64[>= count].

        A given token below 0 stands for the last one of its slot; slot -1 is no row and gets 0.
        """
        self._flush()
        arguments = (np.uint64(given), np.uint64(slots), *self._history, input_ids, np.int32(count))
        with self.stream:
            self._function((-(-count // THREADS),), (THREADS,), arguments)
