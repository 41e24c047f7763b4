"""The CPU twin's inner loops, compiled by numba: one row from raw logits to an appended token.

All of them live in this file, because numba notices a change only in the file of the function it cached.
Integer types are spelled out: a mix of signed and unsigned 64-bit integers would become a float.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.jit import bits_of_double, double_of_bits, entry, fused, inner
from kernels.packed import Kind
from kernels.reference import POLYNOMIAL
from kernels.rows import ONE, Status

Row = Any  # one record of ROW
Whole = Any  # an integer; which one numba infers
Floats = NDArray[np.float32]
Masses = NDArray[np.uint64]
Ints = NDArray[np.int32]
Bits = NDArray[np.uint32]

GROUPS = 1024  # group(id) = id // 4 % GROUPS
SPAN = 4 * GROUPS
MAX_CANDIDATE_K = 512  # above it the group maxima say too little
CHUNK = 1024
BINS_AN_OCTAVE = np.float32(32)
BINS = 43 * 32  # entries further down have no mass

INFINITY = np.float32(np.inf)
LARGEST = np.finfo(np.float32).max
SMALLEST_NORMAL = np.finfo(np.float32).tiny
NO_MASS = np.float32(64)
C5, C4, C3, C2, C1, C0 = (np.float32(c) for c in POLYNOMIAL)
ROUNDER = 1536.0  # its last bit is worth 2**-42, the unit of mass: what is added to it is rounded to that
ROUNDER_BITS = np.float64(ROUNDER).view(np.int64)
EXPONENT_ZERO, FRACTION_BITS = np.int64(1023), np.int64(52)
THIRTY_TWO = np.uint64(32)
ZERO, UNIT = np.uint64(0), np.uint64(1)
U32 = np.uint64(0xFFFFFFFF)
OFF = np.uint64(ONE)


class State(NamedTuple):
    """Every row's numbers and history, by slot."""

    rows: Any  # ROW[slots]
    tokens: NDArray[np.int32]  # [slots, max_length] prompt and output
    seen: NDArray[np.int32]  # [slots, max_length] distinct ids among them
    times: NDArray[np.uint32]  # [slots, max_length] how often each of ``seen`` is in the output
    places: NDArray[np.int32]  # [slots, V] 1 + index into ``seen``; 0: not seen
    enders: NDArray[np.int32]  # [slots, MAX_ENDERS] EOS, stop, held ids
    bias_ids: NDArray[np.int32]  # [slots, MAX_BIASES]
    bias: NDArray[np.float32]  # [slots, MAX_BIASES]
    masks: NDArray[np.uint32]  # [slots, ceil(V / 32)]


class Step(NamedTuple):
    """What a step reads of its n rows, and what it says of them."""

    logits: NDArray[np.float32]  # [n, >= V]
    slots: NDArray[np.int64]  # [n]
    tokens: NDArray[np.int32]  # [n] -1: none
    status: NDArray[np.uint8]  # [n]


class Work(NamedTuple):
    """One thread's scratch."""

    edited: NDArray[np.float32]  # [V]
    groups: NDArray[np.float32]  # [SPAN]
    weights: NDArray[np.uint64]  # [max(CHUNK, V)]
    depths: NDArray[np.float32]  # [CHUNK] octaves below the maximum
    bins: NDArray[np.int32]  # [max(CHUNK, V)] their bins
    ranks: NDArray[np.uint64]  # [V] key << 32 | ~id
    bin_mass: NDArray[np.uint64]  # [max(BINS, chunks of V)]
    bin_count: NDArray[np.int64]  # [BINS]


# --------------------------------------------------------------- random stream, keys, masses


@inner
def uniforms(seed: Whole, index: Whole, sample: Whole) -> tuple[Whole, Whole]:
    """Philox4x32-10 with counter (index, 0, 0, sample): see reference.philox4x32_10."""
    c0, c1, c2, c3 = np.uint64(index), ZERO, ZERO, np.uint64(sample)
    k0, k1 = seed & U32, seed >> THIRTY_TWO
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> THIRTY_TWO) ^ c1 ^ k0, p1 & U32, (p0 >> THIRTY_TWO) ^ c3 ^ k1, p0 & U32
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & U32, (k1 + np.uint64(0xBB67AE85)) & U32
    return c1 << THIRTY_TWO | c0, c3 << THIRTY_TWO | c2


