"""A failed step: the guilty row alone fails, by bisection; its neighbours' output does not change."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence

import numpy as np
import pytest
from engine_fakes import (
    DeviceModel,
    DeviceSampler,
    HashModel,
    Ledger,
    WatchfulSampler,
    drain,
    engine_over,
    row,
    run_all,
    solo,
)
from numpy.typing import NDArray

from kernels.rows import RowParams, Status
from worker.batch import Batch
from worker.bisection import Bisection
from worker.engine import MAX_VERDICTS, Engine, SeatError
from worker.scheduler import Policy
from worker.sequence import Row

POISON = 1000  # beyond the vocabulary: no row draws it


class FragileModel(HashModel):
    """Fails, and forgets its cache, on runs that hold POISON, too many rows, or a number in bad_runs."""

    LACK: type[Exception] = RuntimeError  # what too many rows raise

    def __init__(self, max_rows: int = 99, bad_runs: tuple[int, ...] = (), **sizes: int) -> None:
        super().__init__(**sizes)
        self.max_rows = max_rows
        self.bad_runs = bad_runs
        self.runs = self.failures = 0

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.runs += 1
        poisoned = POISON in batch.input_ids
        if poisoned or len(batch.past) > self.max_rows or self.runs in self.bad_runs:
            self.failures += 1
            self.poison(np.arange(self.num_blocks, dtype=np.int32))
            raise RuntimeError("poisoned") if poisoned else self.LACK("no room")
        return super().run(batch)


class CrampedModel(FragileModel):
    LACK = MemoryError


def plain(count: int) -> list[Row]:
    return [row(i, range(i, i + 3 + i % 5), max_tokens=6 + i % 7, streamed=i % 3 == 0) for i in range(count)]


def poisoned(row_id: int, before: int = 0) -> Row:
    return row(row_id, [*range(before), POISON, 1], max_tokens=5)


def failed(ledger: Ledger) -> set[int]:
    return {i for i, output in ledger.endings.items() if output.status == Status.FAILED}


def assert_equal_alone(ledger: Ledger, rows: list[Row]) -> None:
    for one in rows:
        assert (ledger.tokens[one.id], ledger.endings[one.id].status) == solo(one)


@pytest.mark.parametrize("place", [0, 3, 10, 15])
@pytest.mark.parametrize("before", [0, 30])
@pytest.mark.parametrize("max_batch", [1, 8])
def test_one_poisoned_row_fails_alone(place: int, before: int, max_batch: int) -> None:
    good = plain(15)
    rows = [*good[:place], poisoned(99, before), *good[place:]]
    model = FragileModel()
    ledger = run_all(engine_over(model, max_batch=max_batch), rows)
    assert failed(ledger) == {99}
    assert model.failures <= 1 + np.log2(max_batch)  # the step, then its halves
    assert ledger.endings[99].message == "RuntimeError: poisoned"
    assert_equal_alone(ledger, good)


def test_a_poisoned_row_in_a_pool_that_preempts() -> None:
    good = plain(12)
    engine = engine_over(FragileModel(num_blocks=10), max_batch=8, reserve_tokens=0)
    ledger = run_all(engine, [*good[:6], poisoned(99, before=20), *good[6:]])
    assert failed(ledger) == {99}
    assert engine.load.preemptions > 0
    assert_equal_alone(ledger, good)


def test_several_poisoned_rows_fail_and_nobody_else() -> None:
    good = plain(20)
    rows = [*good[:5], poisoned(91), *good[5:9], poisoned(92, 4), poisoned(93), *good[9:]]
    ledger = run_all(engine_over(FragileModel(), max_batch=8), rows)
    assert failed(ledger) == {91, 92, 93}
    assert_equal_alone(ledger, good)


def test_rows_that_join_during_a_trial_wait_and_are_never_blamed() -> None:
    engine, ledger = engine_over(FragileModel(), max_batch=8), Ledger()
    first = [*plain(7), poisoned(99)]
    late = [row(20 + i, [i, i], max_tokens=4) for i in range(5)]
    by_id = {one.id: one for one in (*first, *late)}
    for one in first:
        engine.add(one)
    for one in late:
        ledger.book(engine.step(), by_id)
        engine.check()
        engine.add(one)
    while engine.has_work:
        ledger.book(engine.step(), by_id)
        engine.check()
    assert failed(ledger) == {99}
    assert_equal_alone(ledger, [*plain(7), *late])


def test_a_suspect_cancelled_in_mid_trial_ends_the_trial() -> None:
    engine, ledger = engine_over(FragileModel(), max_batch=8), Ledger()
    rows = {one.id: one for one in [*plain(3), poisoned(99)]}
    for one in rows.values():
        engine.add(one)
    ledger.book(engine.step(), rows)  # fails: rows 0 and 1 are tried first
    for row_id in rows:
        engine.cancel(row_id)
    while engine.has_work:
        ledger.book(engine.step(), rows)
        engine.check()
    assert {output.status for output in ledger.endings.values()} == {Status.CANCELLED}
    assert len(ledger.endings) == 4


def test_a_failure_that_does_not_come_back_costs_nobody_anything(caplog: pytest.LogCaptureFixture) -> None:
    good = plain(16)
    with caplog.at_level(logging.WARNING):
        ledger = run_all(engine_over(FragileModel(bad_runs=(4,)), max_batch=8), good)
    assert failed(ledger) == set()
    assert_equal_alone(ledger, good)
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "a step of 8 rows failed",
        "no row fails by itself",
    ]


@pytest.mark.parametrize("kind", [FragileModel, CrampedModel])
def test_a_batch_too_large_for_the_model_shrinks_until_it_fits(kind: type[FragileModel]) -> None:
    good = plain(40)
    model = kind(max_rows=3)
    ledger = run_all(engine_over(model, max_batch=16, prefill_tokens=48), good)
    assert model.failures < 15  # each ends with half the rows
    assert failed(ledger) == set()
    assert_equal_alone(ledger, good)


def test_a_model_that_always_fails_is_not_the_rows_fault() -> None:
    engine = engine_over(FragileModel(max_rows=0))
    rows = {one.id: one for one in plain(12)}
    for one in rows.values():
        engine.add(one)
    ledger = Ledger()
    with pytest.raises(RuntimeError, match="no room"):
        for _ in itertools.repeat(None, 100):
            ledger.book(engine.step(), rows)
    assert len(failed(ledger)) == MAX_VERDICTS - 1


def test_out_of_memory_is_no_rows_fault(caplog: pytest.LogCaptureFixture) -> None:
    """Not even one row fits: the process has to start again, and no row has failed."""
    model = CrampedModel(max_rows=0)
    engine, rows = engine_over(model, max_batch=8), {one.id: one for one in plain(12)}
    for one in rows.values():
        engine.add(one)
    ledger = Ledger()
    with caplog.at_level(logging.WARNING), pytest.raises(MemoryError):
        for _ in itertools.repeat(None, 100):
            ledger.book(engine.step(), rows)
    assert not ledger.endings
    assert model.failures == 4  # of 8, 4, 2 rows and 1
    said = [record.message for record in caplog.records if "out of memory" in record.message]
    assert said == [f"out of memory: at most {limit} live rows for now" for limit in (4, 2, 1)]


def test_only_the_type_says_that_memory_was_short() -> None:
    """A row that fails with such words fails alone: what a device means by them is the model's business."""

    class Wordy(FragileModel):
        def run(self, batch: Batch) -> NDArray[np.float32]:
            if POISON in batch.input_ids:
                raise RuntimeError("out of memory")
            return super().run(batch)

    good = plain(7)
    ledger = run_all(engine_over(Wordy(), max_batch=8), [*good, poisoned(99)])
    assert failed(ledger) == {99}
    assert_equal_alone(ledger, good)


