"""BlockPool with integers: lends each block once, never the bin, and notices every bug it can."""

from __future__ import annotations

import random

import numpy as np
import pytest

from worker.blocks import BlockPool, blocks_for
from worker.sequence import Ints


@pytest.mark.parametrize(("tokens", "size", "blocks"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2)])
def test_blocks_for_rounds_up(tokens: int, size: int, blocks: int) -> None:
    assert blocks_for(tokens, size) == blocks


def test_every_block_is_lent_once_and_never_the_bin() -> None:
    pool = BlockPool(9)
    lent = np.concatenate([pool.lend(3), pool.lend(5)])
    assert sorted(lent.tolist()) == list(range(1, 9))
    assert pool.num_free == 0
    pool.check(lent)


def test_asking_for_more_than_there_is_fails_and_changes_nothing() -> None:
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="4 blocks asked of 3"):
        pool.lend(4)
    assert pool.num_free == pool.num_usable == 3


def test_freed_blocks_come_back_warm() -> None:
    pool = BlockPool(9)
    first = pool.lend(2)
    pool.free(first)
    assert pool.lend(2).tolist() == first.tolist()


@pytest.mark.parametrize("blocks", [[1, 1], [0], [3], [1, 3]])
def test_freeing_what_is_not_lent_is_noticed(blocks: list[int]) -> None:
    pool = BlockPool(5)
    assert pool.lend(2).tolist() == [2, 1]
    with pytest.raises(AssertionError, match="freed"):
        pool.free(np.array(blocks, np.int32))


@pytest.mark.parametrize("held", [[1], [1, 2, 3], [2, 2]])
def test_check_notices_leaks_and_strangers(held: list[int]) -> None:
    pool = BlockPool(5)
    pool.lend(2)
    with pytest.raises(AssertionError, match="differ"):
        pool.check(np.array(held, np.int32))


def test_random_lending_keeps_the_books() -> None:
    random.seed(7)
    pool, held = BlockPool(40), list[Ints]()
    for _ in range(2000):
        if held and (random.random() < 0.5 or not pool.num_free):
            pool.free(held.pop(random.randrange(len(held))))
        else:
            held.append(pool.lend(random.randint(0, pool.num_free)))
        pool.check(np.concatenate([*held, np.empty(0, np.int32)]))
