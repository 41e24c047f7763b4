"""TokenRows: a Batch in which every token is a row of its own, the form the CPU graph takes; and how to
split it.

NumPy only; must not know ONNX Runtime. A token attends to its own row's cache and nothing else, so its
result does not depend on which other tokens share its run, and a batch may be cut into runs wherever that
saves time or memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker.batch import Batch

Ids = NDArray[np.int64]
Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """T tokens. Token t sits at ``positions[t]`` of its row and is written to ``slots[t]``."""

    input_ids: Ids  # [T]
    positions: Ids  # [T]
    slots: Ids  # [T, 2] (block, offset in the block)
    widths: Ids  # [T] blocks the token attends to, its own included
    tables: Ints  # [T, W] those blocks; behind them 0, the bin, even where the row already holds more

    @classmethod
    def unpack(cls, batch: Batch, block_size: int) -> TokenRows:
        counts = np.diff(batch.cumulative)
        rows = np.repeat(np.arange(len(counts)), counts)
        positions = np.arange(len(rows)) + np.repeat(batch.past - batch.cumulative[:-1], counts)
        blocks, offsets = np.divmod(positions, block_size)
        slots = np.stack([batch.block_table[rows, blocks], offsets], axis=1)
        widths = blocks + 1
        attended = np.arange(batch.block_table.shape[1]) < widths[:, None]
        tables = np.where(attended, batch.block_table[rows], np.int32(0))
        return cls(batch.input_ids, positions, slots, widths, tables)

    def take(self, tokens: Ids) -> TokenRows:
        """Some of the tokens, with a table as wide as the widest of them needs."""
        widths = self.widths[tokens]
        tables = self.tables[tokens, : widths.max()]
        return TokenRows(
            self.input_ids[tokens],
            self.positions[tokens],
            self.slots[tokens],
            widths,
            np.ascontiguousarray(tables),
        )

    @property
    def new_blocks(self) -> Ids:
        """Blocks whose first slot these tokens write."""
        found: Ids = self.slots[self.slots[:, 1] == 0, 0]
        return found


def split(widths: Ids, run_cost: int, max_blocks: int) -> list[Ids]:
    """Cuts T tokens into runs, narrow tables first; a row's tokens keep their order. Index arrays of all T.

    Every token of a run reads a table as wide as its widest, so one long row makes all others slow. A cut
    is made where it saves more block reads than another run costs (``run_cost``, in block reads), and where
    a run would hold more than ``max_blocks`` gathered blocks.
    """
    order = np.argsort(widths, kind="stable")
    return [order[start:end] for start, end in _cuts(widths[order], 0, run_cost, max_blocks)]


def _cuts(widths: Ids, start: int, run_cost: int, max_blocks: int) -> Iterator[tuple[int, int]]:
    """Bounds of the runs for tokens sorted by width; ``start`` is the first token's place."""
    count = len(widths)
    saved = np.arange(1, count) * (widths[-1] - widths[:-1])  # by cutting behind each token but the last
    cut = 0
    if count > 1 and saved.max() > run_cost:
        cut = int(saved.argmax()) + 1
    elif count > 1 and count * widths[-1] > max_blocks:
        cut = count // 2
    if cut:
        yield from _cuts(widths[:cut], start, run_cost, max_blocks)
        yield from _cuts(widths[cut:], start + cut, run_cost, max_blocks)
    else:
        yield start, start + count
