"""OrtModel: a model folder run by ONNX Runtime on the CPU, with its pool of cache blocks.

Owns the session, the pool and the binding of arrays to the graph. Must not know rows, sampling or text.
"""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from producer.errors import UsageError
from worker.batch import Batch
from worker.blocks import blocks_for
from worker.folder import ModelFolder
from worker.memory import available_bytes, is_lack
from worker.token_rows import Ids, TokenRows, split

Floats = NDArray[np.float32]

_OLDEST_RUNTIME = (1, 28)  # before it, Attention's nonpad_kv_seqlen gives silently wrong results on the CPU
_CPU = "CPUExecutionProvider"
_MAX_STEP_TOKENS = 4096  # bounds what a run holds for each token; attention's share is bounded by splitting
_GATHERED_BYTES = 256 << 20  # most memory for the keys and values gathered by one run
_ROUND_TRIPS = 3  # a gathered block is read in the pool, written side by side, read by attention


class OrtModel:
    """Tokens in, logits out (worker.protocols.Model). Not for use by several threads at once.

    A row's logits are the same bits whatever else is in the batch, however its prompt was cut into chunks and
    wherever its blocks lie: tests/worker/test_model_bits.py.
    """

    def __init__(
        self,
        folder: ModelFolder,
        *,
        threads: int | None = None,
        kv_memory_bytes: int | None = None,
        num_blocks: int | None = None,
        max_batch: int = 32,
    ) -> None:
        """The pool has ``num_blocks`` blocks, else what fits ``kv_memory_bytes``, else room for ``max_batch``
        rows of full length as far as half of the free memory goes. Memory is taken as blocks are first used.

        Raises UsageError when the runtime and the folder do not fit together, or memory is short.
        """
        if folder.kind != "cpu-paged":
            raise UsageError(
                f"{folder.path} is a {folder.kind} model: run it with --device cuda, or build one for the "
                "CPU with `worker build`."
            )
        self.vocab_size = folder.vocab_size
        self.context_length = folder.context_length
        self.block_size = folder.block_size
        self.max_step_tokens = _MAX_STEP_TOKENS
        self._names = folder.names
        self._session = open_session(folder, threads)
        self._pool = _allocate_pool(folder, num_blocks or count_blocks(folder, kv_memory_bytes, max_batch))
        self._binding = self._session.io_binding()
        self._bind_pool(folder)
        self._logits: Floats = np.empty((0, self.vocab_size), np.float32)
        self._run_cost, self._max_blocks = _split_limits(folder)

    @property
    def num_blocks(self) -> int:
        return int(self._pool.shape[2])

    def run(self, batch: Batch) -> Floats:
        """Stores the batch's keys and values; the logits are valid until the next run. [n, vocab_size]

        MemoryError where there is none left, whatever it was that failed for it.
        """
        assert 0 < len(batch.input_ids) <= self.max_step_tokens
        try:
            return self._run_batch(batch)
        except Exception as error:
            if is_lack(error):
                raise MemoryError(f"no memory left for a step: {error}") from error
            raise

    def _run_batch(self, batch: Batch) -> Floats:
        rows = TokenRows.unpack(batch, self.block_size)
        self._clear(rows.new_blocks)
        logits = self._room_for(len(batch.logits_rows))
        runs = split(rows.widths, self._run_cost, self._max_blocks)
        if len(runs) == 1:
            self._run(rows, batch.logits_rows, logits)
            return logits
        return self._run_parts(rows, runs, batch.logits_rows, logits)

    def _run_parts(self, rows: TokenRows, runs: list[Ids], wanted: Ids, logits: Floats) -> Floats:
        """Several runs, one after the other; the logits come back in the order of ``wanted``."""
        place = np.empty(len(rows.input_ids), np.int64)  # [T] where each token stands in its run
        owner = np.empty(len(rows.input_ids), np.int64)  # [T] which run that is
        for index, tokens in enumerate(runs):
            place[tokens], owner[tokens] = np.arange(len(tokens)), index
        done, order = 0, []
        for index, tokens in enumerate(runs):
            chosen = np.flatnonzero(owner[wanted] == index)
            self._run(rows.take(tokens), place[wanted[chosen]], logits[done : done + len(chosen)])
            done += len(chosen)
            order.append(chosen)
        return logits[np.argsort(np.concatenate(order))]

    def _run(self, rows: TokenRows, wanted: Ids, logits: Floats) -> None:
        """One run of the graph; ``wanted`` are indices into these rows, ``logits`` [n, vocab] is written."""
        inputs: dict[str, NDArray[Any]] = {
            "input_ids": rows.input_ids,
            "position_ids": rows.positions,
            "slot_mapping": rows.slots,
            "block_table": rows.tables,
            "logits_indices": wanted,
        }
        for word, array in inputs.items():
            self._bind(self._binding.bind_input, self._names[word], array)
        self._bind(self._binding.bind_output, self._names["logits"], logits)
        self._session.run_with_iobinding(self._binding)

    def _bind(self, bind: Any, name: str, array: NDArray[Any]) -> None:
        """Hands the graph an array's memory: no copy and no reference, the caller keeps the array alive."""
        assert array.flags.c_contiguous
        bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)

    def _bind_pool(self, folder: ModelFolder) -> None:
        """Each layer's cache goes in and out through the same memory, bound once: it is edited in place."""
        for kind, (past, present) in enumerate(
            (("past_key_names", "present_key_names"), ("past_value_names", "present_value_names"))
        ):
            for layer, name in enumerate(folder.layer_names(past)):
                self._bind(self._binding.bind_input, name, self._pool[layer, kind])
            for layer, name in enumerate(folder.layer_names(present)):
                self._bind(self._binding.bind_output, name, self._pool[layer, kind])

    def _clear(self, blocks: Ids) -> None:
        """Zeroes the values of blocks that a row begins to fill.

        Attention weighs the unwritten rest of a block with 0, and 0 times a NaN left there by another row is
        NaN. (Keys need no care: their scores are overwritten, not multiplied.)
        """
        self._pool[:, 1, blocks] = 0

    def _room_for(self, num_logits: int) -> Floats:
        if num_logits > len(self._logits):
            self._logits = np.empty((num_logits, self.vocab_size), np.float32)
        return self._logits[:num_logits]


