"""A row as the fast twins keep it: one fixed record by slot, and short lists beside it. Knows no device.

The CUDA struct ``Row`` in numbers.cuh mirrors ROW field by field.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kernels.rows import ONE, RowParams, Status

MAX_ENDERS = 128  # EOS, stop and held ids of a row
MAX_BIASES = 1024  # logit_bias entries of a row
MAX_VOCABULARY = 1 << 18  # on a GPU: 256 chunks of 1,024 ids; masses of 2**42 then sum below 2**60


class Kind(IntEnum):
    """How a row's token is found; decided once, at admission."""

    GREEDY = 0
    BY_ID = 1  # temperature only: two-level draw in id order
    BY_RANK = 2  # any filter: draw in rank order


ROW = np.dtype(
    [
        ("seed", np.uint64),
        ("top_p", np.uint64),  # 32-bit fraction; ONE: off
        ("scale", np.float32),  # octaves per unit of logit
        ("reach", np.float32),  # octaves that min_p keeps
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("kind", np.int32),
        ("top_k", np.int32),  # 0: off
        ("sample", np.uint32),
        ("min_tokens", np.int32),
        ("max_tokens", np.int32),
        ("ngram", np.int32),
        ("penalised", np.int32),
        ("masked", np.int32),  # an allow list, banned ids or a grammar
        ("num_eos", np.int32),
        ("num_stop", np.int32),
        ("num_held", np.int32),
        ("num_bias", np.int32),
        ("num_prompt", np.int32),
        ("length", np.int32),  # prompt and output tokens
        ("num_seen", np.int32),  # distinct ids among them, kept for penalised rows only
        ("status", np.int32),
        ("reserved", np.int32),  # to a multiple of 8 bytes
    ]
)
WRITE_ROW = Struct("<2Q5f2iI14i").pack  # ROW's fields; NumPy takes three times as long for one record


class Packed(NamedTuple):
    """What an admission writes into a slot."""

    row: NDArray[np.void]  # ROW[1]
    tokens: NDArray[np.int32]  # prompt, then output
    enders: NDArray[np.int32]  # EOS, stop, held ids
    bias_ids: NDArray[np.int32]
    bias: NDArray[np.float32]


def kind(params: RowParams, vocab_size: int) -> Kind:
    if params.greedy:
        return Kind.GREEDY
    filtered = params.limited_k(vocab_size) or params.min_p > 0 or params.top_p_fraction < ONE
    return Kind.BY_RANK if filtered else Kind.BY_ID


def pack(params: RowParams, prompt: Sequence[int], output: Sequence[int], vocab_size: int) -> Packed:
    """Raises ValueError where a list is longer than a slot holds."""
    enders = params.eos_ids + params.stop_ids + params.held_ids
    biases = dict(params.logit_bias)
    if len(enders) > MAX_ENDERS or len(biases) > MAX_BIASES:
        raise ValueError(f"at most {MAX_ENDERS} ending ids and {MAX_BIASES} biases a row")
    tokens = np.array([*prompt, *output], np.int32)
    numbers = WRITE_ROW(
        params.seed,
        params.top_p_fraction,
        0.0 if params.greedy else params.log2_scale,
        params.min_p_reach,
        params.repetition_penalty,
        params.frequency_penalty,
        params.presence_penalty,
        kind(params, vocab_size),
        params.limited_k(vocab_size),
        params.sample,
        params.min_tokens,
        params.max_tokens,
        params.no_repeat_ngram_size,
        params.penalised,
        bool(params.allowed_ids or params.banned_ids),
        len(params.eos_ids),
        len(params.stop_ids),
        len(params.held_ids),
        len(biases),
        len(prompt),
        tokens.size,
        0,
        Status.RUNNING,
        0,
    )
    return Packed(
        np.frombuffer(bytearray(numbers), ROW),
        tokens,
        np.array(enders, np.int32),
        np.array(list(biases), np.int32),
        np.array(list(biases.values()), np.float32),
    )


def mask_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def allowed_bits(params: RowParams, vocab_size: int) -> NDArray[np.uint32]:
    """The row's own allow and ban lists as a mask u32[ceil(V / 32)]: bit ``id % 32`` of word ``id // 32``."""
    allowed = np.full(mask_words(vocab_size) * 32, not params.allowed_ids)
    allowed[list(params.allowed_ids)] = True
    allowed[[token for token in params.banned_ids if token < vocab_size]] = False
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def seen_before(packed: Packed, vocab_size: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """A penalised row's distinct ids, and how often each is in its output so far; other rows keep none."""
    if not packed.row["penalised"][0]:
        return np.empty(0, np.int32), np.empty(0, np.int32)
    seen = np.unique(packed.tokens)
    seen = seen[seen < vocab_size]
    times = np.bincount(packed.tokens[packed.row["num_prompt"][0] :], minlength=vocab_size)[seen]
    return seen, times.astype(np.int32)