@inner
def high_product(a: Whole, b: Whole) -> Whole:
    """The upper 64 bits of a * b."""
    a0, a1, b0, b1 = a & U32, a >> THIRTY_TWO, b & U32, b >> THIRTY_TWO
    middle = a1 * b0 + (a0 * b0 >> THIRTY_TWO)
    return a1 * b1 + (middle >> THIRTY_TWO) + (a0 * b1 + (middle & U32) >> THIRTY_TWO)


@inner
def rank_of(z: np.float32, bits: np.uint32, token: Whole) -> Whole:
    """Larger ranks first: the canonical value's ordered bits, then the lower id. ``bits`` are z's."""
    b = np.uint64(bits)
    magnitude = b & np.uint64(0x7FFFFFFF)
    if magnitude < np.uint64(0x00800000):  # zero and denormals
        b = ZERO
    elif z == INFINITY:
        b = np.uint64(0x7F7FFFFF)
    key = b ^ U32 if b >> np.uint64(31) else b | np.uint64(0x80000000)
    return key << THIRTY_TWO | (U32 - np.uint64(token))


@inner
def depth_of(z: Any, top: np.float32, row: Row) -> Any:
    """Octaves below the maximum; 64 (no mass) there and beyond, and beyond what min_p keeps."""
    z = np.float32(0) if abs(z) < SMALLEST_NORMAL else min(z, LARGEST)
    y = (top - z) * row.scale
    return min(y, NO_MASS) if y <= row.reach else NO_MASS


@inner
def mass_of(depth: Any) -> Whole:
    """2**42 * 2**-depth: the polynomial of reference.masses."""
    whole = np.rint(depth)
    part = depth - whole
    a = fused(part, C5, C4)
    a = fused(part, a, C3)
    a = fused(part, a, C2)
    a = fused(part, a, C1)
    a = fused(part, a, C0)
    power = double_of_bits((EXPONENT_ZERO - np.int64(np.int32(whole))) << FRACTION_BITS)
    return np.uint64(bits_of_double(np.float64(a) * power + ROUNDER) - ROUNDER_BITS)


@inner
def weigh(z: Floats, top: np.float32, row: Row, work: Work, bins: Ints) -> None:
    """Masses and bins of one chunk of logits. Three loops: each becomes vector instructions."""
    for i in range(z.size):
        work.depths[i] = depth_of(z[i], top, row)
    for i in range(z.size):
        work.weights[i] = mass_of(work.depths[i])
    for i in range(z.size):
        bins[i] = np.int32(work.depths[i] * BINS_AN_OCTAVE)


@inner
def locate(weights: Masses, target: Whole) -> Whole:
    """First position whose inclusive prefix exceeds ``target``."""
    total = ZERO
    for i in range(weights.size):
        total += weights[i]
        if total > target:
            return i
    return weights.size - 1


# ------------------------------------------------------------------------------------- edits


@inner
def edits_wanted(row: Row) -> Any:
    held = row.length - row.num_prompt < row.min_tokens and row.num_eos + row.num_stop + row.num_held > 0
    return held or row.masked != 0 or row.num_bias > 0 or row.penalised != 0 or row.ngram > 0


@inner
def apply_mask(z: Floats, mask: Bits) -> None:
    for word in range(mask.size):
        bits = mask[word]
        if bits == np.uint32(0xFFFFFFFF):
            continue
        for i in range(word * 32, min(word * 32 + 32, z.size)):
            if not (bits >> np.uint32(i & 31)) & np.uint32(1):
                z[i] = -INFINITY


@inner
def penalise(z: Floats, row: Row, seen: Ints, times: Bits) -> None:
    """Each distinct seen id once: repetition, then frequency and presence of what the row has put out."""
    for i in range(row.num_seen):
        x = z[seen[i]]
        x = x / row.repetition if x > 0 else x * row.repetition
        x = x - row.frequency * np.float32(times[i])
        z[seen[i]] = x - row.presence if times[i] > 0 else x


