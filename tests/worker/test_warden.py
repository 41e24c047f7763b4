"""The warden with an engine that only counts what is done to it."""

from __future__ import annotations

import pytest

from producer.errors import LivebatchError
from worker.events import Died, Ready
from worker.warden import MAX_FAILED_STARTS, MAX_VERDICTS, Warden


class CountingEngine:
    """``starts`` and ``kills``; everything else is nothing to it."""

    def __init__(self) -> None:
        self.starts = self.kills = 0

    def start(self) -> None:
        self.starts += 1

    def send(self, rows: object, cancels: object) -> None:
        pass

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


KILLED = Died("killed by SIGKILL")


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


def test_rows_are_guilty_until_all_of_them_are(warden: Warden) -> None:
    for _ in range(5):
        for _ in range(MAX_VERDICTS - 1):
            warden.condemn("b-0-1")
        warden.completed()
    for _ in range(MAX_VERDICTS - 1):
        warden.condemn("b-0-1")
    with pytest.raises(LivebatchError, match="completed none"):
        warden.condemn("b-0-1")
