"""A line when a batch comes, a line when it has gone; never one a row."""

from __future__ import annotations

import logging

import pytest

from producer.wire import Failure, Result, Usage
from worker import diary
from worker.diary import Diary


def result(batch: str, number: int, code: str | None = None) -> Result:
    job_id = f"{batch}-0-{number}"
    failure = Failure.of(code, "why") if code else None
    return Result(custom_id=job_id, job_id=job_id, created=0, usage=Usage(1, 1), failure=failure)


def spoken(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.fixture(autouse=True)
def listening(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker.diary")


def test_a_batch_of_many_rows_is_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    book = Diary()
    book.holds({"b"})
    for number in range(100):
        book.holds({"b"})
        book.ended(result("b", number, "timeout" if number < 3 else None))
    book.close()
    first, last = spoken(caplog)
    assert first == "batch b: its first rows are here"
    assert last.endswith(": 97 completed, 3 timeout")
    assert caplog.records[1].event == {  # type: ignore[attr-defined]
        "event": "batch_left",
        "batch": "b",
        "seconds": pytest.approx(0, abs=5),
        "completed": 97,
        "timeout": 3,
    }


def test_a_batch_leaves_when_it_was_quiet(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Diary()
    book.ended(result("b", 1))
    book.holds({"c"})
    assert len(spoken(caplog)) == 2
    monkeypatch.setattr(diary, "QUIET_SECONDS", -1.0)
    book.holds(())
    assert [line.split(":")[0] for line in spoken(caplog)[2:]] == ["batch b", "batch c"]
    book.ended(result("b", 2))
    assert spoken(caplog)[-1] == "batch b: its first rows are here"


def test_strangers_are_no_batch_and_a_flood_of_batches_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    book = Diary()
    book.ended(
        Result(custom_id="x", job_id="os.system", created=0, failure=Failure.of("invalid_request", ""))
    )
    assert spoken(caplog) == []
    for number in range(2 * diary.MAX_BATCHES):
        book.ended(result(f"b{number}", 1))
    assert len(spoken(caplog)) == diary.MAX_BATCHES