@inner
def ban_repeated(z: Floats, tokens: Ints, size: Whole) -> None:
    """No id that would complete an n-gram already present."""
    suffix = tokens.size - size + 1
    for start in range(suffix):
        matches = 0
        while matches < size - 1 and tokens[start + matches] == tokens[suffix + matches]:
            matches += 1
        if matches == size - 1 and tokens[start + matches] < z.size:
            z[tokens[start + matches]] = -INFINITY


@inner
def edit(z: Floats, state: State, slot: Whole, row: Row) -> None:
    """All edits in place, in the contract's order (bans commute with additions: -inf stays -inf)."""
    for i in range(row.num_bias):
        z[state.bias_ids[slot, i]] += state.bias[slot, i]
    if row.masked:
        apply_mask(z, state.masks[slot])
    if row.length - row.num_prompt < row.min_tokens:
        for i in range(row.num_eos + row.num_stop + row.num_held):
            if state.enders[slot, i] < z.size:
                z[state.enders[slot, i]] = -INFINITY
    if row.penalised:
        penalise(z, row, state.seen[slot], state.times[slot])
    if row.ngram > 0:
        ban_repeated(z, state.tokens[slot, : row.length], row.ngram)


# ----------------------------------------------------------------------- one read of the row


@inner
def fold(z: Floats, groups: Floats) -> tuple[Whole, np.float32]:
    """Maxima of ids with the same id // 4 % GROUPS. Returns how many NaNs, and the canonical maximum."""
    groups[:] = -INFINITY
    nans, top = 0, -INFINITY
    for start in range(0, z.size, SPAN):
        part = z[start : start + SPAN]
        for i in range(part.size):
            x, m = part[i], groups[i]
            groups[i] = x if x > m else m
            nans += np.isnan(x)
    for g in range(GROUPS):
        groups[g] = max(groups[4 * g], groups[4 * g + 1], groups[4 * g + 2], groups[4 * g + 3])
        top = max(top, groups[g])
    return nans, np.float32(0) if abs(top) < SMALLEST_NORMAL else min(top, LARGEST)


@inner
def ordered(bits: Whole) -> Whole:
    """A float's bits as a signed integer of the same order."""
    return bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))


@inner
def kth_largest(values: Floats, k: Whole) -> np.float32:
    """Bit by bit, the largest key that k values reach. (numpy.partition takes numba 10 s to compile.)"""
    bits = values.view(np.int32)
    bound = np.int64(-0x80000000)
    for bit in range(31, -1, -1):
        trial = bound + (np.int64(1) << bit)
        reached = 0
        for i in range(bits.size):
            reached += ordered(bits[i]) >= trial
        if reached >= k:
            bound = trial
    smallest = INFINITY
    for i in range(bits.size):
        smallest = min(smallest, values[i] if ordered(bits[i]) >= bound else INFINITY)
    return smallest


@inner
def sort_best_first(ranks: Masses) -> Masses:
    ranks.sort()
    return ranks[::-1]


@inner
def candidates(z: Floats, groups: Floats, count: Whole, ranks: Masses) -> Whole:
    """Ranks of all entries from the count-th largest group maximum up: the ``count`` best are among them."""
    bound = min(max(kth_largest(groups[:GROUPS], count), -LARGEST), LARGEST)
    if abs(bound) < SMALLEST_NORMAL:  # zeros and denormals tie
        bound = -SMALLEST_NORMAL
    found = 0
    bits = z.view(np.uint32)
    for g in range(GROUPS):
        if groups[g] < bound:
            continue
        for start in range(4 * g, z.size, SPAN):
            for i in range(start, min(start + 4, z.size)):
                if z[i] >= bound:
                    ranks[found] = rank_of(z[i], bits[i], i)
                    found += 1
    return found


# ------------------------------------------------------------------------------------- draws


@inner
def greedy(z: Floats, groups: Floats, ranks: Masses) -> Whole:
    """The best rank: highest value, lowest id."""
    return token_of(ranks[: candidates(z, groups, np.int32(1), ranks)].max())


