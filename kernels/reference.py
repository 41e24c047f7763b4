"""The NumPy statement of the sampler: every operation of a step, one row at a time, reading like its formula.

Slow on purpose. ``kernels.cpu`` and ``kernels.cuda`` return the same tokens, bit for bit: only IEEE fp32
arithmetic in a fixed order, integer sums and compares, and Philox decide. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kernels.pending import Done
from kernels.rows import ONE, RowParams, Status

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Masses = NDArray[np.uint64]
Bits = NDArray[np.uint32]

CHUNK = 1024  # ids per chunk of the two-level draw in id order
NEGATIVE_INFINITY = np.float32(-np.inf)
LARGEST = np.finfo(np.float32).max
SMALLEST_NORMAL = np.finfo(np.float32).tiny
# 2**-x for |x| <= 1/2, highest power first: least largest relative error (9e-8), exact at 0, all fp32.
POLYNOMIAL = tuple(
    float(np.float32(c)) for c in (-0.00132647, 0.00967151, -0.05550734, 0.24022242, -0.69314698, 1)
)

# ----------------------------------------------------------------------------- random stream


def philox4x32_10(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """Four random words of Philox4x32-10 (Salmon et al., SC'11) from four counter words and two key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniforms(seed: int, index: int, sample: int = 0) -> tuple[int, int]:
    """Two 64-bit uniforms of output token ``index``: not the step, the slot or the neighbours enter."""
    counter = (index & 0xFFFFFFFF, index >> 32, 0, sample & 0xFFFFFFFF)
    w0, w1, w2, w3 = philox4x32_10(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return w1 << 32 | w0, w3 << 32 | w2


# --------------------------------------------------------------------- edits, in their order


def allow(z: Floats, ids: ArrayLike) -> Floats:
    """Only these ids remain."""
    ids = np.asarray(ids, np.int64)
    out = np.full_like(z, NEGATIVE_INFINITY)
    out[ids] = z[ids]
    return out


def bias(z: Floats, pairs: Sequence[tuple[int, float]]) -> Floats:
    """z[id] + b, once per id."""
    out = z.copy()
    for token, amount in dict(pairs).items():
        out[token] = z[token] + np.float32(amount)
    return out


def ban(z: Floats, ids: ArrayLike) -> Floats:
    """None of these ids remain. Ids beyond the vocabulary are no ids."""
    ids = np.asarray(ids, np.int64)
    out = z.copy()
    out[ids[ids < z.size]] = NEGATIVE_INFINITY
    return out


def mask(z: Floats, bits: Bits) -> Floats:
    """A grammar's mask, u32[ceil(V / 32)]: bit ``id % 32`` of word ``id // 32`` set means allowed."""
    ids = np.arange(z.size)
    kept = (bits[ids >> 5] >> (ids & 31).astype(np.uint32)) & np.uint32(1)
    return np.where(kept == 1, z, NEGATIVE_INFINITY)


def penalise(z: Floats, prompt: ArrayLike, output: ArrayLike, row: RowParams) -> Floats:
    """Each distinct seen id once: repetition over prompt and output, frequency and presence over output."""
    prompt, output = np.asarray(prompt, np.int64), np.asarray(output, np.int64)
    seen = np.unique(np.concatenate([prompt, output]))
    seen = seen[seen < z.size]
    counts = np.bincount(output, minlength=z.size)[seen].astype(np.float32)
    repetition, frequency, presence = (
        np.float32(x) for x in (row.repetition_penalty, row.frequency_penalty, row.presence_penalty)
    )
    with np.errstate(over="ignore"):
        x = np.where(z[seen] > 0, z[seen] / repetition, z[seen] * repetition)
        x = x - frequency * counts
        x = np.where(counts > 0, x - presence, x)
    out = z.copy()
    out[seen] = x
    return out


def repeated(tokens: ArrayLike, size: int) -> Ints:
    """Ids that would complete an n-gram of ``size`` already present in ``tokens`` (prompt and output)."""
    tokens = np.asarray(tokens, np.int64)
    if size <= 0 or tokens.size < size:
        return np.empty(0, np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, size)
    suffix = tokens[tokens.size - size + 1 :]
    completions: Ints = windows[(windows[:, :-1] == suffix).all(axis=1), -1]
    return completions


def edit(
    z: Floats, row: RowParams, prompt: ArrayLike, output: Sequence[int], grammar: Bits | None = None
) -> Floats:
    """All edits of one row's logits f32[V], in the contract's order."""
    if row.allowed_ids:
        z = allow(z, row.allowed_ids)
    z = bias(z, row.logit_bias)
    z = ban(z, row.banned_ids)
    if grammar is not None:
        z = mask(z, grammar)
    if len(output) < row.min_tokens:
        z = ban(z, row.eos_ids + row.stop_ids + row.held_ids)
    if row.penalised:
        z = penalise(z, prompt, output, row)
    return ban(z, repeated(np.concatenate([np.asarray(prompt, np.int64), output]), row.no_repeat_ngram_size))


# --------------------------------------------------------------------------- keys and masses


def canonical(z: Floats) -> Floats:
    """NaN is -inf, +inf the largest float, denormals and -0 are 0: what is left is totally ordered."""
    z = np.where(np.isnan(z), NEGATIVE_INFINITY, np.minimum(z, LARGEST))
    return np.where(np.abs(z) < SMALLEST_NORMAL, np.float32(0), z).astype(np.float32)


def keys(z: Floats) -> Bits:
    """Order-preserving integers of canonical floats."""
    bits = z.view(np.uint32)
    return np.where(bits >> 31, ~bits, bits | np.uint32(0x80000000))


def octaves(z: Floats, top: np.float32, scale: np.float32) -> Floats:
    """(top - z) * scale: how many factors of two below the maximum's probability."""
    with np.errstate(over="ignore"):
        return np.asarray((top - z) * scale, np.float32)


def fused(a: Floats, b: Floats, c: float) -> Floats:
    """a * b + c rounded once to fp32, as a fused multiply-add does.

    The product is exact in fp64. The sum is rounded to odd there: whatever is lost leaves a trace in the last
    bit, so the second rounding cannot mistake it for a tie (Boldo and Melquiond, 2008).
    """
    product = a.astype(np.float64) * b
    total = product + c
    rest = total - product
    lost = (product - (total - rest)) + (c - rest)
    even = total.view(np.int64) & 1 == 0
    odd = np.where((lost != 0) & even, np.nextafter(total, np.copysign(np.inf, lost)), total)
    return odd.astype(np.float32)


def masses(z: Floats, top: np.float32, scale: np.float32) -> Masses:
    """2**42 * 2**-octaves as integers, u64[...]: a degree-5 polynomial, within 2e-7 of exp2.

    Integer sums have one value whatever the order, so any split over threads or blocks agrees. An entry 43 or
    more octaves below the maximum has no mass. Not monotone in its last bit; nothing relies on that.
    """
    y = np.minimum(octaves(z, top, scale), np.float32(64))
    whole = np.rint(y)
    part = y - whole  # exact
    a = np.full_like(y, POLYNOMIAL[0])
    for coefficient in POLYNOMIAL[1:]:
        a = fused(part, a, coefficient)
    return np.rint(np.ldexp(a.astype(np.float64), 42 - whole.astype(np.int32))).astype(np.uint64)


def high_product(a: int, b: int) -> int:
    """The upper 64 bits of a 64 x 64 bit product: a uniform 64-bit ``a`` scaled to [0, b)."""
    return int(a) * int(b) >> 64


def locate(weights: Masses, target: int) -> int:
    """First position whose inclusive prefix exceeds ``target``."""
    return int(np.searchsorted(np.cumsum(weights, dtype=np.uint64), np.uint64(target), side="right"))


# -------------------------------------------------------------------------- filters and draw


def ranked(z: Floats) -> Ints:
    """Ids of the finite entries, highest value first, ties by lower id."""
    ids = np.flatnonzero(z > NEGATIVE_INFINITY)
    return ids[np.lexsort((ids, -keys(z[ids]).astype(np.int64)))]


def survivors(z: Floats, top: np.float32, row: RowParams) -> Ints:
    """Ids that pass top_k, then min_p, then top_p on the renormalised rest, in rank order. Never empty."""
    ids = ranked(z)
    if k := row.limited_k(z.size):
        ids = ids[:k]
    y, weights = octaves(z[ids], top, row.log2_scale), masses(z[ids], top, row.log2_scale)
    ids = ids[(y <= row.min_p_reach) & (weights > 0)]
    if row.top_p_fraction < ONE:
        weights = masses(z[ids], top, row.log2_scale)
        before = np.cumsum(weights, dtype=np.uint64) - weights
        limit = int(weights.sum(dtype=np.uint64)) * row.top_p_fraction >> 32
        ids = ids[: max(1, int((before < np.uint64(limit)).sum()))]
    return ids


def draw_by_id(z: Floats, top: np.float32, row: RowParams, index: int) -> int:
    """No filter: a chunk of 1,024 ids by its mass, then an id within it. Two uniforms, no sort."""
    r0, r1 = uniforms(row.seed, index, row.sample)
    padded = np.full(-(-z.size // CHUNK) * CHUNK, NEGATIVE_INFINITY, np.float32)
    padded[: z.size] = z
    weights = masses(padded, top, row.log2_scale).reshape(-1, CHUNK)
    per_chunk = weights.sum(axis=1, dtype=np.uint64)
    chunk = locate(per_chunk, high_product(r0, int(per_chunk.sum(dtype=np.uint64))))
    return chunk * CHUNK + locate(weights[chunk], high_product(r1, int(per_chunk[chunk])))


def draw_by_rank(z: Floats, top: np.float32, row: RowParams, index: int) -> int:
    """Filtered: one uniform over the survivors' masses in rank order."""
    ids = survivors(z, top, row)
    weights = masses(z[ids], top, row.log2_scale)
    r0, _ = uniforms(row.seed, index, row.sample)
    return int(ids[locate(weights, high_product(r0, int(weights.sum(dtype=np.uint64))))])


def pick(z: Floats, row: RowParams, index: int) -> int:
    """The token of edited logits f32[V] at output position ``index``; -1 when nothing is finite."""
    z = canonical(z)
    top = z.max()
    if top == NEGATIVE_INFINITY:
        return -1
    if row.greedy:
        return int(keys(z).argmax())
    if not row.limited_k(z.size) and row.min_p <= 0 and row.top_p_fraction == ONE:
        return draw_by_id(z, top, row, index)
    return draw_by_rank(z, top, row, index)


# ------------------------------------------------------------------------- log-probabilities


class Logprobs(NamedTuple):
    """Log-probabilities of the model's raw distribution; -inf where a column is masked."""

    token: Floats  # [n] of the chosen token
    top_ids: NDArray[np.int32]  # [n, count] most likely first, ties by lower id
    top: Floats  # [n, count]


def logprobs(logits: Floats, tokens: ArrayLike, count: int) -> Logprobs:
    """Of unedited logits f32[n, V]: the chosen tokens' log-probability and the ``count`` <= V largest."""
    z = np.stack([canonical(row) for row in logits]).astype(np.float64)
    top = z.max(axis=1, keepdims=True)
    log_p = (z - top - np.log(np.exp(z - top).sum(axis=1, keepdims=True))).astype(np.float32)
    chosen = np.take_along_axis(log_p, np.asarray(tokens, np.int64)[:, None], axis=1)[:, 0]
    ids = np.argsort(-z, axis=1, kind="stable")[:, :count]
    return Logprobs(chosen, ids.astype(np.int32), np.take_along_axis(log_p, ids, axis=1))


# ---------------------------------------------------------------------------- tail and batch


def ending(row: RowParams, token: int, num_output: int) -> Status:
    """How the row stands once ``token`` is its ``num_output``-th output token."""
    if token in row.eos_ids:
        return Status.EOS
    if token in row.stop_ids:
        return Status.STOP
    return Status.LENGTH if num_output >= row.max_tokens else Status.RUNNING


@dataclass(slots=True)
class Slot:
    """A live row: its numbers, its tokens, how it stands."""

    params: RowParams
    prompt: NDArray[np.int64]
    output: list[int]
    status: Status = Status.RUNNING
    grammar: Bits | None = None

    def step(self, logits: Floats) -> tuple[int, Status]:
        """Sample from raw logits f32[V], append, say how the row stands. An ended row stays as it is."""
        if self.status is not Status.RUNNING:
            return -1, self.status
        if np.isnan(logits).any() or not (logits > NEGATIVE_INFINITY).any():
            self.status = Status.INVALID_LOGITS
            return -1, self.status
        edited = edit(logits, self.params, self.prompt, self.output, self.grammar)
        token = pick(edited, self.params, len(self.output))
        if token < 0:
            self.status = Status.NO_ALLOWED_TOKEN
            return -1, self.status
        self.output.append(token)
        self.status = ending(self.params, token, len(self.output))
        return token, self.status


@dataclass(slots=True)
class BatchedSampler:
    """Rows by slot. ``step`` takes the logits of any of them, in any order."""

    max_batch: int
    vocab_size: int
    max_length: int  # prompt and output tokens of one row
    slots: dict[int, Slot] = field(default_factory=dict)

    def admit(self, slot: int, params: RowParams, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        """Start a row; ``output`` holds the tokens it had already generated when it resumes."""
        if not 0 <= slot < self.max_batch or slot in self.slots:
            raise ValueError(f"slot {slot} is taken or not one of {self.max_batch}")
        if len(prompt) + params.max_tokens > self.max_length:
            raise ValueError(f"{len(prompt)} + {params.max_tokens} tokens exceed {self.max_length}")
        self.slots[slot] = Slot(params, np.asarray(prompt, np.int64), list(output))

    def release(self, slot: int) -> None:
        del self.slots[slot]

    def set_mask(self, slot: int, bits: Bits | None) -> None:
        """The grammar mask u32[ceil(V / 32)] of the row's next steps; None: no grammar."""
        self.slots[slot].grammar = None if bits is None else bits.copy()

    def enqueue(self, logits: Floats, slots: ArrayLike) -> Done:
        """``step``, as a device would be asked for it."""
        return Done(*self.step(logits, slots))

    def step(self, logits: Floats, slots: ArrayLike) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        """logits f32[n, >= V], slots i32[n] -> tokens i32[n] (-1: none), status u8[n]. The logits stay."""
        rows = zip(np.asarray(slots), logits, strict=True)
        results = [self.slots[int(slot)].step(z[: self.vocab_size]) for slot, z in rows]
        tokens, status = zip(*results, strict=True) if results else ((), ())
        return np.array(tokens, np.int32), np.array(status, np.uint8)
