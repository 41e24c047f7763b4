"""The bare model: decode steps that feed themselves on the device, with no host between them.

The ceiling of any engine on this graph: what a captured step takes, and a naive pick of the largest logit
(one block a row). Its tables are no wider than its rows need, nothing is scheduled, nobody joins or leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import cupy as cp
import numpy as np

from worker.blocks import blocks_for
from worker.cuda.graph import Graph

FIRST_ID = 1000  # of our captured graphs; the product counts its own from 1
THREADS = 1024
NUMBERS = {
    "FLOAT": "typedef float Stored; __device__ float number(Stored x) { return x; }",
    "FLOAT16": """typedef unsigned short Stored;
__device__ float number(Stored x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }""",
    "BFLOAT16": """typedef unsigned short Stored;
__device__ float number(Stored x) { return __uint_as_float((unsigned)x << 16); }""",
}
KERNELS = r"""
extern "C" __global__ void pick(const Stored* logits, int vocab, long long* ids) {
  __shared__ float values[1024];
  __shared__ int places[1024];
  const Stored* row = logits + (long long)blockIdx.x * vocab;
  int t = threadIdx.x, place = 0;
  float best = -3e38f;
  for (int i = t; i < vocab; i += blockDim.x) {
    float value = number(row[i]);
    if (value > best) { best = value; place = i; }
  }
  values[t] = best;
  places[t] = place;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (t < half && values[t + half] > values[t]) {
      values[t] = values[t + half];
      places[t] = places[t + half];
    }
    __syncthreads();
  }
  if (t == 0) ids[blockIdx.x] = places[0];
}
extern "C" __global__ void advance(int* past, int rows) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < rows) past[i] += 1;
}
"""


@dataclass(frozen=True, slots=True)
class Rate:
    """Of a loop: tokens a second by the host's clock, milliseconds a step by the device's."""

    tok_s: float
    step_ms: float


class RawLoop:
    """``rows`` rows that begin behind ``prompt`` tokens. Their cache holds whatever lies there."""

    def __init__(self, graph: Graph, rows: int, prompt: int, output: int) -> None:
        code = cp.RawModule(code=NUMBERS[graph.folder.logits_dtype] + KERNELS)
        self._pick, self._advance = code.get_function("pick"), code.get_function("advance")
        self._graph, self._rows, self._prompt = graph, rows, prompt
        self._width = blocks_for(prompt + output, graph.folder.block_size)
        if rows * self._width >= graph.num_blocks:
            raise ValueError(f"{rows} rows of {self._width} blocks: the cache has {graph.num_blocks}")
        with graph.stream:
            self._ids = cp.full(rows, 5, cp.int64)
            self._past = cp.full(rows, prompt, cp.int32)
            self._cumulative = cp.arange(rows + 1, dtype=cp.int32)
            self._table = cp.arange(1, 1 + rows * self._width, dtype=cp.int32)
            self._indices = cp.arange(rows, dtype=graph.index_type)
            self._logits = cp.empty(rows * graph.logits_bytes, cp.uint8)
        graph.stream.synchronize()
        self._binding = graph.new_binding()
        self._bind()

    def _bind(self) -> None:
        graph, rows = self._graph, self._rows
        for word, array, shape in (
            ("input_ids", self._ids, (rows,)),
            ("cumulative_sequence_lengths", self._cumulative, (rows + 1,)),
            ("past_sequence_lengths", self._past, (rows,)),
            ("block_table", self._table, (rows, self._width)),
            ("logits_indices", self._indices, (rows,)),
        ):
            graph.bind(self._binding, word, array.data.ptr, shape)
        graph.bind_bounds(self._binding, 1, self._width * graph.folder.block_size)
        graph.bind_logits(self._binding, self._logits.data.ptr, rows)

    def rate(self, steps: int, graph_id: int) -> Rate:
        """``graph_id`` EAGER: every node launched anew, else captured at the first use."""
        stream = self._graph.stream
        for _ in range(3):
            self._step(graph_id)
        with stream:
            self._past.fill(self._prompt)
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        stream.synchronize()
        begun = perf_counter()
        begin.record(stream)
        for _ in range(steps):
            self._step(graph_id)
        end.record(stream)
        stream.synchronize()
        seconds = perf_counter() - begun
        return Rate(steps * self._rows / seconds, cp.cuda.get_elapsed_time(begin, end) / steps)

    def _step(self, graph_id: int) -> None:
        vocab, rows = np.int32(self._graph.folder.vocab_size), np.int32(self._rows)
        self._graph.run(self._binding, graph_id)
        with self._graph.stream:
            self._pick((self._rows,), (THREADS,), (self._logits, vocab, self._ids))
            self._advance((1,), (THREADS,), (self._past, rows))