@inner
def token_of(rank: Whole) -> Whole:
    return np.int64(U32 - (rank & U32))


@inner
def draw_by_id(z: Floats, top: np.float32, row: Row, uniform: tuple[Whole, Whole], work: Work) -> Whole:
    """A chunk by its mass, then an id within it."""
    total, chunks = ZERO, 0
    for start in range(0, z.size, CHUNK):
        part = z[start : start + CHUNK]
        weigh(part, top, row, work, work.bins)
        work.bin_mass[chunks] = work.weights[: part.size].sum()
        total += work.bin_mass[chunks]
        chunks += 1
    chunk = locate(work.bin_mass[:chunks], high_product(uniform[0], total))
    part = z[chunk * CHUNK : (chunk + 1) * CHUNK]
    weigh(part, top, row, work, work.bins)
    return chunk * CHUNK + locate(work.weights[: part.size], high_product(uniform[1], work.bin_mass[chunk]))


@inner
def weigh_ranked(z: Floats, top: np.float32, row: Row, ranks: Masses, weights: Masses) -> Masses:
    """Masses of sorted entries; those without any (far down, or cut by min_p) come last and are left out."""
    for i in range(ranks.size):
        weights[i] = mass_of(depth_of(z[token_of(ranks[i])], top, row))
        if weights[i] == ZERO:
            return weights[:i]
    return weights[: ranks.size]


@inner
def nucleus_end(kept: Whole, row: Row) -> Whole:
    """The last entry of the nucleus is the first one whose inclusive prefix exceeds this."""
    limit = high_product(kept, row.top_p << THIRTY_TWO)
    return limit - UNIT if limit > ZERO else ZERO


@inner
def draw_from_candidates(z: Floats, top: np.float32, row: Row, uniform: Whole, work: Work) -> Whole:
    """top_k: the candidates hold the k best; sort, cut by k, min_p and top_p, draw."""
    ranks = work.ranks[: candidates(z, work.groups, row.top_k, work.ranks)]
    ranks = sort_best_first(ranks)[: row.top_k]
    weights = weigh_ranked(z, top, row, ranks, work.weights)
    if row.top_p < OFF:
        weights = weights[: locate(weights, nucleus_end(weights.sum(), row)) + 1]
    return token_of(ranks[locate(weights, high_product(uniform, weights.sum()))])


@inner
def fill_bins(z: Floats, top: np.float32, row: Row, work: Work) -> None:
    """Masses (and counts, where top_k needs them) of the whole row by bins of 1/32 octave, best first."""
    work.bin_mass[:BINS] = ZERO
    work.bin_count[:] = 0
    for start in range(0, z.size, CHUNK):
        part, bins = z[start : start + CHUNK], work.bins[start:]
        weigh(part, top, row, work, bins)
        for i in range(part.size):
            if work.weights[i] > ZERO:
                work.bin_mass[bins[i]] += work.weights[i]
        if row.top_k > 0:
            for i in range(part.size):
                work.bin_count[min(bins[i], BINS - 1)] += work.weights[i] > ZERO


@inner
def open_bin(z: Floats, top: np.float32, row: Row, wanted: Whole, work: Work) -> tuple[Masses, Masses]:
    """Ranks and masses of one bin's entries, best first."""
    found = 0
    bits = z.view(np.uint32)
    for i in range(z.size):
        if work.bins[i] == wanted:
            work.ranks[found] = rank_of(z[i], bits[i], i)
            found += 1
    ranks = sort_best_first(work.ranks[:found])
    return ranks, weigh_ranked(z, top, row, ranks, work.weights)


