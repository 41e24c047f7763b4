"""The CUDA twin of kernels.reference: same names, same signatures, same tokens. Owns the rows' state there.

One launch a step samples every row, whatever the mix of settings (sampler.cu), replayed from a graph per
batch bucket: 13 us of the host's time a step, 22 with a plain launch. Nothing is allocated and nothing is
waited for inside ``enqueue``, but for a bucket's first use; everything is sized at start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import cupy as cp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernels import cuda_code
from kernels.cuda_code import Kernel, LogitsType
from kernels.doorway import Doorway
from kernels.packed import (
    MAX_BIASES,
    MAX_ENDERS,
    MAX_VOCABULARY,
    ROW,
    Packed,
    allowed_bits,
    mask_words,
    pack,
    seen_before,
)
from kernels.reference import Logprobs
from kernels.rows import RowParams, Status

ENTRY = np.dtype(
    [("address", np.uint64), ("slot", np.int32), ("edits", np.int8), ("keep", np.int8), ("top", np.int16)]
)
MASKED_AT = dict(ROW.fields or {})["masked"][1]  # byte offset in a row
MAX_TOP = 512  # candidates are found by 960 group maxima
RESULT_BUFFERS = 4  # steps whose results may be outstanding
OUT_OF_MEMORY = 2  # status of CUDA's runtime and of its driver


def bucket_of(rows: int) -> int:
    """Rows of the graph that serves so many: powers of two, then multiples of 16, where those waste less."""
    return 1 << (rows - 1).bit_length() if 0 < rows <= 16 else -(-rows // 16) * 16


class Results(NamedTuple):
    """What a step's kernels write of n rows: pinned host memory."""

    rows: NDArray[np.int32]  # [n, 2] token, status
    drawn: NDArray[np.float32]  # [n] log-probability of the token
    top_ids: NDArray[np.int32]  # [n, most]
    top: NDArray[np.float32]  # [n, most]

    def of(self, n: int) -> Results:
        return Results(self.rows[:n], self.drawn[:n], self.top_ids[:n], self.top[:n])


@dataclass(slots=True)
class Pending:
    """A step that is on its way: ``wait`` for what it says of its rows."""

    results: Results
    event: Any

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        self.event.synchronize()
        return self.results.rows[:, 0].copy(), self.results.rows[:, 1].astype(np.uint8)

    def logprobs(self) -> Logprobs:
        """Of the rows that asked and have a token, as many of the top as they asked for.

        Within 2e-6 of reference.logprobs. What else the arrays hold means nothing.
        """
        self.event.synchronize()
        results = self.results
        return Logprobs(results.drawn.copy(), results.top_ids.copy(), results.top.copy())


@dataclass(slots=True)
class Tables:
    """Device arrays by slot."""

    rows: Any  # u8[slots, ROW.itemsize]
    tokens: Any  # i32[slots, max_length]
    seen: Any  # i32[slots, max_length]
    times: Any  # i32[slots, max_length]
    places: Any  # i32[slots, V]
    enders: Any  # i32[slots, MAX_ENDERS]
    bias_ids: Any  # i32[slots, MAX_BIASES]
    bias: Any  # f32[slots, MAX_BIASES]
    masks: Any  # u32[slots, ceil(V / 32)]

    def parameters(self) -> tuple[Any, ...]:
        """The kernels' TABLE_PARAMETERS."""
        arrays = tuple(getattr(self, each.name) for each in fields(self))
        return (*arrays, np.int32(self.places.shape[1]), np.int32(self.tokens.shape[1]))


def new_tables(max_batch: int, vocab_size: int, max_length: int) -> Tables:
    rows = np.zeros(max_batch, ROW)
    rows["status"] = Status.FAILED  # a slot without a row
    return Tables(
        rows=cp.asarray(rows.view(np.uint8).reshape(max_batch, -1)),
        tokens=cp.zeros((max_batch, max_length), cp.int32),
        seen=cp.zeros((max_batch, max_length), cp.int32),
        times=cp.zeros((max_batch, max_length), cp.int32),
        places=cp.zeros((max_batch, vocab_size), cp.int32),
        enders=cp.zeros((max_batch, MAX_ENDERS), cp.int32),
        bias_ids=cp.zeros((max_batch, MAX_BIASES), cp.int32),
        bias=cp.zeros((max_batch, MAX_BIASES), cp.float32),
        masks=cp.zeros((max_batch, mask_words(vocab_size)), cp.uint32),
    )


@contextmanager
def lack_told() -> Iterator[None]:
    """MemoryError for CUDA's own errors of that kind, as CuPy raises where its pool finds none."""
    try:
        yield
    except (cp.cuda.runtime.CUDARuntimeError, cp.cuda.driver.CUDADriverError) as error:
        if error.status == OUT_OF_MEMORY:
            raise MemoryError(f"the GPU has no memory left: {error}") from error
        raise


