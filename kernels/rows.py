"""One row's sampling numbers and how a row can stand after a step. Shared by the three twins.

The constants a kernel reads are rounded here, once, on the host: every twin starts from the same bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

GREEDY_BELOW = 1e-5  # a temperature under this is greedy
ONE = 1 << 32  # top_p as a 32-bit fraction; ONE itself means off


class Status(IntEnum):
    """How a row stands after a sampling step. Everything but RUNNING ends the row."""

    RUNNING = 0
    EOS = 1  # the model's own end token
    STOP = 2  # one of the row's stop ids
    LENGTH = 3  # max_tokens reached
    INVALID_LOGITS = 4  # a NaN in the row's logits, or nothing finite
    NO_ALLOWED_TOKEN = 5  # the row's own masks leave nothing
    # Set by the engine, never by a kernel:
    CANCELLED = 6
    TOO_LARGE = 7  # can never fit the KV pool
    FAILED = 8  # the step failed and bisection found this row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParams:
    """Resolved sampling numbers of one row; every field has its final value. Ids are token ids.

    Order of operations (docs/requests.md): allowed ids, logit bias, banned ids, grammar mask, EOS and stop
    ids held back by min_tokens -> repetition, frequency and presence penalties, n-gram bans -> temperature ->
    top_k -> min_p -> top_p -> draw.
    """

    max_tokens: int
    temperature: float = 1.0  # below 1e-5: greedy
    top_k: int = 0  # <= 0 or >= vocabulary: off
    top_p: float = 1.0  # >= 1: off
    min_p: float = 0.0  # 0: off
    seed: int = 0  # 64 bit
    sample: int = 0  # index of the sample when a row asks for n > 1
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    eos_ids: tuple[int, ...] = ()  # end the row with EOS; held back while fewer than min_tokens are out
    stop_ids: tuple[int, ...] = ()  # end the row with STOP; held back likewise
    held_ids: tuple[int, ...] = ()  # only held back by min_tokens (EOS ids of a row that ignores EOS)
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] = ()  # empty: all
    banned_ids: tuple[int, ...] = ()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        numbers = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return numbers != (1.0, 0.0, 0.0)

    @property
    def edited(self) -> bool:
        """Whether the row's logits may ever need an edit (a grammar apart)."""
        lists = self.logit_bias or self.allowed_ids or self.banned_ids
        return bool(lists) or self.penalised or self.min_tokens > 0 or self.no_repeat_ngram_size > 0

    @property
    def log2_scale(self) -> np.float32:
        """fp32(log2(e) / T): turns a distance from the row's maximum into octaves of probability."""
        return np.float32(math.log2(math.e) / self.temperature)

    @property
    def min_p_reach(self) -> np.float32:
        """fp32(-log2(min_p)) octaves: min_p keeps what lies no further below the maximum. Off: infinite."""
        if self.min_p <= 0:
            return np.float32(np.inf)
        return np.float32(max(0.0, -math.log2(self.min_p)))

    @property
    def top_p_fraction(self) -> int:
        """top_p * 2**32, rounded; ONE when off."""
        return min(ONE, math.floor(max(self.top_p, 0.0) * ONE + 0.5))

    def limited_k(self, vocab_size: int) -> int:
        """top_k, or 0 where it removes nothing."""
        return self.top_k if 0 < self.top_k < vocab_size else 0
