"""Leases against a real Redis, held against RQ's own classes: what we write, RQ reads right."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace

import pytest
import redis
from rq import Queue, Retry
from rq.executions import Execution
from rq.job import Job, JobStatus

from producer.store import Serializer
from producer.wire import FUNCTION
from waiting import wait_until
from worker.leases import Claim, Leases, recover
from worker.scripts import COMMANDS

pytestmark = pytest.mark.redis
LARGEST = 100_000
Machine = Callable[[], AbstractContextManager[None]]


def queue(connection: redis.Redis, name: str = "q") -> Queue:
    return Queue(name, connection=connection, serializer=Serializer)


def enqueue(queue: Queue, count: int, first: int = 0) -> list[Job]:
    rows = [
        Queue.prepare_data(
            FUNCTION, args=({"n": n},), job_id=f"b-0-{n}", retry=Retry(max=10**6), timeout=-1, description="d"
        )
        for n in range(first, first + count)
    ]
    return list(queue.enqueue_many(rows))


def leases(connection: redis.Redis, name: str = "w", seconds: float = 10) -> Leases:
    return Leases(connection, name, seconds, LARGEST)


def ids(claims: list[Claim]) -> list[str]:
    return [claim.lease.job_id for claim in claims]


def fetch(connection: redis.Redis, job_id: str) -> Job:
    return Job.fetch(job_id, connection=connection, serializer=Serializer)


def test_rq_sees_what_we_hold(connection: redis.Redis) -> None:
    line = queue(connection)
    enqueue(line, 3)
    before = time.time()
    first, second = leases(connection).claim(2, [("q", 2)])
    assert ids([first, second]) == ["b-0-0", "b-0-1"]
    assert line.job_ids == ["b-0-2"]
    job = fetch(connection, "b-0-0")
    assert job.get_status() == JobStatus.STARTED
    assert job.worker_name == "w"
    assert job.started_at and abs(job.started_at.timestamp() - before) < 5
    assert connection.ttl(job.key) == -1
    assert line.started_job_registry.get_job_and_execution_ids() == [
        ("b-0-0", first.lease.execution_id),
        ("b-0-1", second.lease.execution_id),
    ]
    (execution,) = job.get_executions()
    assert execution.worker_name == "w"
    assert Execution.fetch(first.lease.execution_id, "b-0-0", connection).created_at.timestamp() >= before
    assert connection.smembers("rq:worker:w:executions") == {
        first.lease.run.encode(),
        second.lease.run.encode(),
    }
    assert 9 < connection.ttl(f"rq:execution:{first.lease.run}") <= 10


def test_a_claim_carries_what_the_check_needs(connection: redis.Redis) -> None:
    (job,) = enqueue(queue(connection), 1)
    connection.hset(job.key, mapping={"livebatch_deaths": 2, "failure_callback_name": "os.system"})
    (claim,) = leases(connection).claim(8, [("q", 8)])
    assert claim.is_started
    assert (claim.status, claim.deaths) == (b"queued", b"2")
    assert (claim.success_callback, claim.failure_callback) == (b"", b"os.system")
    assert claim.data[:1] == b"\x78"  # zlib


@pytest.mark.parametrize("state", ["", "open", "closed", "cancelled"])
def test_a_claim_says_how_its_batch_stands(connection: redis.Redis, state: str) -> None:
    enqueue(queue(connection), 1)
    if state:
        connection.hset("livebatch:batch:b", "state", state)
    (claim,) = leases(connection).claim(8, [("q", 8)])
    assert claim.batch_state == state.encode()


def test_a_batch_that_is_no_hash_does_not_stop_a_claim(connection: redis.Redis) -> None:
    enqueue(queue(connection), 1)
    connection.set("livebatch:batch:b", "not what it was")
    (claim,) = leases(connection).claim(8, [("q", 8)])
    assert claim.batch_state == b""


def test_quotas_first_then_whoever_has_rows(connection: redis.Redis) -> None:
    low, high = queue(connection, "low"), queue(connection, "high")
    enqueue(low, 10)
    enqueue(high, 2, first=100)
    taken = leases(connection).claim(6, [("high", 4), ("low", 2)])
    assert ids(taken) == ["b-0-100", "b-0-101", "b-0-0", "b-0-1", "b-0-2", "b-0-3"]
    assert len(low) == 6


def test_a_claim_stops_at_so_many_bytes(connection: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the row that goes beyond: one larger than all of them must be taken some time."""
    line = queue(connection)
    for job in enqueue(line, 5):
        connection.hset(job.key, "data", b"x" * 1000)
    monkeypatch.setattr("worker.leases.CLAIM_BYTES", 1500)
    ours = leases(connection)
    for taken, is_dry in ((["b-0-0", "b-0-1"], False), (["b-0-2", "b-0-3"], False), (["b-0-4"], True)):
        assert ids(ours.claim(8, [("q", 4)])) == taken
        assert ours.is_dry is is_dry


