"""Batch: a Step as the flat arrays every model takes. Knows no policy and no model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.blocks import blocks_for
from worker.live import LiveBatch
from worker.sequence import Ints, Step


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One run of the model: T tokens of B rows, n of which want logits.

    A token below 0 (live.PROMISED) is the one drawn last for its slot, which only the device knows yet.

    Row b owns tokens ``cumulative[b]:cumulative[b + 1]``, at positions ``past[b]`` and on. Position p lives
    in block ``block_table[b, p // block_size]`` at offset ``p % block_size``.
    """

    input_ids: NDArray[np.int64]  # [T]
    cumulative: Ints  # [B + 1], from 0 to T
    past: Ints  # [B] tokens already in the cache
    block_table: Ints  # [B, W], padded with 0, the bin; W is what the longest row of the step needs
    logits_rows: NDArray[np.int64]  # [n] indices into the tokens, ascending; n may be 0
    slots: Ints  # [B] the rows' lines in the live batch


def pack(step: Step, live: LiveBatch) -> Batch:
    """Flattens ``step`` (at least one slice). Decode rows and chunks alike: no case of their own."""
    ends = step.counts.cumsum()  # [B] behind each slice's last token in the packed order
    rows = step.slots.repeat(step.counts)  # [T] slot of each token
    offsets = (step.starts + step.counts - ends).repeat(step.counts)
    positions = np.arange(len(rows)) + offsets  # [T] position of each token in its row
    cumulative = np.zeros(len(step) + 1, np.int32)
    cumulative[1:] = ends
    width = blocks_for(int((step.starts + step.counts).max()), live.block_size)
    return Batch(
        input_ids=live.tokens[rows, positions].astype(np.int64),
        cumulative=cumulative,
        past=step.starts.astype(np.int32),
        block_table=live.table[step.slots, :width],
        logits_rows=ends[step.samples] - 1,
        slots=step.slots.astype(np.int32),
    )


def largest(max_rows: int, max_tokens: int, max_length: int, width: int) -> Batch:
    """A prefill of as many tokens as ``max_rows`` rows may have in one run, all written to the bin."""
    num_tokens = min(max_tokens, max_rows * max_length)
    num_rows = -(-num_tokens // max_length)
    cumulative = np.minimum(np.arange(num_rows + 1) * max_length, num_tokens)
    return Batch(
        input_ids=np.zeros(num_tokens, np.int64),
        cumulative=cumulative.astype(np.int32),
        past=np.zeros(num_rows, np.int32),
        block_table=np.zeros((num_rows, width), np.int32),
        logits_rows=cumulative[1:] - 1,
        slots=np.zeros(num_rows, np.int32),
    )
