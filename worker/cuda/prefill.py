"""Prefill: rows of several tokens each, an eager run of whatever shape they have."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from kernels.staging import Staging
from worker.batch import Batch
from worker.cuda.graph import Graph
from worker.divide import each_row

Addresses = NDArray[np.uint64]


class Prefill:
    """``max_rows`` bounds the logits that are asked for, ``max_tokens`` the run."""

    def __init__(self, graph: Graph, max_rows: int, max_tokens: int, max_width: int) -> None:
        self._room = max_rows + 1 if graph.folder.is_pruned else max_tokens  # 1: what nobody wanted
        self._graph = graph
        self._staging = Staging(16 * max_tokens + 4 * max_rows * (max_width + 2), graph.stream)
        self._logits = cp.empty(self._room * graph.logits_bytes, cp.uint8)
        self._binding = graph.new_binding()

    def run(self, batch: Batch, begin: int = 0) -> Addresses:
        """Addresses [n] of the logits, which are kept from row ``begin`` on."""
        graph, wanted = self._graph, batch.logits_rows
        if not len(wanted):  # the graph gives some at least
            wanted = np.zeros(1, np.int64)
        given, places = len(wanted), np.arange(len(batch.logits_rows))
        if not graph.folder.is_pruned:
            given, places = len(batch.input_ids), batch.logits_rows
        assert begin + given <= self._room, "the runtime would write past the logits' memory"
        address = self._logits.data.ptr + begin * graph.logits_bytes
        self._bind(batch, wanted)
        graph.bind_logits(self._binding, address, given)
        graph.run(self._binding)
        return np.uint64(address) + places.astype(np.uint64) * np.uint64(graph.logits_bytes)

    def run_each(self, batch: Batch) -> Addresses:
        """``run``, every row by itself: its results then do not depend on who else is in the batch."""
        addresses: list[Addresses] = []
        begin = 0
        for row in each_row(batch):
            addresses.append(self.run(row, begin))
            begin += len(row.logits_rows) if self._graph.folder.is_pruned else len(row.input_ids)
        return np.concatenate(addresses)

    def _bind(self, batch: Batch, wanted: NDArray[np.int64]) -> None:
        graph, counts = self._graph, np.diff(batch.cumulative)
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": batch.input_ids,
            "cumulative_sequence_lengths": batch.cumulative,
            "past_sequence_lengths": batch.past,
            "block_table": batch.block_table,
            "logits_indices": wanted.astype(graph.index_type),
        }
        addresses = self._staging.send(list(inputs.values()))
        for (word, array), address in zip(inputs.items(), addresses, strict=True):
            graph.bind(self._binding, word, address, array.shape)
        graph.bind_bounds(self._binding, int(counts.max()), int((counts + batch.past).max()))
