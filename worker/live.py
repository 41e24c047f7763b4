"""The live batch as columns, one line per slot: tokens, lengths, computed positions, block table.

Owns who sits where. Knows no policy and no model. Columns instead of objects because a step then costs the
host a few array operations for the whole batch and nothing per row (benchmarks/host_cost.py). Columns that
index others are int64: NumPy gathers five times slower through int32.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np

from worker.blocks import blocks_for
from worker.sequence import Indices, Ints, Sequence

NOBODY = np.iinfo(np.int64).max  # the arrival of an empty slot: sorts behind every row
PROMISED = -1  # a token that is being drawn: the device has it, the host will


def cells(lines: Indices, counts: Indices) -> tuple[Indices, Indices]:
    """The first ``counts[i]`` columns of line ``lines[i]``, one line behind the other, as a NumPy index."""
    before = counts.cumsum() - counts
    return lines.repeat(counts), np.arange(counts.sum()) - before.repeat(counts)


class LiveBatch:
    """``computed`` chases ``length``: prefill, chunks, decode and resume after preemption are that one rule.

    Between steps a live line has at least one pending token (``computed < length``). ``known`` chases
    ``length``, too: they differ by the token of a step under way.
    """

    def __init__(self, max_batch: int, context_length: int, block_size: int) -> None:
        width = blocks_for(context_length, block_size)
        self.block_size = block_size
        self.tokens = np.zeros((max_batch, context_length), np.int32)  # prompt, then output
        self.table = np.zeros((max_batch, width), np.int32)  # block numbers; behind them 0, the bin
        self.num_blocks = np.zeros(max_batch, np.int64)
        self.num_prompt = np.zeros(max_batch, np.int64)
        self.length = np.zeros(max_batch, np.int64)  # tokens, those promised among them
        self.known = np.zeros(max_batch, np.int64)  # tokens the host knows
        self.final = np.zeros(max_batch, np.int64)  # the most tokens it will have
        self.computed = np.zeros(max_batch, np.int64)  # tokens whose keys and values are in the cache
        self.arrival = np.full(max_batch, NOBODY)
        self.streamed = np.zeros(max_batch, np.bool_)
        self.sequences: list[Sequence | None] = [None] * max_batch
        self.free_slots = list(range(max_batch - 1, -1, -1))
        self._order: Indices | None = None

    def __len__(self) -> int:
        return len(self.sequences) - len(self.free_slots)

    @property
    def order(self) -> Indices:
        """Live slots, oldest row first. [live]"""
        if self._order is None:
            self._order = np.argsort(self.arrival)[: len(self)]
        return self._order

    @property
    def pending(self) -> Indices:
        """Tokens each live row has still to compute, in order. [live]"""
        order = self.order
        return self.length[order] - self.computed[order]

    @property
    def spent(self) -> Indices:
        """Live slots whose last token is promised, in order."""
        order = self.order
        return order[self.length[order] >= self.final[order]]

    @property
    def cramped(self) -> Indices:
        """Live slots whose tokens no longer fit their blocks, each one block short, in order.

        The last token of a row is never computed and needs no room.
        """
        order = self.order
        length, room = self.length[order], self.num_blocks[order] * self.block_size
        return order[(length > room) & (length < self.final[order])]

    def join(self, sequences: Seq[Sequence], blocks: Ints) -> None:
        """Seats waiting sequences in free slots, nothing computed yet; ``blocks``: one's behind another's."""
        slots = np.array([self.free_slots.pop() for _ in sequences])
        self.num_prompt[slots] = [len(one.row.prompt) for one in sequences]
        self.length[slots] = self.known[slots] = [one.num_tokens for one in sequences]
        self.num_blocks[slots] = blocks_for(self.length[slots], self.block_size)
        tokens = chain.from_iterable(chain(one.row.prompt, one.output) for one in sequences)
        self.tokens[cells(slots, self.length[slots])] = np.fromiter(tokens, np.int32)
        self.table[cells(slots, self.num_blocks[slots])] = blocks
        self.final[slots] = self.num_prompt[slots] + [one.row.params.max_tokens for one in sequences]
        self.computed[slots] = 0
        self.arrival[slots] = [one.arrival for one in sequences]
        self.streamed[slots] = [one.row.streamed for one in sequences]
        for sequence, slot in zip(sequences, slots.tolist(), strict=True):
            sequence.slot = slot
            self.sequences[slot] = sequence
        self._order = None

    def leave(self, slots: Indices) -> Ints:
        """Empties ``slots`` and returns the blocks they held; the caller frees them."""
        held = self.held(slots)
        for slot in slots.tolist():
            self.at(slot).slot = -1
            self.sequences[slot] = None
            self.free_slots.append(slot)
        self.table[slots, : self.num_blocks[slots].max(initial=0)] = 0
        self.num_blocks[slots] = 0
        self.arrival[slots] = NOBODY
        self._order = None
        return held

    def grow(self, slots: Indices, blocks: Ints) -> None:
        """One more block for each of ``slots``."""
        self.table[slots, self.num_blocks[slots]] = blocks
        self.num_blocks[slots] += 1

    def promise(self, slots: Indices) -> None:
        """One more token for each of ``slots``, to be drawn."""
        self.tokens[slots, self.length[slots]] = PROMISED
        self.length[slots] += 1

    def keep(self, slots: Indices, tokens: Ints) -> None:
        """The token that was promised first to each of ``slots``."""
        self.tokens[slots, self.known[slots]] = tokens
        self.known[slots] += 1

    def output(self, slot: int, since: int = 0) -> list[int]:
        """Tokens generated by the row in ``slot`` as far as known, without the first ``since``."""
        generated: list[int] = self.tokens[slot, self.num_prompt[slot] + since : self.known[slot]].tolist()
        return generated

    def held(self, slots: Indices) -> Ints:
        """Every block in the tables of ``slots``."""
        lengths = self.num_blocks[slots]
        width = lengths.max(initial=0)
        return self.table[slots, :width][np.arange(width) < lengths[:, None]]

    def at(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None, f"slot {slot} is empty"
        return sequence

    def check(self) -> None:
        """Raises AssertionError where the columns contradict one another."""
        order = self.order.tolist()
        taken = [slot for slot, sequence in enumerate(self.sequences) if sequence is not None]
        assert sorted(order) == taken, "order and seats differ"
        assert sorted(order + self.free_slots) == list(range(len(self.sequences))), "a slot leaked"
        assert all(self.at(slot).slot == slot for slot in order)
        arrivals = [self.at(slot).arrival for slot in order]
        assert arrivals == sorted(arrivals), "not in order of arrival"
        assert (self.pending >= 1).all(), "a live row with nothing to compute"
        promised = self.length[order] - self.known[order]
        assert ((promised == 0) | (promised == 1)).all(), "more than one token is under way for a row"
        room = self.num_blocks[order] * self.block_size
        assert (self.computed[order] <= room).all(), "computed past its blocks"
        assert not self.num_blocks[self.free_slots].any(), "an empty slot holds blocks"
        unused = np.arange(self.table.shape[1]) >= self.num_blocks[:, None]
        assert not self.table[unused].any(), "a block behind the end of a row's table"