class FailingDevice(DeviceModel):
    """Fails once, in its fourth run."""

    def __init__(self, error: Exception) -> None:
        super().__init__(max_batch=4)
        self.errors = {4: error}
        self.runs = 0

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.runs += 1
        if self.runs in self.errors:
            self.poison(np.arange(self.num_blocks, dtype=np.int32))
            raise self.errors[self.runs]
        return super().run(batch)


@pytest.mark.parametrize("error", [RuntimeError("poisoned"), MemoryError("no room")])
@pytest.mark.parametrize("others", [0, 1, 2])
def test_rows_that_end_while_a_step_fails_leave_no_blame_behind(
    error: Exception, others: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The third token, which lands after the fourth run has failed, is the first row's last."""
    prompt, (first, second, third) = [7, 8, 9], solo(row(0, [7, 8, 9], max_tokens=3))[0]
    assert third not in (first, second)
    rows = [row(0, prompt, max_tokens=9, eos_ids=(third,))]
    rows += [row(number, [number], max_tokens=9) for number in range(1, 1 + others)]
    model = FailingDevice(error)
    engine = Engine(model, DeviceSampler(model), Policy(max_batch=4, prefill_tokens=16), overlap=True)
    with caplog.at_level(logging.WARNING):
        ledger = run_all(engine, rows)
        later = run_all(engine, [row(9, [5], max_tokens=2)])
    assert not failed(ledger)
    assert_equal_alone(ledger, rows)
    assert_equal_alone(later, [row(9, [5], max_tokens=2)])
    said = [record.message.partition(":")[0] for record in caplog.records]
    what_follows = "out of memory" if isinstance(error, MemoryError) else "no row fails by itself"
    assert said == [f"a step of {1 + others} rows failed", *([what_follows] if others else [])]


class FragileSampler(WatchfulSampler):
    """Fails half way through a step whenever a row's sampling seed is 666; the rows before it have drawn."""

    def draw(self, logits: NDArray[np.float32], slot: int) -> tuple[int, Status]:
        drawn = super().draw(logits, slot)
        held = self.rows[slot]
        assert held is not None
        if held[0].seed == 666:
            raise ZeroDivisionError("no such number")
        return drawn


def test_a_sampler_that_fails_half_way_leaves_no_trace() -> None:
    good = plain(12)
    rows = [*good[:7], row(99, [1], max_tokens=5, seed=666), *good[7:]]
    engine = Engine(HashModel(), FragileSampler(8, 64), Policy(max_batch=8, prefill_tokens=16))
    ledger = run_all(engine, rows)
    assert failed(ledger) == {99}
    assert_equal_alone(ledger, good)


class PickySampler(WatchfulSampler):
    """Refuses rows whose sampling seed is 666: before it takes their slot, or (``late``) half way through."""

    def __init__(self, late: bool) -> None:
        super().__init__(8, 64)
        self.late = late

    def admit(self, slot: int, params: RowParams, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        if params.seed != 666:
            super().admit(slot, params, prompt, output)
        elif self.late:
            super().admit(slot, params, prompt, output)
            raise OverflowError("too much")
        else:
            raise OverflowError("too much")

    def release(self, slot: int) -> None:
        if self.rows[slot] is None:
            raise KeyError(slot)
        super().release(slot)


@pytest.mark.parametrize("late", [False, True])
def test_a_row_the_sampler_does_not_take_fails_alone(late: bool) -> None:
    good = plain(12)
    bad = [row(number, [1], max_tokens=5, seed=666) for number in (97, 98, 99)]
    sampler = PickySampler(late)
    engine = Engine(HashModel(), sampler, Policy(max_batch=8, prefill_tokens=16))
    ledger = run_all(engine, [*bad[:2], *good, bad[2]])
    assert failed(ledger) == {97, 98, 99}
    assert {ledger.endings[one.id].message for one in bad} == {"OverflowError: too much"}
    assert_equal_alone(ledger, good)


def test_a_row_the_sampler_does_not_take_hides_no_failure_of_the_model() -> None:
    good = plain(12)
    refused = row(98, [1], max_tokens=5, seed=666)
    engine = Engine(FragileModel(), PickySampler(late=False), Policy(max_batch=8, prefill_tokens=16))
    ledger = run_all(engine, [refused, poisoned(99), *good])
    assert {ledger.endings[number].message for number in failed(ledger)} == {
        "OverflowError: too much",
        "RuntimeError: poisoned",
    }
    assert failed(ledger) == {98, 99}
    assert_equal_alone(ledger, good)


class LostModel(HashModel):
    """Its device is gone for good."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        raise SystemExit("the GPU failed")


def test_a_lost_device_ends_the_process_though_the_sampler_fails_on_it_too() -> None:
    engine = Engine(LostModel(), PickySampler(late=False), Policy(max_batch=2, prefill_tokens=16))
    for number in range(4):
        engine.add(row(number, [1], max_tokens=5, seed=666))
    with pytest.raises(SystemExit, match="the GPU failed"):
        engine.step()


class FaultyDevice(PickySampler):
    """Fails once, as the third row of a step is told to it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(late=False)
        self._errors = {2: error}

    def admit(self, slot: int, params: RowParams, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        if slot in self._errors:
            raise self._errors.pop(slot)
        super().admit(slot, params, prompt, output)


@pytest.mark.parametrize("error", [RuntimeError("illegal address"), MemoryError("out of memory")])
def test_a_device_that_fails_as_rows_are_seated_is_no_rows_fault(error: Exception) -> None:
    rows = plain(12)
    ledger = run_all(Engine(HashModel(), FaultyDevice(error), Policy(max_batch=8, prefill_tokens=64)), rows)
    assert not failed(ledger)
    assert_equal_alone(ledger, rows)


def test_a_sampler_that_takes_nobody_is_not_the_rows_fault() -> None:
    rows = {number: row(number, [1], max_tokens=5, seed=666) for number in range(12)}
    engine = Engine(HashModel(), PickySampler(late=False), Policy(max_batch=2, prefill_tokens=16))
    for one in rows.values():
        engine.add(one)
    ledger = Ledger()
    with pytest.raises(SeatError, match="too much"):
        drain(engine, ledger, rows)
    assert len(failed(ledger)) == 2 * (MAX_VERDICTS - 1)


def test_bisection_halves_until_a_row_is_alone() -> None:
    bisection = Bisection()
    assert bisection.on_trial is None
    assert bisection.failed({1: 10, 2: 20, 3: 30, 4: 40}, 4) is None
    assert bisection.on_trial == {1, 2}
    assert not bisection.trial_is_over({1: 10, 2: 19}.get)
    assert bisection.trial_is_over({1: 10, 2: None}.get)
    assert bisection.on_trial == {3, 4}
    assert bisection.failed({3: 5, 4: 6}, 2) is None
    assert bisection.on_trial == {3}
    assert bisection.failed({3: 5}, 1) == 3
    assert bisection.on_trial is None


def test_bisection_tries_a_row_that_is_the_last_of_its_step_alone() -> None:
    bisection = Bisection()
    assert bisection.failed({1: 10}, 3) is None
    assert bisection.on_trial == {1}
    assert bisection.failed({1: 10}, 1) == 1
    assert bisection.on_trial is None


def test_bisection_forgets_a_group_once_its_halves_are_tried() -> None:
    bisection = Bisection()
    bisection.failed({1: 1, 2: 1, 3: 1, 4: 1}, 4)
    bisection.failed({1: 1, 2: 1}, 2)
    tried = []
    while bisection.on_trial:
        tried.append(set(bisection.on_trial))
        assert bisection.trial_is_over({}.get)
    assert tried == [{1}, {2}, {3, 4}]


def test_bisection_ends_without_a_verdict_when_every_half_passes() -> None:
    bisection = Bisection()
    bisection.failed({1: 1, 2: 1}, 2)
    assert bisection.trial_is_over({1: 1}.get)
    assert bisection.trial_is_over({2: 1}.get)
    assert bisection.on_trial is None
    assert not bisection.trial_is_over({}.get)
