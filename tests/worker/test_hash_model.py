"""The tests' HashModel notices every way to read the cache wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from engine_fakes import HashModel, hashed

from worker.batch import Batch

TOKENS = [5, 6, 7, 8, 9, 10]


def batch(tokens: list[int], past: int, blocks: list[int]) -> Batch:
    return Batch(
        input_ids=np.array(tokens, np.int64),
        cumulative=np.array([0, len(tokens)], np.int32),
        past=np.array([past], np.int32),
        block_table=np.array([blocks], np.int32),
        logits_rows=np.array([len(tokens) - 1], np.int64),
        slots=np.zeros(1, np.int32),
    )


def test_the_next_token_is_the_hash_of_all_tokens_whatever_the_chunks() -> None:
    for cut in range(1, 6):
        model = HashModel(block_size=4)
        model.run(batch(TOKENS[:cut], 0, [3, 9]))
        logits = model.run(batch(TOKENS[cut:], cut, [3, 9]))
        assert logits.shape == (1, 64)
        assert logits.argmax() == hashed(TOKENS)


def blocks_swapped(right: Batch) -> Batch:
    return replace(right, block_table=right.block_table[:, ::-1].copy())


def token_off(right: Batch) -> Batch:
    return replace(right, input_ids=right.input_ids + 1)


def stale_block(right: Batch) -> Batch:
    return replace(right, block_table=np.array([[3, 9]], np.int32))


def position_off(right: Batch) -> Batch:
    return replace(right, past=right.past - 1)


@pytest.mark.parametrize("damage", [blocks_swapped, token_off, stale_block, position_off])
def test_hash_model_notices(damage: Callable[[Batch], Batch]) -> None:
    model = HashModel(block_size=4)
    for blocks in ([3, 9], [9, 5], [3, 9]):  # earlier rows'
        model.run(batch([1, 2, 3, 4, 5, 6, 7, 8], 0, blocks))
    model.run(batch(TOKENS[:5], 0, [3, 5]))
    assert model.run(batch(TOKENS[5:], 5, [3, 5])).argmax() == hashed(TOKENS)
    assert model.run(damage(batch(TOKENS[5:], 5, [3, 5]))).argmax() != hashed(TOKENS)


def test_hash_model_refuses_to_read_what_nobody_wrote() -> None:
    model = HashModel(block_size=4)
    model.run(batch(TOKENS[:5], 0, [3, 5]))
    model.poison(np.array([3], np.int32))
    with pytest.raises(AssertionError, match="nobody wrote"):
        model.run(batch(TOKENS[5:], 5, [3, 5]))
