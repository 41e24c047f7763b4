"""A main loop that is busy with one thing for longer than a lease lasts keeps its rows."""

from __future__ import annotations

import logging
import time

import pytest
import redis
from rq_rows import counts, enqueue, request
from service_fakes import run_burst, worker

from producer.wire import Request
from waiting import wait_until
from worker import keeper
from worker.rows import PreparedRow, RowPreparer

pytestmark = pytest.mark.redis

LEASE = {"lease_seconds": 1.0, "beat_seconds": 0.2, "maintenance_seconds": 0.1}


@pytest.fixture
def slow_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 4 takes three leases to be read, as one of tens of megabytes may."""
    prepare = RowPreparer.prepare

    def slow(preparer: RowPreparer, asked: Request, number: int) -> PreparedRow:
        if asked.line == 4:
            time.sleep(3 * LEASE["lease_seconds"])
        return prepare(preparer, asked, number)

    monkeypatch.setattr(RowPreparer, "prepare", slow)


@pytest.mark.usefixtures("slow_row")
def test_a_row_that_takes_long_to_read_loses_no_row(
    redis_url: str, connection: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    enqueue(connection, [request(number) for number in range(1, 8)])
    with caplog.at_level(logging.WARNING):
        run_burst(redis_url, **LEASE)
    assert counts(connection) == {"completed": 7}
    said = [record.message for record in caplog.records]
    assert [line for line in said if "keeps its rows" in line] == said


@pytest.mark.usefixtures("slow_row")
def test_a_loop_that_hangs_for_good_lets_its_rows_go(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "LONGEST_SECONDS", 0.0)
    enqueue(connection, [request(4)])
    with caplog.at_level(logging.WARNING), worker(redis_url, **LEASE):
        wait_until(lambda: any("no longer ours" in record.message for record in caplog.records))