def pinned(shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
    """Host memory that the device writes into directly."""
    size = int(np.prod(shape))
    memory = cp.cuda.alloc_pinned_memory(max(1, size) * np.dtype(kind).itemsize)
    return np.frombuffer(memory, kind)[:size].reshape(shape)


def new_results(rows: int, most_top: int | None) -> Results:
    asked, most = (0, 0) if most_top is None else (rows, most_top)
    return Results(
        pinned((rows, 2), np.int32),
        pinned((asked,), np.float32),
        pinned((asked, most), np.int32),
        pinned((asked, most), np.float32),
    )


class BatchedSampler:
    """Rows by slot; see reference.BatchedSampler. All work is enqueued on ``stream`` (default: a new one).

    Rows of fp32 logits are edited in place, unless their log-probabilities are wanted; fp16 and bf16 rows
    (bf16 as uint16 arrays) are left alone. ``logprobs``: the most top log-probabilities a row may ask for
    beside its token's; None: no row ever asks, and no memory is kept for it.
    ``graphs=False``: plain launches, for a caller that captures a larger graph itself.
    """

    def __init__(
        self,
        max_batch: int,
        vocab_size: int,
        max_length: int,
        *,
        logits: LogitsType = "float32",
        stream: Any = None,
        graphs: bool = True,
        logprobs: int | None = None,
    ) -> None:
        if logprobs is not None and not 0 <= logprobs <= min(MAX_TOP, vocab_size):
            raise ValueError(f"{logprobs} top log-probabilities: at most {min(MAX_TOP, vocab_size)}")
        if vocab_size > MAX_VOCABULARY:
            raise ValueError(f"a vocabulary of {vocab_size} exceeds {MAX_VOCABULARY}")
        self.max_batch, self.vocab_size, self.max_length = max_batch, vocab_size, max_length
        self.stream = stream or cp.cuda.Stream(non_blocking=True)
        self._own_masks: dict[int, NDArray[np.uint32]] = {}  # allow and ban lists by slot
        self._graphs: dict[tuple[int, int, int, bool], Any] | None = {} if graphs else None
        self._most_top = logprobs
        self._live = np.zeros(max_batch, bool)
        self._edited = np.zeros(max_batch, bool)  # rows whose logits may need edits
        with lack_told():
            with self.stream:
                self._allocate(logits)
            self._compile(logits)
            self.stream.synchronize()

    def _allocate(self, logits: LogitsType) -> None:
        n, size = self.max_batch, self.vocab_size
        self._tables = new_tables(n, size, self.max_length)
        self._parameters = self._tables.parameters()
        self._copies = cp.zeros(
            (n, size) if logits != "float32" or self._most_top is not None else (1, 1), cp.float32
        )
        self._entries = cp.zeros(bucket_of(n) * ENTRY.itemsize, cp.uint8)
        self._placed = b""  # what the device's entries hold
        self._results = [new_results(n, self._most_top) for _ in range(RESULT_BUFFERS)]
        self._events = [cp.cuda.Event(disable_timing=True) for _ in range(RESULT_BUFFERS)]
        self._turn = 0

    def _compile(self, logits: LogitsType) -> None:
        shapes = {cuda_code.shape_for(rows) for rows in range(1, self.max_batch + 1)}
        self._samplers = {each: cuda_code.kernel("sampler", "sample_rows", logits, each) for each in shapes}
        self._logprobs: Kernel | None = None
        if self._most_top is not None:
            shape = cuda_code.shape_for(cuda_code.MOST_SOME)
            self._logprobs = cuda_code.kernel("logprobs", "log_probabilities", logits, shape)
        slots = cuda_code.module("slots", logits, cuda_code.WITHOUT_CLUSTERS)
        counts = 3 * self.max_length + MAX_ENDERS + 2 * MAX_BIASES + mask_words(self.vocab_size) + 1
        largest = ROW.itemsize + 4 * counts
        self._doorway = Doorway(slots, largest, self.max_batch, self._parameters, self.stream)

    @property
    def history(self) -> tuple[Any, Any]:
        """Device arrays by slot: rows u8[slots, ROW.itemsize], tokens i32[slots, max_length]."""
        return self._tables.rows, self._tables.tokens

    def admit(self, slot: int, params: RowParams, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        """Start a row; ``output`` holds the tokens it had already generated when it resumes."""
        if not 0 <= slot < self.max_batch or self._live[slot]:
            raise ValueError(f"slot {slot} is taken or not one of {self.max_batch}")
        if len(prompt) + params.max_tokens > self.max_length:
            raise ValueError(f"{len(prompt)} + {params.max_tokens} tokens exceed {self.max_length}")
        has_own = params.allowed_ids or params.banned_ids
        mask = allowed_bits(params, self.vocab_size) if has_own else None
        packed = pack(params, prompt, output, self.vocab_size)
        self._doorway.enter(slot, pack_blob(packed, mask, self.vocab_size))
        if mask is not None:
            self._own_masks[slot] = mask
        self._edited[slot] = params.edited
        self._live[slot] = True  # what is refused above leaves the slot free

    def release(self, slot: int) -> None:
        """End a row: nothing of it reaches the slot's next one."""
        if not self._live[slot]:
            raise KeyError(slot)
        self._own_masks.pop(slot, None)
        self._live[slot] = False
        self._doorway.leave(slot)

    def set_mask(self, slot: int, bits: NDArray[np.uint32] | None) -> None:
        """The grammar mask u32[ceil(V / 32)] of the row's next steps; None: no grammar."""
        own = self._own_masks.get(slot)
        parts = [part for part in (own, bits) if part is not None]
        self._edited[slot] |= bool(parts)
        self._doorway.flush()
        with self.stream:
            if parts:
                self._tables.masks[slot].set(np.bitwise_and.reduce(parts))
            flag = self._tables.rows[slot, MASKED_AT : MASKED_AT + 4]
            cp.cuda.runtime.memsetAsync(flag.data.ptr, int(bool(parts)), 4, self.stream.ptr)

    def flush(self) -> None:
        """Tell the device of rows admitted and released; ``enqueue`` does so by itself."""
        self._doorway.flush()

    def enqueue(
        self,
        addresses: NDArray[np.uint64],
        slots: ArrayLike,
        next_ids: int = 0,
        logprobs: ArrayLike | None = None,
    ) -> Pending:
        """Sample rows whose logits lie at device ``addresses``, behind what the stream already holds.

        ``next_ids``: device address of i64[n], which receives the tokens as the model's next input; 0: none.
        Few different addresses: each has its own graphs. At most RESULT_BUFFERS steps may be outstanding.
        ``logprobs``: i[n] how many top log-probabilities a row wants beside its token's, -1: not even that. A
        step with any is two launches, else one. Copies to the device only when the batch has changed.
        """
        turn, top = self._turn, np.full(len(addresses), -1) if logprobs is None else np.asarray(logprobs)
        if (top > (-1 if self._most_top is None else self._most_top)).any():
            raise ValueError(f"more log-probabilities than the {self._most_top} the sampler was made for")
        self._doorway.flush()
        self._place(addresses, np.asarray(slots, np.int64), top)
        self._turn = (turn + 1) % RESULT_BUFFERS
        step = (bucket_of(len(addresses)), turn, next_ids, bool((top >= 0).any()))
        if not len(addresses):
            pass
        elif self._graphs is None:
            self._launch(*step)
        else:
            self._graph(step).launch(self.stream)
        self._events[turn].record(self.stream)
        return Pending(self._results[turn].of(len(addresses)), self._events[turn])

    def _launch(self, rows: int, turn: int, next_ids: int, logprobs: bool) -> None:
        results, drawn, top_ids, top = (np.uint64(each.ctypes.data) for each in self._results[turn])
        arguments = (self._entries, self._copies, results, np.uint64(next_ids), *self._parameters)
        with self.stream:
            self._samplers[cuda_code.shape_for(rows)].launch(rows, arguments)
            if logprobs and self._logprobs is not None:
                most = np.int32(self._most_top or 0)
                self._logprobs.launch(rows, (self._entries, drawn, top_ids, top, most, *self._parameters))

    def _graph(self, step: tuple[int, int, int, bool]) -> Any:
        assert self._graphs is not None
        if step not in self._graphs:
            with lack_told():
                self.stream.begin_capture()
                self._launch(*step)
                self._graphs[step] = self.stream.end_capture()
        return self._graphs[step]

    def _place(self, addresses: NDArray[np.uint64], slots: NDArray[np.int64], top: NDArray[np.int64]) -> None:
        """The batch's entries on the device; what pads it to a bucket is no row."""
        entries = np.zeros(bucket_of(len(addresses)), ENTRY)
        entries["slot"] = -1
        real = entries[: len(addresses)]
        real["address"], real["slot"], real["edits"] = addresses, slots, self._edited[slots]
        real["top"], real["keep"] = top, self._edited[slots] & (top >= 0)
        if (placed := entries.tobytes()) != self._placed:
            self._entries[: entries.nbytes].set(entries.view(np.uint8), self.stream)
            self._placed = placed

    def step(self, logits: Any, slots: ArrayLike) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """logits [n, >= V] on the device, slots i32[n] -> tokens i32[n] (-1: none), status u8[n]; waits."""
        if len(logits) == 0:
            return np.zeros(0, np.int32), np.zeros(0, np.uint8)
        addresses = logits.data.ptr + np.arange(len(logits), dtype=np.uint64) * np.uint64(logits.strides[0])
        return self.enqueue(addresses, slots).wait()


def pack_blob(packed: Packed, mask: NDArray[np.uint32] | None, vocab_size: int) -> bytes:
    """A row as slots.cu unpacks it, a multiple of 8 bytes."""
    seen, times = seen_before(packed, vocab_size)
    packed.row["num_seen"] = seen.size
    parts = [*packed, seen, times] if mask is None else [*packed, seen, times, mask]
    blob = b"".join([part.tobytes() for part in parts])
    return blob if len(blob) % 8 == 0 else blob + bytes(4)
