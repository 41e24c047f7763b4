"""The warden with an engine that only counts what is done to it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kernels.rows import RowParams, Status
from producer.errors import LivebatchError
from worker import silence
from worker.engine import Load
from worker.events import Died, Outputs, Ready
from worker.sequence import Output, Row
from worker.warden import MAX_FAILED_STARTS, MAX_VERDICTS, Warden


class CountingEngine:
    """``starts`` and ``kills``; everything else is nothing to it. ``work``: what it has done so far."""

    def __init__(self) -> None:
        self.starts = self.kills = 0
        self.work: int | None = 0

    def start(self) -> None:
        self.starts += 1

    def send(self, rows: object, cancels: object) -> None:
        pass

    def progress(self) -> object:
        return self.work

    def kill(self) -> None:
        self.kills += 1

    def stop(self) -> None:
        pass


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def warden(engine: CountingEngine) -> Warden:
    """Of an engine that is ready."""
    made = Warden(engine, 10.0)
    made.start()
    made.ready(Ready(0.0))
    return made


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[Warden, int], None]:
    """Seconds go by, a turn of the loop in each."""
    now = silence.time.monotonic()
    monkeypatch.setattr(silence.time, "monotonic", lambda: now)

    def turns(warden: Warden, seconds: int) -> None:
        nonlocal now
        for _ in range(seconds):
            now += 1.0
            warden.mind()

    return turns


KILLED = Died("killed by SIGKILL")


def rows(*numbers: int) -> list[Row]:
    return [Row(number, (1,), RowParams(max_tokens=1)) for number in numbers]


def outputs(status: Status, *numbers: int) -> Outputs:
    return Outputs([Output(number, [], status) for number in numbers], Load(0, 0, 0, 0, 0, 0, 0))


def test_an_engine_that_says_nothing_of_its_rows_is_killed(
    warden: Warden, engine: CountingEngine, pass_time: Callable[[Warden, int], None]
) -> None:
    pass_time(warden, 100)
    warden.send(rows(1, 2), [])
    pass_time(warden, 9)
    warden.heard(outputs(Status.RUNNING, 1))
    pass_time(warden, 9)
    assert (engine.kills, warden.owed) == (0, 2)
    pass_time(warden, 1)
    assert engine.kills == 1
    warden.died(KILLED)
    assert warden.owed == 0


def test_an_engine_that_not_even_sigkill_ends_is_past_help(
    warden: Warden, engine: CountingEngine, pass_time: Callable[[Warden, int], None]
) -> None:
    warden.send(rows(1), [])
    pass_time(warden, 19)
    with pytest.raises(LivebatchError, match="still there 10 s after SIGKILL"):
        pass_time(warden, 1)
    assert engine.kills == 1


def test_rows_it_shall_drop_are_owed_until_it_says_that_it_did(
    warden: Warden, engine: CountingEngine, pass_time: Callable[[Warden, int], None]
) -> None:
    warden.send(rows(1, 2), [])
    warden.send([], [1, 2])
    pass_time(warden, 9)
    warden.heard(outputs(Status.CANCELLED, 1))
    pass_time(warden, 9)
    assert (engine.kills, warden.owed) == (0, 1)
    warden.heard(outputs(Status.CANCELLED, 2))
    pass_time(warden, 100)
    assert (engine.kills, warden.owed) == (0, 0)


def test_an_engine_that_ran_is_started_again_without_limit(warden: Warden, engine: CountingEngine) -> None:
    for _ in range(10):
        warden.died(KILLED)
        assert not warden.is_ready
        warden.ready(Ready(0.0))
    assert engine.starts == 11


def test_one_that_does_not_start_is_tried_a_few_times_in_a_row(warden: Warden) -> None:
    for _ in range(2):
        for _ in range(MAX_FAILED_STARTS):  # the first of them was ready
            warden.died(KILLED)
        warden.ready(Ready(0.0))
    for _ in range(MAX_FAILED_STARTS):
        warden.died(KILLED)
    with pytest.raises(LivebatchError, match="does not start: killed by SIGKILL, 3 times"):
        warden.died(KILLED)


def test_one_that_says_why_it_cannot_be_built_is_not_tried_again(
    engine: CountingEngine,
) -> None:
    error, warden = LivebatchError("the model cannot run"), Warden(engine, 10)
    warden.start()
    with pytest.raises(LivebatchError) as raised:
        warden.died(Died("exit code 0", error))
    assert raised.value is error
    assert engine.starts == 1


def test_what_keeps_a_later_one_from_starting_may_pass(warden: Warden, engine: CountingEngine) -> None:
    error = LivebatchError("no memory on the GPU")
    warden.died(KILLED)
    for _ in range(MAX_FAILED_STARTS - 1):
        warden.died(Died("exit code 0", error))
    with pytest.raises(LivebatchError) as raised:
        warden.died(Died("exit code 0", error))
    assert raised.value is error
    assert engine.starts == MAX_FAILED_STARTS + 1


def test_rows_are_guilty_until_all_of_them_are(warden: Warden) -> None:
    for _ in range(5):
        for _ in range(MAX_VERDICTS - 1):
            warden.condemn("b-0-1")
        warden.completed()
    for _ in range(MAX_VERDICTS - 1):
        warden.condemn("b-0-1")
    with pytest.raises(LivebatchError, match="completed none"):
        warden.condemn("b-0-1")


@pytest.mark.parametrize("told", [99, None])
def test_an_engine_that_is_being_built_may_be_silent_as_long_as_it_works(
    warden: Warden, engine: CountingEngine, pass_time: Callable[[Warden, int], None], told: int | None
) -> None:
    warden.died(KILLED)
    for second in range(100):
        engine.work = second
        pass_time(warden, 1)
    engine.work = told
    pass_time(warden, 9)
    assert engine.kills == 0
    pass_time(warden, 1)
    assert engine.kills == 1
