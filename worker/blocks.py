"""BlockPool: lends the KV cache's blocks and takes them back. Integers only.

Block 0 is the bin that padded rows point at and is never lent. Lending twice, freeing twice and losing a
block are bugs, so they are assertions. Shared prefixes would turn ``_lent`` into counts, no more.
"""

from __future__ import annotations

import numpy as np

from worker.sequence import Ints


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold ``num_tokens``."""
    return -(-num_tokens // block_size)


class BlockPool:
    """A stack of free block numbers: what was freed last is lent first, while it is warm."""

    def __init__(self, num_blocks: int) -> None:
        """``num_blocks`` as the model counts them, the bin included."""
        self.num_blocks = num_blocks
        self._stack = np.arange(num_blocks - 1, 0, -1, dtype=np.int32)  # [:num_free] are free
        self.num_free = len(self._stack)
        self._lent = np.zeros(num_blocks, np.bool_)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def lend(self, count: int) -> Ints:
        """``count`` blocks. The caller looks at ``num_free`` first."""
        assert 0 <= count <= self.num_free, f"{count} blocks asked of {self.num_free}"
        self.num_free -= count
        blocks = self._stack[self.num_free : self.num_free + count].copy()
        self._lent[blocks] = True
        return blocks

    def free(self, blocks: Ints) -> None:
        """Takes back what ``lend`` gave, in any grouping."""
        assert self._lent[blocks].all(), "a block was freed that was not lent"
        self._lent[blocks] = False
        assert self.num_free + len(blocks) + np.count_nonzero(self._lent) == self.num_usable, "freed twice"
        self._stack[self.num_free : self.num_free + len(blocks)] = blocks
        self.num_free += len(blocks)

    @property
    def free_blocks(self) -> Ints:
        return self._stack[: self.num_free].copy()

    def check(self, held: Ints) -> None:
        """Raises AssertionError unless ``held``, the blocks in live rows' tables, is exactly what is lent."""
        lent = np.flatnonzero(self._lent)
        assert np.array_equal(np.sort(held), lent), "lent blocks and live tables differ"
        every = np.sort(np.concatenate((lent, self.free_blocks)))
        assert np.array_equal(every, np.arange(1, self.num_blocks)), "a block is lost or there twice"
