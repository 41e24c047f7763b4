"""CudaModel: a paged CUDA folder as the engine's Model. Enqueues runs and waits for nothing.

Owns the division of a step into its two runs, and how much memory the KV cache gets.
"""

from __future__ import annotations

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from kernels.feed import Feed
from producer.errors import UsageError
from worker.batch import Batch, largest
from worker.blocks import blocks_for
from worker.cuda.decode import Decode
from worker.cuda.graph import Graph
from worker.cuda.prefill import Prefill
from worker.divide import divide
from worker.folder import ModelFolder
from worker.memory import is_lack

PREFILL_TOKENS = 8192  # of a run; beyond, a prefill is no faster a token
PREFILL_TOKENS_UNPRUNED = 2048  # where every token gets logits
LEAST_FREE = 64 << 20  # bytes; below, kernels that need some fail to launch and do not say why
KEPT_FREE = 0.1  # of the GPU's memory, for the runtime's arena, the sampler's tables and captured graphs


class CudaModel:
    """Tokens in, addresses of logits out (worker.protocols.Model). For use by one thread.

    Runs on ``feed``'s stream, which is the sampler's.
    """

    def __init__(
        self,
        folder: ModelFolder,
        feed: Feed,
        *,
        device_id: int = 0,
        max_batch: int = 256,
        kv_memory_bytes: int | None = None,
        num_blocks: int | None = None,
        deterministic: bool = False,
    ) -> None:
        """The pool has ``num_blocks`` blocks, else what fits ``kv_memory_bytes``, else what the GPU has left.

        ``deterministic``: a row's logits are the same bits on every run, alone or in any batch, at a price.
        UsageError when the folder does not fit the runtime or the GPU; see also ``worker.cuda.check``.
        """
        self.vocab_size = folder.vocab_size
        self.context_length = folder.context_length
        self.block_size = folder.block_size
        self.max_step_tokens = max_batch + (PREFILL_TOKENS if folder.is_pruned else PREFILL_TOKENS_UNPRUNED)
        self._graph = Graph(folder, device_id, feed.stream, deterministic=deterministic)
        self._deterministic = deterministic
        sizes = (max_batch, blocks_for(folder.context_length, folder.block_size))
        self._warm_up(*sizes)
        self._graph.allocate(num_blocks or self._count_blocks(*sizes, kv_memory_bytes))
        self._prefill = Prefill(self._graph, max_batch, self.max_step_tokens, sizes[1])
        self._decode = Decode(self._graph, feed, *sizes, one_shape=deterministic)

    @property
    def num_blocks(self) -> int:
        return self._graph.num_blocks

    def run(self, batch: Batch) -> NDArray[np.uint64]:
        """Enqueues the prefills, then the decodes. Addresses [n] of the logits, good until the next run.

        MemoryError where the GPU has none left, whatever it was that failed for it.
        """
        try:
            return self._run(batch)
        except Exception as error:
            self._must_live()
            _tell_lack(error)
            raise

    def _run(self, batch: Batch) -> NDArray[np.uint64]:
        parts = divide(batch)
        addresses = np.empty(len(batch.logits_rows), np.uint64)
        if parts.prefill is not None:
            run = self._prefill.run_each if self._deterministic else self._prefill.run
            addresses[~parts.from_decode] = run(parts.prefill)
        if parts.decode is not None:
            addresses[parts.from_decode] = self._decode.run(parts.decode)[parts.decode_rows]
        return addresses

    def _must_live(self) -> None:
        """Ends the process if CUDA is broken: its errors are sticky, nothing would run again."""
        try:
            self._graph.stream.synchronize()
        except cp.cuda.runtime.CUDARuntimeError as error:
            raise SystemExit(f"the GPU failed: {error}") from error

    def _count_blocks(self, max_batch: int, max_width: int, kv_memory_bytes: int | None) -> int:
        """The bin included."""
        size = 2 * self._graph.folder.num_layers * self._graph.block_bytes
        if kv_memory_bytes is None:
            free, total = cp.cuda.runtime.memGetInfo()
            kv_memory_bytes = free - int(KEPT_FREE * total)
        blocks = min(kv_memory_bytes // size, 1 + max_batch * max_width)
        if blocks < 2:
            raise UsageError(
                f"no room for a KV cache on the GPU: a block takes {size:,} bytes and two are the least. "
                "Free some of its memory, lower --max-batch, or raise --kv-memory."
            )
        return blocks

    def _warm_up(self, max_batch: int, max_width: int) -> None:
        """Runs the largest prefill once: the runtime keeps what it took, and need not ask for more later."""
        try:
            prefill = Prefill(self._graph, max_batch, self.max_step_tokens, max_width)
            prefill.run(largest(max_batch, self.max_step_tokens, self.context_length, max_width))
            self._graph.stream.synchronize()
        except Exception as error:
            _tell_lack(error)
            raise


def _tell_lack(error: Exception) -> None:
    """Raises MemoryError if that is why something failed: what lacks memory does not always say so."""
    if is_lack(error) or cp.cuda.runtime.memGetInfo()[0] < LEAST_FREE:
        raise MemoryError(f"the GPU has no memory left: {error}") from error
