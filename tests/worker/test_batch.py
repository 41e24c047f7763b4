"""pack: a step's flat arrays, spelt out by hand and against a token-by-token restatement."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kernels.rows import RowParams
from worker.batch import Batch, largest, pack
from worker.blocks import BlockPool, blocks_for
from worker.live import LiveBatch
from worker.sequence import Row, Sequence, Step


def step_of(slices: list[tuple[int, int, int, bool]]) -> Step:
    slots, starts, counts, samples = zip(*slices, strict=True)
    columns = (np.array(column, np.int64) for column in (slots, starts, counts))
    arrivals = np.array(slots, np.int64)
    return Step(*columns, samples=np.array(samples), arrivals=arrivals, left=(), joined=())


def seated(prompts: list[list[int]], block_size: int = 4) -> LiveBatch:
    """A live batch with these prompts in slots 0, 1, ... and blocks from a fresh pool."""
    live, pool = LiveBatch(len(prompts), 64, block_size), BlockPool(200)
    for arrival, prompt in enumerate(prompts):
        sequence = Sequence(Row(arrival, prompt, RowParams(max_tokens=9)), arrival)
        live.join([sequence], pool.lend(blocks_for(len(prompt), block_size)))
    return live


def test_decodes_and_chunks_side_by_side() -> None:
    live = seated([[10, 11, 12, 13, 14], [20, 21, 22], [30]])
    batch = pack(step_of([(0, 4, 1, True), (1, 0, 2, False), (2, 0, 1, True)]), live)
    assert batch.input_ids.tolist() == [14, 20, 21, 30]
    assert batch.cumulative.tolist() == [0, 1, 3, 4]
    assert batch.past.tolist() == [4, 0, 0]
    assert batch.block_table.tolist() == [[2, 1], [3, 0], [4, 0]]
    assert batch.logits_rows.tolist() == [0, 3]


def test_the_table_is_as_wide_as_the_step_needs() -> None:
    live = seated([list(range(20)), [1]])
    assert pack(step_of([(0, 0, 4, False), (1, 0, 1, True)]), live).block_table.shape == (2, 1)
    assert pack(step_of([(0, 0, 5, False)]), live).block_table.shape == (1, 2)
    assert pack(step_of([(0, 19, 1, True)]), live).block_table.shape == (1, 5)


def test_types_and_layout_are_what_a_model_binds() -> None:
    batch = pack(step_of([(0, 0, 2, False)]), seated([[1, 2, 3], [4]]))
    types = {name: getattr(batch, name).dtype.str for name in Batch.__slots__}
    columns = dict.fromkeys(("cumulative", "past", "block_table", "slots"), "<i4")
    assert types == {"input_ids": "<i8", "logits_rows": "<i8", **columns}
    assert all(getattr(batch, name).flags.c_contiguous for name in Batch.__slots__)
    assert batch.logits_rows.shape == (0,)


def test_any_step_equals_the_token_by_token_statement() -> None:
    random.seed(3)
    for _ in range(200):
        lengths = [random.randint(1, 60) for _ in range(random.randint(1, 9))]
        live = seated([[random.randrange(999) for _ in range(n)] for n in lengths])
        slices = []
        for slot in random.sample(range(len(lengths)), random.randint(1, len(lengths))):
            start = random.randrange(lengths[slot])
            count = random.randint(1, lengths[slot] - start)
            slices.append((slot, start, count, start + count == lengths[slot]))
        batch = pack(step_of(slices), live)
        tokens = [live.tokens[slot, start + i] for slot, start, count, _ in slices for i in range(count)]
        ends = np.cumsum([count for _, _, count, _ in slices])
        assert batch.input_ids.tolist() == tokens
        assert batch.cumulative.tolist() == [0, *ends.tolist()]
        assert batch.logits_rows.tolist() == [e - 1 for e, s in zip(ends, slices, strict=True) if s[3]]
        for line, (slot, start, count, _) in zip(batch.block_table, slices, strict=True):
            needs = blocks_for(start + count, 4)
            assert line[:needs].tolist() == live.held(np.array([slot]))[:needs].tolist()


@pytest.mark.parametrize(
    ("max_rows", "max_tokens", "max_length", "counts"),
    [
        (1, 8193, 2048, [2048]),  # as of `worker check`: one row, whatever a run could take
        (2, 8194, 2048, [2048, 2048]),
        (8, 8200, 512, [512] * 8),
        (256, 8448, 3000, [3000, 3000, 2448]),
        (256, 8448, 8192, [8192, 256]),
        (4, 8196, 131072, [8196]),
    ],
)
def test_the_largest_prefill_has_no_more_rows_than_there_are(
    max_rows: int, max_tokens: int, max_length: int, counts: list[int]
) -> None:
    """Its logits are a row each, and the memory for them is of ``max_rows``."""
    batch = largest(max_rows, max_tokens, max_length, 9)
    assert np.diff(batch.cumulative).tolist() == counts
    assert batch.cumulative[0] == 0
    assert len(batch.input_ids) == sum(counts)
    assert batch.logits_rows.tolist() == (np.cumsum(counts) - 1).tolist()
    assert batch.block_table.shape == (len(counts), 9)
    assert not batch.block_table.any()
    assert len(batch.past) == len(batch.slots) == len(counts)
