"""The CUDA twin of kernels.reference: same names, same signatures, same tokens. Owns the rows' state there.

One launch a step samples every row, whatever the mix of settings (sampler.cu), replayed from a graph per
batch bucket: 13 us of the host's time a step, 22 with a plain launch. Nothing is allocated and nothing is
waited for inside ``enqueue``, but for a bucket's first use; everything is sized at start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from importlib import resources
from typing import Any, Literal, NamedTuple

import cupy as cp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernels.packed import MAX_BIASES, MAX_ENDERS, ROW, Packed, allowed_bits, mask_words, pack, seen_before
from kernels.rows import RowParams, Status

ENTRY = np.dtype([("address", np.uint64), ("slot", np.int32), ("edits", np.int32)])
MASKED_AT = dict(ROW.fields or {})["masked"][1]  # byte offset in a row
FILES = ("device", "numbers", "logits", "block", "edit", "pick", "wide")
TYPES = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"}
MAX_VOCABULARY = 1 << 18  # 256 chunks of 1,024 ids; masses of 2**42 then sum below 2**60
RESULT_BUFFERS = 4  # steps whose results may be outstanding
LogitsType = Literal["float32", "float16", "bfloat16"]


class Shape(NamedTuple):
    """How a row is spread over the device."""

    cluster: int  # blocks a row
    threads: int  # threads a block
    blocks: int  # blocks a multiprocessor must hold: bounds the registers
    unroll: int  # loads a thread keeps in flight


# Measured on an H200: few rows want many blocks each, many rows few (the blocks of a cluster sit together).
FEW_ROWS = Shape(cluster=8, threads=512, blocks=1, unroll=4)
MANY_ROWS = Shape(cluster=2, threads=512, blocks=1, unroll=6)
WITHOUT_CLUSTERS = Shape(cluster=1, threads=1024, blocks=1, unroll=4)  # before compute capability 9
MOST_FEW = 8


@dataclass(frozen=True, slots=True)
class Kernel:
    """sample_rows, compiled for one shape."""

    shape: Shape
    function: Any
    shared_bytes: int

    def launch(self, rows: int, arguments: tuple[Any, ...]) -> None:
        self.function(
            (self.shape.cluster, rows), (self.shape.threads,), arguments, shared_mem=self.shared_bytes
        )


def source() -> str:
    """All kernels as one text: CuPy's cache of compiled code does not look into included files."""
    folder = resources.files("kernels")
    texts = [folder.joinpath(f"{name}.cuh").read_text() for name in FILES]
    texts += [folder.joinpath(f"{name}.cu").read_text() for name in ("sampler", "slots")]
    lines = "\n".join(texts).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("#include", "#pragma once")))


def module(logits: LogitsType, shape: Shape) -> Any:
    numbers = {
        "CLUSTER": shape.cluster,
        "THREADS": shape.threads,
        "BLOCKS": shape.blocks,
        "SCAN_UNROLL": shape.unroll,
        "MAX_ENDERS": MAX_ENDERS,
        "MAX_BIASES": MAX_BIASES,
        "LOGITS": TYPES[logits],
    }
    options = ("-std=c++17", *(f"-D{name}={value}" for name, value in numbers.items()))
    return cp.RawModule(code=source(), options=options)