def test_a_claim_says_whether_it_left_all_queues_empty(connection: redis.Redis) -> None:
    """The number of jobs does not: what others hold is dropped, and takes room of the claim."""
    enqueue(queue(connection), 1)
    ours = leases(connection)
    assert ids(ours.claim(1, [("q", 1), ("other", 0)])) == ["b-0-0"]
    assert ours.is_dry
    connection.rpush("rq:queue:q", "b-0-0", "b-0-0", "b-0-0")
    enqueue(queue(connection, "other"), 1, first=7)
    assert ours.claim(2, [("q", 2), ("other", 0)]) == []
    assert not ours.is_dry
    assert ids(ours.claim(2, [("q", 2), ("other", 0)])) == ["b-0-7"]
    assert ours.is_dry
    connection.set("rq:queue:q", "not a list")
    assert ours.claim(2, [("q", 2)]) == []
    assert ours.is_dry, "nothing of it can be taken"


def test_a_lease_is_renewed_while_it_is_ours(connection: redis.Redis) -> None:
    enqueue(queue(connection), 4)
    ours = leases(connection)
    held = [claim.lease for claim in ours.claim(4, [("q", 4)])]
    fetch(connection, "b-0-1").cancel()
    fetch(connection, "b-0-2").delete()
    connection.zadd("rq:wip:q", {held[0].run: time.time() - 1})  # late, and nobody took it: still ours
    assert [lease.job_id for lease in ours.renew(held)] == ["b-0-1", "b-0-2"]
    assert connection.zscore("rq:wip:q", held[0].run) > time.time() + 9
    assert not connection.exists("rq:job:b-0-2"), "a deleted job stays deleted"
    assert connection.scard("rq:worker:w:executions") == 2
    assert ours.renew([]) == []


def test_rows_of_the_dead_go_back_in_order_without_costing_a_retry(connection: redis.Redis) -> None:
    line = queue(connection)
    enqueue(line, 5)
    leases(connection, "dead", seconds=0.05).claim(3, [("q", 3)])
    assert recover(connection, "q") == [], "not before the lease is over"
    wait_until(lambda: connection.zcount("rq:wip:q", "-inf", time.time()) == 3)
    assert recover(connection, "q") == ["b-0-0", "b-0-1", "b-0-2"]
    assert line.job_ids == [f"b-0-{n}" for n in range(5)]
    job = fetch(connection, "b-0-0")
    assert job.get_status() == JobStatus.QUEUED
    assert job.retries_left == 10**6
    assert not connection.zcard("rq:wip:q")
    assert recover(connection, "q") == []


def test_odd_runs_keep_no_row_from_coming_back(connection: redis.Redis) -> None:
    enqueue(queue(connection), 2)
    leases(connection, "dead", seconds=0.01).claim(2, [("q", 2)])
    connection.hset(b"rq:job:\xff", "status", "started")
    connection.zadd("rq:wip:q", {b"\xff:e": 1, "no run": 1, ":": 1, "a:b:c": 1})
    connection.delete("rq:worker:dead:executions")
    connection.set("rq:worker:dead:executions", "no set")
    wait_until(lambda: connection.zcount("rq:wip:q", "-inf", time.time()) == 6)
    assert recover(connection, "q") == ["\ufffd", "b-0-0", "b-0-1"]
    assert connection.lrange("rq:queue:q", 0, -1) == [b"\xff", b"b-0-0", b"b-0-1"]
    assert not connection.exists("rq:wip:q")


def test_a_failed_recovery_changes_nothing(connection: redis.Redis) -> None:
    enqueue(queue(connection), 2)
    leases(connection, "dead", seconds=0.01).claim(2, [("q", 2)])
    connection.hset("rq:queue:q", "not", "a list")
    wait_until(lambda: connection.zcount("rq:wip:q", "-inf", time.time()) == 2)
    for _ in range(2):
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            recover(connection, "q")
    assert connection.zcard("rq:wip:q") == 2
    assert connection.hget("rq:job:b-0-1", "status") == b"started"
    connection.delete("rq:queue:q")
    assert recover(connection, "q") == ["b-0-0", "b-0-1"]


