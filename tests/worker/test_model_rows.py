"""TokenRows and split: integers only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from model_batches import Part, make_batch

from worker.token_rows import TokenRows, split


def test_every_token_becomes_a_row_that_sees_only_its_own_past() -> None:
    parts = [Part([70, 71, 72], 3, [5, 6, 7]), Part([80], 9, [2, 8, 4]), Part([90, 91], 0, [9], False)]
    rows = TokenRows.unpack(make_batch(parts, block_size=4), 4)
    assert rows.input_ids.tolist() == [70, 71, 72, 80, 90, 91]
    assert rows.positions.tolist() == [3, 4, 5, 9, 0, 1]
    assert rows.slots.tolist() == [[5, 3], [6, 0], [6, 1], [4, 1], [9, 0], [9, 1]]
    assert rows.widths.tolist() == [1, 2, 2, 3, 1, 1]
    assert rows.tables.tolist() == [[5, 0, 0], [5, 6, 0], [5, 6, 0], [2, 8, 4], [9, 0, 0], [9, 0, 0]]
    assert rows.new_blocks.tolist() == [6, 9]


def test_take_narrows_the_table_to_its_widest_token() -> None:
    parts = [Part([70], 3, [5]), Part([80], 9, [2, 8, 4]), Part([90], 5, [9, 1])]
    taken = TokenRows.unpack(make_batch(parts, block_size=4), 4).take(np.array([2, 0]))
    assert taken.input_ids.tolist() == [90, 70]
    assert taken.tables.tolist() == [[9, 1], [5, 0]]
    assert taken.tables.flags.c_contiguous


@pytest.mark.parametrize(
    ("widths", "run_cost", "max_blocks", "runs"),
    [
        ([3, 1, 2], 100, 1000, [[1, 2, 0]]),  # nothing gained by a second run
        ([50, 1, 1, 1], 100, 1000, [[1, 2, 3], [0]]),  # the long row would cost three others 49 reads each
        ([50, 1, 1, 1], 147, 1000, [[1, 2, 3, 0]]),  # 147 reads saved do not exceed the price
        ([40, 40, 40, 40], 100, 80, [[0, 1], [2, 3]]),  # equal rows, cut for memory alone
        ([99], 1, 1, [[0]]),  # one token is one run, however long
        ([1, 30, 90, 30, 1], 40, 1000, [[0, 4], [1, 3], [2]]),
    ],
)
def test_split(widths: list[int], run_cost: int, max_blocks: int, runs: list[list[int]]) -> None:
    assert [run.tolist() for run in split(np.array(widths), run_cost, max_blocks)] == runs


@given(st.lists(st.integers(1, 300), min_size=1, max_size=80), st.integers(0, 400), st.integers(1, 2000))
def test_split_loses_nothing_and_keeps_a_row_in_order(
    widths: list[int], run_cost: int, max_blocks: int
) -> None:
    runs = split(np.array(widths), run_cost, max_blocks)
    flat = np.concatenate(runs)
    assert sorted(flat.tolist()) == list(range(len(widths)))
    sorted_widths = np.array(widths)[flat]
    assert (np.diff(sorted_widths) >= 0).all()  # a row's later tokens are never narrower, so never earlier,
    same = np.diff(sorted_widths) == 0
    assert (np.diff(flat)[same] > 0).all()  # and among equals the order of the batch is kept
    assert all(len(run) == 1 or len(run) * widths[run[-1]] <= max_blocks for run in runs)
