"""Batches by hand, for tests of models: rows in, Batch out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worker.batch import Batch


@dataclass(frozen=True)
class Part:
    """Tokens of one row, from position ``past`` on; ``blocks`` is the row's whole table."""

    ids: Sequence[int]
    past: int
    blocks: Sequence[int]
    wants_logits: bool = True


def make_batch(parts: Sequence[Part], block_size: int, spare_width: int = 0) -> Batch:
    """The batch of ``parts``; ``spare_width`` widens its table beyond need."""
    cumulative = np.cumsum([0, *(len(part.ids) for part in parts)]).astype(np.int32)
    width = max(-(-(part.past + len(part.ids)) // block_size) for part in parts) + spare_width
    table = np.zeros((len(parts), width), np.int32)
    for row, part in enumerate(parts):
        shown = list(part.blocks)[:width]
        table[row, : len(shown)] = shown
    wanting = np.array([part.wants_logits for part in parts])
    return Batch(
        input_ids=np.concatenate([np.asarray(part.ids, np.int64) for part in parts]),
        cumulative=cumulative,
        past=np.array([part.past for part in parts], np.int32),
        block_table=table,
        logits_rows=(cumulative[1:][wanting] - 1).astype(np.int64),
        slots=np.arange(len(parts), dtype=np.int32),
    )