def test_many_recover_at_once_and_each_row_comes_back_once(connection: redis.Redis) -> None:
    line = queue(connection)
    enqueue(line, 50)
    leases(connection, "dead", seconds=0.01).claim(50, [("q", 50)])
    wait_until(lambda: connection.zcount("rq:wip:q", "-inf", time.time()) == 50)
    threads = [threading.Thread(target=recover, args=(connection, "q")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert line.job_ids == [f"b-0-{n}" for n in range(50)]


def test_a_thawed_worker_has_lost_what_another_took(connection: redis.Redis) -> None:
    enqueue(queue(connection), 1)
    frozen, other = leases(connection, "frozen", seconds=0.01), leases(connection, "other")
    (old,) = frozen.claim(1, [("q", 1)])
    wait_until(lambda: recover(connection, "q") == ["b-0-0"])
    (new,) = other.claim(1, [("q", 1)])
    assert frozen.renew([old.lease]) == [old.lease]
    assert frozen.hand_back([old.lease]) == 0
    assert other.renew([new.lease]) == []
    assert fetch(connection, "b-0-0").worker_name == "other"


def test_a_lease_renewed_while_rq_requeues_its_job_is_not_owned(connection: redis.Redis) -> None:
    """RQ's cleanup is not atomic: the owner may prolong between its look and its write."""
    line = queue(connection)
    (job,) = enqueue(line, 1)
    ours = leases(connection)
    (claim,) = ours.claim(1, [("q", 1)])
    with connection.pipeline() as pipe:
        fetch(connection, job.id).retry(line, pipe)
        pipe.execute()
    assert ours.renew([claim.lease]) == [claim.lease]
    assert line.job_ids == ["b-0-0"]


class TestClocks:
    """Those of workers may differ by minutes: when a lease ends is Redis's to say."""

    @pytest.fixture(params=[-600.0, 600.0], ids=["behind", "ahead"])
    def elsewhere(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
        """A block is run by a machine whose clock is wrong."""
        wrong = SimpleNamespace(time=lambda: time.time() + request.param)

        @contextmanager
        def machine() -> Iterator[None]:
            with monkeypatch.context() as patch:
                patch.setattr("worker.leases.time", wrong)
                yield

        return machine

    def test_nobody_takes_what_another_holds(self, connection: redis.Redis, elsewhere: Machine) -> None:
        enqueue(queue(connection), 2)
        here, there = leases(connection, "here"), leases(connection, "there")
        (ours,) = here.claim(1, [("q", 1)])
        with elsewhere():
            (theirs,) = there.claim(1, [("q", 1)])
            assert there.renew([theirs.lease]) == []
            connection.rpush("rq:queue:q", "b-0-0")
            assert there.claim(1, [("q", 1)]) == []
            assert recover(connection, "q") == []
        connection.rpush("rq:queue:q", "b-0-1")
        assert here.claim(1, [("q", 1)]) == []
        assert recover(connection, "q") == []
        assert here.renew([ours.lease]) == there.renew([theirs.lease]) == []

    def test_rows_of_the_dead_come_back(self, connection: redis.Redis, elsewhere: Machine) -> None:
        enqueue(queue(connection), 2)
        leases(connection, "dead here", seconds=0.05).claim(1, [("q", 1)])
        with elsewhere():
            leases(connection, "dead there", seconds=0.05).claim(1, [("q", 1)])
            wait_until(lambda: recover(connection, "q"))
        wait_until(lambda: recover(connection, "q") or len(queue(connection)) == 2)
        assert sorted(queue(connection).job_ids) == ["b-0-0", "b-0-1"]


def test_an_id_queued_twice_runs_once(connection: redis.Redis) -> None:
    enqueue(queue(connection), 1)
    connection.rpush("rq:queue:q", "b-0-0")
    assert ids(leases(connection).claim(8, [("q", 8)])) == ["b-0-0"]
    assert not connection.exists("rq:queue:q")


def test_a_started_job_nobody_holds_is_taken(connection: redis.Redis) -> None:
    (job,) = enqueue(queue(connection), 1)
    connection.hset(job.key, mapping={"status": "started", "worker_name": "gone"})
    (claim,) = leases(connection).claim(8, [("q", 8)])
    assert claim.is_started


def test_hand_back_restores_the_front_of_the_queue(connection: redis.Redis) -> None:
    line = queue(connection)
    enqueue(line, 6)
    ours = leases(connection)
    held = [claim.lease for claim in ours.claim(4, [("q", 4)])]
    fetch(connection, "b-0-1").cancel()
    assert ours.hand_back(held) == 3
    assert line.job_ids == ["b-0-0", "b-0-2", "b-0-3", "b-0-4", "b-0-5"]
    assert fetch(connection, "b-0-0").retries_left == 10**6
    assert ours.hand_back(held) == 0, "once only"
    assert len(line) == 5
    assert not connection.keys("rq:execution*")
    assert not connection.exists("rq:worker:w:executions")
    assert ours.hand_back([]) == 0


def test_what_cannot_be_handed_back_comes_back_later(connection: redis.Redis) -> None:
    """One of two queues is no list any more: its row keeps its lease, the other one's goes back."""
    enqueue(queue(connection), 1)
    enqueue(queue(connection, "other"), 1, first=7)
    ours = leases(connection, seconds=0.05)
    held = [claim.lease for claim in ours.claim(2, [("q", 1), ("other", 1)])]
    connection.hset("rq:queue:q", "not", "a list")
    assert ours.hand_back(held) == 1
    assert connection.lrange("rq:queue:other", 0, -1) == [b"b-0-7"]
    connection.delete("rq:queue:q")
    wait_until(lambda: recover(connection, "q") == ["b-0-0"])
    assert queue(connection).job_ids == ["b-0-0"]


REGISTRIES = ["rq:wip:q", "rq:worker:w:executions", "rq:executions:b-0-1"]


@pytest.mark.parametrize("key", REGISTRIES)
def test_a_registry_that_is_none_costs_no_claimed_row(connection: redis.Redis, key: str) -> None:
    """A claim takes from the list first: failing then, it would lose the row."""
    enqueue(queue(connection), 3)
    connection.set(key, "text")
    ours = leases(connection)
    claims = ours.claim(3, [("q", 3)])
    assert ids(claims) == ["b-0-0", "b-0-1", "b-0-2"]
    assert ours.renew([claim.lease for claim in claims]) == []
    assert connection.zcard("rq:executions:b-0-1") == 1


@pytest.mark.parametrize("key", REGISTRIES)
def test_a_registry_that_is_none_any_more_costs_no_other_lease(connection: redis.Redis, key: str) -> None:
    enqueue(queue(connection), 2)
    enqueue(queue(connection, "other"), 1, first=7)
    ours = leases(connection)
    held = [claim.lease for claim in ours.claim(3, [("q", 2), ("other", 1)])]
    connection.delete(key)
    connection.set(key, "text")
    lost = ours.renew(held)
    assert lost == (held[:2] if key == "rq:wip:q" else [])
    assert ours.hand_back(held) == 3 - len(lost)


def test_one_command_that_fails_keeps_no_other_from_being_run(connection: redis.Redis) -> None:
    connection.set("text", "text")
    words = [3, "SADD", "text", "x", 3, "SET", "a", "b"]
    failed, done = connection.eval(COMMANDS, 0, "rq", *words)
    assert isinstance(failed, redis.ResponseError) and done == b"OK"
    assert connection.get("a") == b"b"


@pytest.mark.parametrize("status", ["finished", "failed", "canceled", "stopped"])
def test_jobs_that_ended_are_dropped_untouched(connection: redis.Redis, status: str) -> None:
    (job,) = enqueue(queue(connection), 1)
    connection.hset(job.key, "status", status)
    (claim,) = leases(connection).claim(8, [("q", 8)])
    assert not claim.is_started
    assert connection.hget(job.key, "status") == status.encode()
    assert not connection.exists("rq:wip:q")


def test_hostile_lists_and_hashes_do_not_stop_a_claim(connection: redis.Redis) -> None:
    line = queue(connection)
    connection.rpush(
        "rq:queue:q", "no such job", "with:colon", "x" * 5000, b"\xff\xfe", "missing", "text", "nodata"
    )
    connection.set("rq:job:text", "not a hash")
    connection.hset("rq:job:nodata", "status", "queued")
    enqueue(line, 2)
    connection.hset("rq:job:b-0-0", "data", b"x" * (LARGEST + 1))
    connection.hset("rq:job:b-0-1", "webhooks", b"y" * 10**6)
    taken = leases(connection).claim(20, [("q", 20)])
    started = {claim.lease.job_id: claim for claim in taken if claim.is_started}
    assert set(started) == {"b-0-0", "b-0-1", "nodata"}, "a job without a payload fails, and is not dropped"
    assert started["b-0-0"].data == str(LARGEST + 1).encode(), "the size travels, not the data"
    assert len(started["b-0-1"].webhooks) == 200
    assert len(taken) == 9
    connection.set("rq:queue:other", "not a list")
    assert leases(connection).claim(5, [("other", 5), ("q", 5)]) == []
