"""Bisection of the rows that were in a dying engine. Integers only."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.quarantine import Quarantine


def run(poison: set[int], rows: list[int], width: int) -> tuple[list[int], int, set[int]]:
    """Play engine and parent: (rows found guilty, engine deaths, rows that ended well)."""
    quarantine, deaths = Quarantine(), dict.fromkeys(rows, 0)
    waiting, guilty, ended, num_deaths = list(rows), [], set[int](), 0
    while waiting:
        running = quarantine.choose(waiting, [])[:width]
        assert running, "rows wait and nobody may run"
        if not poison & set(running):
            for row in running:
                waiting.remove(row)
                ended.add(row)
                quarantine.left(row)
            continue
        num_deaths += 1
        for row in running:
            deaths[row] += 1
        if (found := quarantine.died(running, [deaths[row] for row in running])) is not None:
            guilty.append(found)
            waiting.remove(found)
            quarantine.left(found)
    return guilty, num_deaths, ended


def test_one_death_makes_no_suspect() -> None:
    quarantine = Quarantine()
    assert quarantine.died([1, 2, 3], [1, 1, 1]) is None
    assert not quarantine.is_active
    assert quarantine.choose([1, 9], []) == [1, 9]


def test_a_first_death_alone_is_an_accident_and_a_second_is_proof() -> None:
    quarantine = Quarantine()
    assert quarantine.died([7], [1]) is None
    assert quarantine.died([7], [2]) == 7
    assert not quarantine.is_active


def test_deaths_alone_are_counted_anew_for_each_row() -> None:
    quarantine = Quarantine()
    for row in (7, 8):
        assert quarantine.died([row], [2]) is None
        assert quarantine.choose([6, 7, 8], []) == [row]
        quarantine.left(row)
    assert quarantine.died([7], [3]) is None, "its number was free again"


def test_suspects_run_in_halves_and_the_others_wait() -> None:
    quarantine = Quarantine()
    assert quarantine.died([1, 2, 3, 4, 5, 9], [2, 2, 2, 2, 2, 1]) is None
    assert quarantine.choose([1, 2, 3, 4, 5, 9], []) == [1, 2, 3]
    for row in (1, 2, 3):
        quarantine.left(row)
    assert quarantine.choose([4, 5, 9], []) == [4, 5]
    quarantine.left(4)
    quarantine.left(5)
    assert quarantine.choose([9], []) == [9]


def test_rows_that_come_with_deaths_wait_for_the_running_ones_and_run_apart() -> None:
    quarantine = Quarantine()
    quarantine.arrive([])
    assert not quarantine.is_active
    quarantine.arrive([5])
    assert quarantine.choose([5, 6], [1, 2]) == []
    assert quarantine.died([1, 2], [1, 1]) is None, "the suspect was not in it"
    assert quarantine.choose([5, 6], []) == [5]
    assert quarantine.choose([6], [5]) == []
    assert quarantine.died([5], [3]) is None, "it may have been an accident: the others are not proof"
    assert quarantine.choose([5, 6], []) == [5]
    assert quarantine.died([5], [4]) == 5


def test_after_a_verdict_the_other_half_comes_first() -> None:
    """Poison stands side by side: sound rows run between two verdicts, and show that the engine can."""
    quarantine = Quarantine()
    assert quarantine.died([1, 2, 3, 4], [2, 2, 2, 2]) is None
    assert quarantine.died([1, 2], [3, 3]) is None
    assert quarantine.died([1], [4]) is None
    assert quarantine.died([1], [5]) == 1
    assert quarantine.died([2, 3, 4], [4, 3, 3]) is None
    assert quarantine.choose([2, 3, 4], []) == [4]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_exactly_the_poison_is_found_and_everybody_else_ends(data: st.DataObject) -> None:
    rows = list(range(data.draw(st.integers(1, 60))))
    poison = set(data.draw(st.lists(st.sampled_from(rows), max_size=3, unique=True)))
    width = data.draw(st.integers(1, 64))
    guilty, num_deaths, ended = run(poison, rows, width)
    assert sorted(guilty) == sorted(poison)
    assert ended == set(rows) - poison
    assert num_deaths <= len(poison) * (2 + min(width, len(rows)).bit_length() + 1)
