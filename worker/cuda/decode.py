"""Decode: rows of one token each, a captured graph for every shape they are padded to.

Shapes are few: rows in buckets, tables of 8, 32, 128, ... blocks (a wider table than need be costs nothing:
2.68 ms a step of 256 rows with 4 blocks, 2.69 with 32, on an H200). A padding row points at block 0, the bin.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from kernels.cuda import bucket_of
from kernels.feed import Feed
from kernels.staging import Staging
from worker.batch import Batch
from worker.cuda.graph import EAGER, Graph

LEAST_WIDTH, WIDER = 8, 4  # blocks, and the step from one width to the next


class Shape(NamedTuple):
    """Of a captured run."""

    rows: int
    width: int  # blocks of a row's table


class Decode:
    """Tokens come from the host or, where it does not know them yet, from ``feed``."""

    def __init__(self, graph: Graph, feed: Feed, max_rows: int, max_width: int, *, one_shape: bool) -> None:
        """``one_shape``: the largest for every step, so that a row's results do not depend on the batch."""
        largest = bucket_of(max_rows)
        self._only = Shape(largest, max_width) if one_shape else None
        self._graph = graph
        self._feed = feed
        self._max_width = max_width
        self._staging = Staging(4 * largest * (max_width + 3), graph.stream)
        self._input_ids = cp.zeros(largest, cp.int64)
        self._cumulative = cp.arange(largest + 1, dtype=cp.int32)
        self._indices = cp.arange(largest, dtype=graph.index_type)
        self._logits = cp.empty(largest * graph.logits_bytes, cp.uint8)
        self._bindings: dict[Shape, tuple[Any, int]] = {}  # and the id of its graph

    def run(self, batch: Batch) -> NDArray[np.uint64]:
        """Addresses of every row's logits. [B]"""
        shape = self._shape_of(batch)
        num_rows, width = batch.block_table.shape
        table = np.zeros(shape, np.int32)
        table[:num_rows, :width] = batch.block_table
        past, tokens, slots = np.zeros((3, shape.rows), np.int32)
        slots[num_rows:] = -1
        past[:num_rows], tokens[:num_rows], slots[:num_rows] = batch.past, batch.input_ids, batch.slots
        addresses = self._staging.send([past, table, tokens, slots])
        self._feed.enqueue(addresses[2], addresses[3], self._input_ids, shape.rows)
        if shape not in self._bindings:
            graph_id = 1 + len(self._bindings) if self._graph.captures else EAGER
            self._bindings[shape] = self._bind(shape, addresses[0], addresses[1]), graph_id
        self._graph.run(*self._bindings[shape])
        rows = np.arange(num_rows, dtype=np.uint64)
        return np.uint64(self._logits.data.ptr) + rows * np.uint64(self._graph.logits_bytes)

    def _shape_of(self, batch: Batch) -> Shape:
        if self._only:
            return self._only
        num_rows, needed = batch.block_table.shape
        width = LEAST_WIDTH
        while width < needed:
            width *= WIDER
        return Shape(bucket_of(num_rows), min(width, self._max_width))

    def _bind(self, shape: Shape, past: int, table: int) -> Any:
        graph, rows = self._graph, shape.rows
        binding = graph.new_binding()
        graph.bind(binding, "input_ids", self._input_ids.data.ptr, (rows,))
        graph.bind(binding, "cumulative_sequence_lengths", self._cumulative.data.ptr, (rows + 1,))
        graph.bind(binding, "past_sequence_lengths", past, (rows,))
        graph.bind(binding, "block_table", table, shape)
        graph.bind(binding, "logits_indices", self._indices.data.ptr, (rows,))
        graph.bind_bounds(binding, 1, shape.width * graph.folder.block_size)
        graph.bind_logits(binding, self._logits.data.ptr, rows)
        return binding