@inner
def draw_from_bins(z: Floats, top: np.float32, row: Row, uniform: Whole, work: Work) -> Whole:
    """No or a large top_k: find the bins of the last kept entry and of the drawn one, and sort only those."""
    fill_bins(z, top, row, work)
    mass = work.bin_mass[:BINS]
    kept = mass.sum()
    if 0 < row.top_k < work.bin_count.sum():
        wanted = np.searchsorted(np.cumsum(work.bin_count), row.top_k)
        _, weights = open_bin(z, top, row, wanted, work)
        kept = mass[:wanted].sum() + weights[: row.top_k - work.bin_count[:wanted].sum()].sum()
    if row.top_p < OFF:
        end = nucleus_end(kept, row)
        wanted = locate(mass, end)
        _, weights = open_bin(z, top, row, wanted, work)
        before = mass[:wanted].sum()
        kept = before + weights[: locate(weights, end - before) + 1].sum()
    target = high_product(uniform, kept)
    wanted = locate(mass, target)
    ranks, weights = open_bin(z, top, row, wanted, work)
    return token_of(ranks[locate(weights, target - mass[:wanted].sum())])


# ------------------------------------------------------------------------ one row, all of it


@inner
def draw(z: Floats, top: np.float32, row: Row, work: Work) -> Whole:
    """The token of edited and folded logits of which something is finite."""
    if row.kind == Kind.GREEDY:
        return greedy(z, work.groups, work.ranks)
    uniform = uniforms(row.seed, row.length - row.num_prompt, row.sample)
    if row.kind == Kind.BY_ID:
        return draw_by_id(z, top, row, uniform, work)
    if 0 < row.top_k <= MAX_CANDIDATE_K:
        return draw_from_candidates(z, top, row, uniform[0], work)
    return draw_from_bins(z, top, row, uniform[0], work)


@inner
def see(state: State, slot: Whole, token: Whole, in_output: bool) -> None:
    """Enter one token into a penalised row's history."""
    if token >= state.places.shape[1]:
        return
    place = state.places[slot, token]
    if place == 0:
        state.rows[slot].num_seen += 1
        place = state.rows[slot].num_seen
        state.places[slot, token] = place
        state.seen[slot, place - 1] = token
        state.times[slot, place - 1] = 0
    if in_output:
        state.times[slot, place - 1] += np.uint32(1)


@entry
def see_all(state: State, slot: Whole) -> None:
    """Enter the prompt and the output a row is admitted with."""
    row = state.rows[slot]
    for i in range(row.length):
        see(state, slot, state.tokens[slot, i], i >= row.num_prompt)


@entry
def forget(state: State, slot: Whole) -> None:
    """Wipe a row's places through the list of what it has seen."""
    for i in range(state.rows[slot].num_seen):
        state.places[slot, state.seen[slot, i]] = 0
    state.rows[slot].num_seen = 0


@inner
def ending(state: State, slot: Whole, token: Whole) -> Whole:
    row = state.rows[slot]
    for i in range(row.num_eos + row.num_stop):
        if state.enders[slot, i] == token:
            return np.int32(Status.EOS) if i < row.num_eos else np.int32(Status.STOP)
    if row.length - row.num_prompt >= row.max_tokens:
        return np.int32(Status.LENGTH)
    return np.int32(Status.RUNNING)


@inner
def append(state: State, slot: Whole, token: Whole) -> None:
    row = state.rows[slot]
    state.tokens[slot, row.length] = token
    row.length += 1
    if row.penalised:
        see(state, slot, token, True)
    row.status = ending(state, slot, token)


@entry
def step_rows(step: Step, share: tuple[int, int], state: State, work: Work) -> None:
    """One thread's ``share`` (first, stride) of a step's rows."""
    for i in range(share[0], step.slots.size, share[1]):
        z, slot = step.logits[i, : state.places.shape[1]], step.slots[i]
        row, token = state.rows[slot], np.int64(-1)
        if row.status == Status.RUNNING:
            nans, top = fold(z, work.groups)
            if nans or top == -INFINITY:
                row.status = np.int32(Status.INVALID_LOGITS)
            elif edits_wanted(row):
                work.edited[:] = z
                z = work.edited
                edit(z, state, slot, row)
                _, top = fold(z, work.groups)
        if row.status == Status.RUNNING:
            if top == -INFINITY:
                row.status = np.int32(Status.NO_ALLOWED_TOKEN)
            else:
                token = draw(z, top, row, work)
                append(state, slot, token)
        step.tokens[i], step.status[i] = token, row.status
