"""A step cut into its prefills and its decodes: every token and every logits row is found in one of them."""

from __future__ import annotations

import numpy as np
from model_batches import Part, make_batch

from worker.batch import Batch
from worker.divide import divide, each_row


def rows_of(batch: Batch | None) -> list[tuple[list[int], int, list[int], int]]:
    """(tokens, past, table, slot) of each row."""
    if batch is None:
        return []
    bounds = batch.cumulative.tolist()
    return [
        (batch.input_ids[begin:end].tolist(), int(past), table.tolist(), int(slot))
        for begin, end, past, table, slot in zip(
            bounds[:-1], bounds[1:], batch.past, batch.block_table, batch.slots, strict=True
        )
    ]


def test_a_step_of_decodes_is_left_whole() -> None:
    batch = make_batch([Part([7], 3, [1]), Part([8], 0, [2], wants_logits=False), Part([9], 5, [3, 4])], 4)
    parts = divide(batch)
    assert parts.prefill is None
    assert parts.decode is batch
    assert parts.from_decode.tolist() == [True, True]
    assert parts.decode_rows.tolist() == [0, 2]


def test_a_step_of_prefills_has_no_decodes() -> None:
    batch = make_batch([Part([1, 2], 0, [1]), Part([3, 4, 5], 4, [2, 3], wants_logits=False)], 4)
    parts = divide(batch)
    assert parts.decode is None
    assert rows_of(parts.prefill) == rows_of(batch)
    assert parts.prefill is not None
    assert parts.prefill.logits_rows.tolist() == [1]
    assert parts.from_decode.tolist() == [False]


def test_random_steps_lose_nothing() -> None:
    dice = np.random.default_rng(5)
    for _ in range(200):
        given = [
            Part(
                dice.integers(100, size=dice.choice([1, 1, 2, 5])).tolist(),
                int(dice.integers(9)),
                dice.integers(1, 50, size=4).tolist(),
                wants_logits=bool(dice.integers(2)),
            )
            for _ in range(dice.integers(1, 8))
        ]
        batch = make_batch(given, 4)
        parts, rows = divide(batch), rows_of(batch)
        assert rows_of(parts.prefill) == [row for row in rows if len(row[0]) > 1]
        assert rows_of(parts.decode) == [row for row in rows if len(row[0]) == 1]
        wanting = [row for row, part in zip(rows, given, strict=True) if part.wants_logits]
        found, decodes = [], iter(parts.decode_rows)
        prefills = iter([] if parts.prefill is None else parts.prefill.logits_rows)
        for is_decode in parts.from_decode:
            if is_decode:
                found.append(rows_of(parts.decode)[next(decodes)])
            else:
                assert parts.prefill is not None
                ends = parts.prefill.cumulative[1:].tolist()
                found.append(rows_of(parts.prefill)[ends.index(next(prefills) + 1)])
        assert found == wanting


def test_each_row_by_itself() -> None:
    given = [Part([1, 2], 0, [1]), Part([3, 4, 5], 4, [2, 3], wants_logits=False), Part([6, 7], 2, [4])]
    batch = make_batch(given, 4)
    alone = list(each_row(batch))
    assert [rows_of(one) for one in alone] == [[row] for row in rows_of(batch)]
    assert [one.logits_rows.tolist() for one in alone] == [[1], [], [1]]