def bucket_of(rows: int) -> int:
    """Rows of the graph that serves so many: powers of two, then multiples of 16, where those waste less."""
    return 1 << (rows - 1).bit_length() if rows <= 16 else -(-rows // 16) * 16


def sampling_kernel(code: Any, shape: Shape) -> Kernel:
    function = code.get_function("sample_rows")
    shared_bytes = int(cp.ndarray((1,), cp.int32, code.get_global("shared_bytes"))[0])
    function.max_dynamic_shared_size_bytes = shared_bytes
    return Kernel(shape, function, shared_bytes)


@dataclass(slots=True)
class Pending:
    """A step that is on its way: ``wait`` for what it says of its rows."""

    results: NDArray[np.int32]  # [n, 2] token, status; pinned, written by the kernel
    event: Any

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        self.event.synchronize()
        return self.results[:, 0].copy(), self.results[:, 1].astype(np.uint8)


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


def pinned_results(rows: int) -> NDArray[np.int32]:
    """i32[rows, 2] that the device writes into directly."""
    memory = cp.cuda.alloc_pinned_memory(rows * 8)
    return np.frombuffer(memory, np.int32, rows * 2).reshape(rows, 2)


class BatchedSampler:
    """Rows by slot; see reference.BatchedSampler. All work is enqueued on ``stream`` (default: a new one).

    Rows of fp32 logits are edited in place; fp16 and bf16 rows (bf16 as uint16 arrays) are left alone.
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
    ) -> None:
        if vocab_size > MAX_VOCABULARY:
            raise ValueError(f"a vocabulary of {vocab_size} exceeds {MAX_VOCABULARY}")
        self.max_batch, self.vocab_size, self.max_length = max_batch, vocab_size, max_length
        self.stream = stream or cp.cuda.Stream(non_blocking=True)
        self._own_masks: dict[int, NDArray[np.uint32]] = {}  # allow and ban lists by slot
        self._graphs: dict[tuple[int, int, int], Any] | None = {} if graphs else None
        self._live = np.zeros(max_batch, bool)
        self._edited = np.zeros(max_batch, bool)  # rows whose logits may need edits
        with self.stream:
            self._allocate(logits)
        self._compile(logits)
        self.stream.synchronize()

    def _allocate(self, logits: LogitsType) -> None:
        n, size = self.max_batch, self.vocab_size
        self._tables = new_tables(n, size, self.max_length)
        self._parameters = self._tables.parameters()
        self._copies = cp.zeros((n, size) if logits != "float32" else (1, 1), cp.float32)
        blob = ROW.itemsize // 4 + 3 * self.max_length + MAX_ENDERS + 2 * MAX_BIASES + mask_words(size)
        self._blob = cp.zeros(blob, cp.int32)
        self._entries = cp.zeros(bucket_of(n) * ENTRY.itemsize, cp.uint8)
        self._placed = np.zeros(0, ENTRY)  # what the device's entries hold
        self._results = [pinned_results(n) for _ in range(RESULT_BUFFERS)]
        self._events = [cp.cuda.Event(disable_timing=True) for _ in range(RESULT_BUFFERS)]
        self._turn = 0

    def _compile(self, logits: LogitsType) -> None:
        clusters = int(cp.cuda.Device().compute_capability) >= 90
        shapes = (FEW_ROWS, MANY_ROWS) if clusters else (WITHOUT_CLUSTERS, WITHOUT_CLUSTERS)
        codes = [module(logits, shape) for shape in shapes]
        self._few, self._many = map(sampling_kernel, codes, shapes)
        self._admit, self._release = codes[0].get_function("admit_row"), codes[0].get_function("release_row")

    def admit(self, slot: int, params: RowParams, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        """Start a row; ``output`` holds the tokens it had already generated when it resumes."""
        if not 0 <= slot < self.max_batch or self._live[slot]:
            raise ValueError(f"slot {slot} is taken or not one of {self.max_batch}")
        if len(prompt) + params.max_tokens > self.max_length:
            raise ValueError(f"{len(prompt)} + {params.max_tokens} tokens exceed {self.max_length}")
        self._live[slot] = True
        self._edited[slot] = params.edited
        if params.allowed_ids or params.banned_ids:
            self._own_masks[slot] = allowed_bits(params, self.vocab_size)
        packed = pack(params, prompt, output, self.vocab_size)
        blob = pack_blob(packed, self._own_masks.get(slot), self.vocab_size)
        with self.stream:
            self._blob[: blob.size].set(blob)
            self._admit((1,), (512,), (self._blob, np.int32(slot), *self._parameters))

    def release(self, slot: int) -> None:
        """End a row: nothing of it reaches the slot's next one."""
        if not self._live[slot]:
            raise KeyError(slot)
        self._own_masks.pop(slot, None)
        self._live[slot] = False
        with self.stream:
            ended = np.int32(Status.FAILED)
            self._release((1,), (512,), (np.int32(slot), ended, *self._parameters))

    def set_mask(self, slot: int, bits: NDArray[np.uint32] | None) -> None:
        """The grammar mask u32[ceil(V / 32)] of the row's next steps; None: no grammar."""
        own = self._own_masks.get(slot)
        parts = [part for part in (own, bits) if part is not None]
        self._edited[slot] |= bool(parts)
        with self.stream:
            if parts:
                self._tables.masks[slot].set(np.bitwise_and.reduce(parts))
            flag = self._tables.rows[slot, MASKED_AT : MASKED_AT + 4]
            cp.cuda.runtime.memsetAsync(flag.data.ptr, int(bool(parts)), 4, self.stream.ptr)

    def enqueue(self, addresses: NDArray[np.uint64], slots: ArrayLike, next_ids: int = 0) -> Pending:
        """Sample rows whose logits lie at device ``addresses``, behind what the stream already holds.

        ``next_ids``: device address of i64[n], which receives the tokens as the model's next input; 0: none.
        Few different addresses: each has its own graphs. At most RESULT_BUFFERS steps may be outstanding.
        Copies to the device only when the batch has changed.
        """
        rows, turn = bucket_of(len(addresses)), self._turn
        self._place(addresses, np.asarray(slots, np.int64), rows)
        self._turn = (turn + 1) % RESULT_BUFFERS
        if self._graphs is None:
            self._launch(rows, turn, next_ids)
        else:
            self._graph(rows, turn, next_ids).launch(self.stream)
        self._events[turn].record(self.stream)
        return Pending(self._results[turn][: len(addresses)], self._events[turn])

    def _launch(self, rows: int, turn: int, next_ids: int) -> None:
        pinned = np.uint64(self._results[turn].ctypes.data)
        arguments = (self._entries, self._copies, pinned, np.uint64(next_ids), *self._parameters)
        with self.stream:
            (self._few if rows <= MOST_FEW else self._many).launch(rows, arguments)

    def _graph(self, rows: int, turn: int, next_ids: int) -> Any:
        assert self._graphs is not None
        key = (rows, turn, next_ids)
        if key not in self._graphs:
            self.stream.begin_capture()
            self._launch(*key)
            self._graphs[key] = self.stream.end_capture()
        return self._graphs[key]

    def _place(self, addresses: NDArray[np.uint64], slots: NDArray[np.int64], rows: int) -> None:
        """The batch's entries on the device; what pads it to ``rows`` is no row."""
        entries = np.zeros(rows, ENTRY)
        entries["slot"] = -1
        real = entries[: len(addresses)]
        real["address"], real["slot"], real["edits"] = addresses, slots, self._edited[slots]
        if not np.array_equal(entries, self._placed):
            self._entries[: entries.nbytes].set(entries.view(np.uint8), self.stream)
            self._placed = entries

    def step(self, logits: Any, slots: ArrayLike) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """logits [n, >= V] on the device, slots i32[n] -> tokens i32[n] (-1: none), status u8[n]; waits."""
        if len(logits) == 0:
            return np.zeros(0, np.int32), np.zeros(0, np.uint8)
        addresses = logits.data.ptr + np.arange(len(logits), dtype=np.uint64) * np.uint64(logits.strides[0])
        return self.enqueue(addresses, slots).wait()


def pack_blob(packed: Packed, mask: NDArray[np.uint32] | None, vocab_size: int) -> NDArray[np.int32]:
    """A row as slots.cu unpacks it."""
    row = packed.row.copy()
    seen, times = seen_before(packed, vocab_size)
    row["num_seen"] = seen.size
    parts = [row, packed.tokens, packed.enders, packed.bias_ids, packed.bias, seen, times]
    return np.concatenate([part.view(np.int32) for part in parts + ([mask] if mask is not None else [])])