def too_old() -> str | None:
    """Why the installed runtime cannot run models on the CPU, and what to do; None when it can."""
    if tuple(int(part) for part in ort.__version__.split(".")[:2]) >= _OLDEST_RUNTIME:
        return None
    return (
        f"ONNX Runtime {ort.__version__} computes paged attention wrongly on the CPU, at least "
        f"{'.'.join(map(str, _OLDEST_RUNTIME))} is needed: pip install '.[cpu]' in livebatch's folder, "
        "in a new environment"
    )


def open_session(folder: ModelFolder, threads: int | None) -> ort.InferenceSession:
    """An ONNX Runtime session on the CPU. UsageError when the runtime is too old or cannot load the graph."""
    if (reason := too_old()) is not None:
        raise UsageError(reason)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or len(os.sched_getaffinity(0))
    options.log_severity_level = 3  # errors
    options.enable_mem_pattern = False  # plans memory per input shape, and hardly two steps have the same
    # Waiting threads sleep instead of spinning: the sampler, Redis and the parent want the cores too.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    try:
        session = ort.InferenceSession(folder.graph.path, options, providers=[_CPU])
    except Exception as error:  # the runtime's exceptions share no base class of their own
        raise UsageError(
            f"ONNX Runtime cannot load {folder.graph.path}: {error}. Build the folder again."
        ) from error
    assert session.get_providers() == [_CPU]
    return session


def count_blocks(folder: ModelFolder, kv_memory_bytes: int | None, max_batch: int) -> int:
    """Blocks for the pool, the bin included. UsageError where not even one row of one block fits."""
    size = _block_bytes(folder)
    if kv_memory_bytes is None:
        wanted = 1 + max_batch * blocks_for(folder.context_length, folder.block_size)
        blocks = min(wanted, available_bytes() // 2 // size)
    else:
        blocks = kv_memory_bytes // size
    if blocks < 2:
        raise UsageError(
            f"no room for a KV cache: a block takes {size:,} bytes and two are the least. "
            "Free some memory, or raise --kv-memory."
        )
    return blocks


def _block_bytes(folder: ModelFolder) -> int:
    """Keys and values of one block in all layers, float32."""
    return 2 * 4 * folder.num_layers * folder.block_size * folder.num_kv_heads * folder.head_size


def _allocate_pool(folder: ModelFolder, num_blocks: int) -> Floats:
    """Zeros [layers, 2 (keys, values), blocks, block_size, kv_heads, head_size], paged in on first use."""
    shape = (folder.num_layers, 2, num_blocks, folder.block_size, folder.num_kv_heads, folder.head_size)
    try:
        return np.zeros(shape, np.float32)
    except MemoryError as error:
        raise UsageError(
            f"no memory for a KV cache of {num_blocks} blocks ({4 * math.prod(shape):,} bytes): "
            "lower --kv-memory."
        ) from error


def _split_limits(folder: ModelFolder) -> tuple[int, int]:
    """(what another run costs, most blocks gathered by one run), both in blocks of one token's table.

    Both a run's weights and the gathered blocks cross the memory bus, which is what bounds a step on a CPU.
    """
    return (
        folder.graph.data_bytes // (_ROUND_TRIPS * _block_bytes(folder)),
        _GATHERED_BYTES * folder.num_layers // _block_bytes(folder),
    )
