"""The fast CPU twin of kernels.reference: same names, same signatures, same tokens. Owns the rows' state.

A step's rows are split over a few threads; the compiled loops (kernels.cpu_rows) need no interpreter lock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernels import cpu_rows
from kernels.cpu_rows import BINS, CHUNK, SPAN, State, Step, Work
from kernels.packed import MAX_BIASES, MAX_ENDERS, ROW, allowed_bits, mask_words, pack
from kernels.pending import Done
from kernels.reference import Floats, Logprobs, canonical
from kernels.rows import RowParams, Status

ENDED = Status.FAILED  # a slot without a row
MIN_SHARE = 1 << 17  # logits a thread is woken for; waking one takes about as long as reading so many


def new_state(max_batch: int, vocab_size: int, max_length: int) -> State:
    rows = np.zeros(max_batch, ROW)
    rows["status"] = ENDED
    return State(
        rows=rows,
        tokens=np.zeros((max_batch, max_length), np.int32),
        seen=np.zeros((max_batch, max_length), np.int32),
        times=np.zeros((max_batch, max_length), np.uint32),
        places=np.zeros((max_batch, vocab_size), np.int32),
        enders=np.zeros((max_batch, MAX_ENDERS), np.int32),
        bias_ids=np.zeros((max_batch, MAX_BIASES), np.int32),
        bias=np.zeros((max_batch, MAX_BIASES), np.float32),
        masks=np.zeros((max_batch, mask_words(vocab_size)), np.uint32),
    )


def new_work(vocab_size: int) -> Work:
    return Work(
        edited=np.empty(vocab_size, np.float32),
        groups=np.empty(SPAN, np.float32),
        weights=np.empty(max(CHUNK, vocab_size), np.uint64),
        depths=np.empty(CHUNK, np.float32),
        bins=np.empty(max(CHUNK, vocab_size), np.int32),
        ranks=np.empty(vocab_size, np.uint64),
        bin_mass=np.empty(max(BINS, -(-vocab_size // CHUNK)), np.uint64),
        bin_count=np.empty(BINS, np.int64),
    )


def new_step(logits: Floats, slots: ArrayLike) -> Step:
    rows = np.asarray(slots, np.int64)
    return Step(
        np.ascontiguousarray(logits, np.float32),
        rows,
        np.empty(rows.size, np.int32),
        np.empty(rows.size, np.uint8),
    )


class BatchedSampler:
    """Rows by slot; see reference.BatchedSampler. ``threads`` defaults to the cores this process may use."""

    def __init__(self, max_batch: int, vocab_size: int, max_length: int, threads: int | None = None) -> None:
        self.max_batch, self.vocab_size, self.max_length = max_batch, vocab_size, max_length
        self.threads = threads or len(os.sched_getaffinity(0))
        self._state = new_state(max_batch, vocab_size, max_length)
        self._work = [new_work(vocab_size) for _ in range(self.threads)]
        self._own_masks: dict[int, NDArray[np.uint32]] = {}  # allow and ban lists by slot
        self._live = np.zeros(max_batch, bool)
        self._pool = ThreadPoolExecutor(max(1, self.threads - 1), "sampler")

    def admit(self, slot: int, params: RowParams, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        """Start a row; ``output`` holds the tokens it had already generated when it resumes."""
        if not 0 <= slot < self.max_batch or self._live[slot]:
            raise ValueError(f"slot {slot} is taken or not one of {self.max_batch}")
        if len(prompt) + params.max_tokens > self.max_length:
            raise ValueError(f"{len(prompt)} + {params.max_tokens} tokens exceed {self.max_length}")
        has_own = params.allowed_ids or params.banned_ids
        mask = allowed_bits(params, self.vocab_size) if has_own else None
        packed, state = pack(params, prompt, output, self.vocab_size), self._state
        state.rows[slot] = packed.row[0]
        state.tokens[slot, : packed.tokens.size] = packed.tokens
        state.enders[slot, : packed.enders.size] = packed.enders
        state.bias_ids[slot, : packed.bias_ids.size] = packed.bias_ids
        state.bias[slot, : packed.bias.size] = packed.bias
        if mask is not None:
            self._own_masks[slot] = state.masks[slot] = mask
        if params.penalised:
            cpu_rows.see_all(state, slot)
        self._live[slot] = True  # what is refused above leaves the slot free

    def release(self, slot: int) -> None:
        """End a row: nothing of it reaches the slot's next one."""
        if not self._live[slot]:
            raise KeyError(slot)
        cpu_rows.forget(self._state, slot)
        self._state.rows[slot]["status"] = ENDED
        self._own_masks.pop(slot, None)
        self._live[slot] = False

    def set_mask(self, slot: int, bits: NDArray[np.uint32] | None) -> None:
        """The grammar mask u32[ceil(V / 32)] of the row's next steps; None: no grammar."""
        own = self._own_masks.get(slot)
        parts = [part for part in (own, bits) if part is not None]
        self._state.rows[slot]["masked"] = bool(parts)
        if parts:
            self._state.masks[slot] = np.bitwise_and.reduce(parts)

    def enqueue(self, logits: Floats, slots: ArrayLike) -> Done:
        """``step``, as a device would be asked for it."""
        return Done(*self.step(logits, slots))

    def step(self, logits: Floats, slots: ArrayLike) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """logits f32[n, >= V], slots i32[n] -> tokens i32[n] (-1: none), status u8[n]. The logits stay."""
        step = new_step(logits, slots)
        stride = max(1, min(self.threads, step.slots.size, step.logits.size // MIN_SHARE))
        shares = [(step, (i, stride), self._state, self._work[i]) for i in range(stride)]
        others = [self._pool.submit(cpu_rows.step_rows, *share) for share in shares[1:]]
        cpu_rows.step_rows(*shares[0])
        for other in others:
            other.result()
        return step.tokens, step.status


def logprobs(logits: Floats, tokens: ArrayLike, count: int) -> Logprobs:
    """See reference.logprobs: the same numbers, without sorting the vocabulary."""
    rows = [
        _row_logprobs(row, int(token), count) for row, token in zip(logits, np.asarray(tokens), strict=True)
    ]
    chosen, ids, top = zip(*rows, strict=True)
    return Logprobs(np.array(chosen, np.float32), np.stack(ids), np.stack(top))


def _row_logprobs(
    logits: Floats, token: int, count: int
) -> tuple[np.float32, NDArray[np.int32], NDArray[np.float32]]:
    z = canonical(logits).astype(np.float64)
    top = z.max()
    log_p = (z - top - np.log(np.exp(z - top).sum())).astype(np.float32)
    bound = np.partition(z, z.size - count)[z.size - count] if count else np.inf
    ids = np.flatnonzero(z >= bound)
    ids = ids[np.argsort(-z[ids], kind="stable")][:count]
    return log_p[token], ids.astype(np.int32), log_p[ids]
