"""Rows whose workers vanish: counted whoever puts them back, run apart, failed where that does not help."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import redis
from rq.registry import StartedJobRegistry
from rq_rows import counts, enqueue, log, request, status
from service_fakes import worker

from kernels.rows import Status
from producer.client import Client
from producer.store import COMMANDS, Serializer, Store
from producer.sweep import Sweeper
from waiting import wait_until
from worker.intake import GUILTY_LOSSES
from worker.leases import Claim, Lease, Leases, recover
from worker.scripts import ALONE_LOSSES, SUSPECT_LOSSES
from worker.sequence import Row

pytestmark = pytest.mark.redis


def leases(connection: redis.Redis) -> Leases:
    return Leases(connection, "w", 10.0, 1 << 20)


def run_out(connection: redis.Redis, lease: Lease) -> None:
    """As if its time had passed."""
    now = time.time()
    connection.zadd("rq:wip:q", {lease.run: now - 2})
    connection.zadd(f"rq:executions:{lease.job_id}", {lease.execution_id: now + 58})


def rows(connection: redis.Redis, losses: Sequence[int | str], queue: str = "q", batch: str = "b") -> None:
    """Queue one row for each, as if it had been lost so often."""
    for number, count in enumerate(losses, 1):
        connection.hset(f"rq:job:{batch}-0-{number}", "livebatch_losses", count)
    enqueue(connection, [request(number, batch) for number in range(1, len(losses) + 1)], queue)


def taken(claims: list[Claim]) -> list[str]:
    return [claim.lease.job_id for claim in claims]


def queued(connection: redis.Redis) -> list[bytes]:
    return list(connection.lrange("rq:queue:q", 0, -1))


# -- counting


def by_maintenance(connection: redis.Redis) -> None:
    recover(connection, "q")


def by_rq(connection: redis.Redis) -> None:
    StartedJobRegistry("q", connection=connection, serializer=Serializer).cleanup()


def by_the_producer(connection: redis.Redis) -> None:
    store = Store(connection)
    Sweeper(store, store.record("b")).sweep()


def by_hand(connection: redis.Redis) -> None:
    connection.rpush("rq:queue:q", "b-0-1")


@pytest.mark.parametrize("put_back", [by_maintenance, by_rq, by_the_producer, by_hand])
def test_a_loss_is_counted_whoever_puts_the_row_back(
    redis_url: str,
    connection: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    put_back: Callable[[redis.Redis], None],
) -> None:
    monkeypatch.setattr("producer.sweep.PATIENCE_SECONDS", 0.0)
    Client(redis_url).submit_rows([{"prompt": "hello"}], batch_id="b", queue="q")
    for losses in range(SUSPECT_LOSSES + 1):
        (claim,) = leases(connection).claim(4, [("q", 4)])
        assert claim.losses == losses
        assert int(connection.hget("rq:job:b-0-1", "livebatch_losses") or 0) == losses
        run_out(connection, claim.lease)
        put_back(connection)


def test_a_row_that_is_handed_back_is_not_lost(connection: redis.Redis) -> None:
    rows(connection, [1, 0])
    for _ in range(3):
        claims = leases(connection).claim(4, [("q", 4)])
        assert [claim.losses for claim in claims] == [1, 0]
        leases(connection).hand_back([claim.lease for claim in claims])


@pytest.mark.parametrize("told", ["", "-3", "1e3", "999", "x", "²", " 7", "7 "])
def test_a_count_that_is_none_is_not_trusted(connection: redis.Redis, told: str) -> None:
    rows(connection, [told])
    (claim,) = leases(connection).claim(4, [("q", 4)])
    assert claim.losses == 0


# -- isolating


def test_a_suspect_waits_for_a_worker_without_rows_and_holds_up_those_behind_it(
    connection: redis.Redis,
) -> None:
    rows(connection, [0, 1, SUSPECT_LOSSES, 0, 0])
    ours = leases(connection)
    assert taken(ours.claim(16, [("q", 16)], is_free=True)) == ["b-0-1", "b-0-2"]
    assert ours.is_apart
    assert ours.claim(16, [("q", 16)], is_free=False) == []
    assert ours.is_apart
    assert queued(connection) == [b"b-0-3", b"b-0-4", b"b-0-5"]
    assert taken(ours.claim(16, [("q", 16)], is_free=True)) == ["b-0-3"]
    assert ours.is_apart
    assert taken(ours.claim(16, [("q", 16)], is_free=False)) == ["b-0-4", "b-0-5"]
    assert not ours.is_apart


def test_suspects_come_a_sixteenth_at_a_time_and_then_alone(connection: redis.Redis) -> None:
    two, three = SUSPECT_LOSSES, ALONE_LOSSES
    rows(connection, [two, two, two, 0, three, three, two, two + 9])
    ours = leases(connection)
    groups = [taken(ours.claim(32, [("q", 32)])) for _ in range(7)]
    assert groups == [["b-0-1", "b-0-2"], *([f"b-0-{number}"] for number in range(3, 9))]
    assert ours.is_dry


def test_a_suspect_is_not_starved_by_another_queue(connection: redis.Redis) -> None:
    rows(connection, [0] * 8, "other", "c")
    rows(connection, [SUSPECT_LOSSES, 0])
    ours = leases(connection)
    assert taken(ours.claim(4, [("other", 4), ("q", 0)])) == ["b-0-1"]
    assert taken(ours.claim(4, [("other", 4), ("q", 0)])) == [f"c-0-{number}" for number in range(1, 5)]
    assert not ours.is_apart


@pytest.mark.parametrize("state", ["canceled", "failed", "gone"])
def test_a_suspect_that_is_over_holds_up_nobody(connection: redis.Redis, state: str) -> None:
    rows(connection, [ALONE_LOSSES, 0, 0])
    if state == "gone":
        connection.delete("rq:job:b-0-1")
    else:
        connection.hset("rq:job:b-0-1", "status", state)
    ours = leases(connection)
    claims = ours.claim(16, [("q", 16)], is_free=False)
    assert [(claim.lease.job_id, claim.is_started) for claim in claims] == [
        ("b-0-1", False),
        ("b-0-2", True),
        ("b-0-3", True),
    ]
    assert not ours.is_apart


def test_a_worker_runs_a_suspect_with_no_other_row_in_hand(redis_url: str, connection: redis.Redis) -> None:
    rows(connection, [0, SUSPECT_LOSSES, ALONE_LOSSES, 0, 0])
    with worker(redis_url, max_batch=4) as made:
        for prompts in (["prompt 1"], ["prompt 2"], ["prompt 3"], ["prompt 4", "prompt 5"]):
            wait_until(lambda prompts=prompts: made.engine.prompts == prompts)
            assert len(made.service._leases) == len(prompts)
            made.engine.end(*list(made.engine.rows))
        wait_until(lambda: counts(connection) == {"completed": 5})


def test_a_worker_that_has_rows_leaves_a_suspect_that_comes_up(
    redis_url: str, connection: redis.Redis
) -> None:
    rows(connection, [0], batch="a")
    with worker(redis_url) as made:
        wait_until(lambda: made.engine.prompts == ["prompt 1"])
        rows(connection, [SUSPECT_LOSSES])
        wait_until(lambda: made.service._desk.is_apart)
        assert queued(connection) == [b"b-0-1"]
        made.engine.end(*list(made.engine.rows))
        wait_until(lambda: status(connection, "b-0-1") == "started")


def test_a_suspect_is_not_taken_before_the_last_row_is_out_of_the_engine(
    redis_url: str, connection: redis.Redis
) -> None:
    rows(connection, [0, SUSPECT_LOSSES])
    with worker(redis_url) as made:
        wait_until(lambda: made.engine.prompts == ["prompt 1"])
        made.engine.is_hung = True  # it is told of the cancel, and goes on with the row
        connection.hset("livebatch:batch:b", "state", "cancelled")
        connection.publish(COMMANDS, '{"command":"cancel","batch":"b"}')
        wait_until(lambda: counts(connection) == {"cancelled": 1})
        assert made.service._warden.owed == 1
        assert queued(connection) == [b"b-0-2"]
        made.engine.end(*list(made.engine.rows), status=Status.CANCELLED)
        wait_until(lambda: counts(connection) == {"cancelled": 2})


def test_a_suspect_is_not_taken_before_the_last_result_is_written(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the innocent row would be lost with it, and again the next time."""
    monkeypatch.setattr("worker.service.FLUSH_SECONDS", 0.3)
    rows(connection, [ALONE_LOSSES] * 4)
    found = []
    with worker(redis_url, echo=True) as made:
        send = made.engine.send

        def looking(sent: Sequence[Row], cancels: Sequence[int]) -> None:
            found.extend(sum(counts(connection).values()) for _ in sent)
            send(sent, cancels)

        made.engine.send = looking  # type: ignore[method-assign]
        wait_until(lambda: counts(connection) == {"completed": 4})
    assert found == [0, 1, 2, 3][-len(found) :]
    assert len(found) >= 3  # the first row may have been there before us


# -- judging


def test_a_row_that_was_lost_alone_again_and_again_fails_unread(
    redis_url: str, connection: redis.Redis
) -> None:
    rows(connection, [GUILTY_LOSSES, GUILTY_LOSSES - 1, 0])
    connection.hset("rq:job:b-0-1", "data", b"what nobody shall unpack")
    with worker(redis_url, echo=True):
        wait_until(lambda: counts(connection) == {"completed": 2, "failed": 1})
    result = log(connection)["b-0-1"]
    assert result is not None and result.failure is not None
    assert (result.failure.code, result.failure.status_code) == ("worker_lost", None)
    assert "6 workers vanished while they had this row, 3 of them with no other" in result.failure.message
    assert status(connection, "b-0-1") == "failed"
