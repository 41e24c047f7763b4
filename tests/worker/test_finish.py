"""The end of rows against a real Redis: what is written, that RQ reads it, and that only an owner writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from rq import Queue
from rq.job import JobStatus
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry
from rq.results import Result as RqResult
from rq_rows import BATCH, counts, enqueue, fetch, log, request, returned, status

from producer.embedded import EmbeddedRedis
from producer.store import Serializer
from producer.wire import Choice, Failure, Result, Usage
from worker.compose import connector
from worker.finish import Ending, Finisher, ending
from worker.leases import Claim, Leases, recover
from worker.rq_classes import Entry

pytestmark = pytest.mark.redis


class Bench:
    """A worker's hands without its loop."""

    def __init__(self, connection: redis.Redis, name: str = "w") -> None:
        self.connection = connection
        self.entry = Entry(name, ["q"], connection)
        self.leases = Leases(connection, name, 10, 1 << 20)
        self.finisher = Finisher(connection, name)

    def claim(self, count: int) -> list[Claim]:
        return self.leases.claim(count, [("q", count)])

    def finish(self, claims: list[Claim], text: str = "answer") -> int:
        return self.write([ending(claim, completed(claim, text)) for claim in claims])

    def write(self, endings: list[Ending]) -> int:
        """How many were still ours; none may be left for later."""
        ours, later = self.finisher.write(endings)
        assert later == []
        return ours


def completed(claim: Claim, text: str = "answer") -> Result:
    return Result(
        custom_id="x",
        job_id=claim.lease.job_id,
        created=1,
        endpoint="completions",
        model="m",
        choices=(Choice(0, text, "stop"),),
        usage=Usage(3, 4),
        seed=1,
    )


def failed(claim: Claim, code: str) -> Result:
    return Result(
        custom_id="x", job_id=claim.lease.job_id, created=1, failure=Failure.of(code, "it says why")
    )


@pytest.fixture
def bench(connection: redis.Redis) -> Bench:
    return Bench(connection)


def test_a_completed_row_is_finished_for_rq_and_for_us(bench: Bench, connection: redis.Redis) -> None:
    enqueue(connection, [request(1), request(2)])
    claims = bench.claim(2)
    assert bench.finish(claims, 'ünïcödé "" \u2028 漢') == 2
    job = fetch(connection, "b-0-1")
    assert job.get_status() == JobStatus.FINISHED
    (result,) = job.results()
    assert result.type == RqResult.Type.SUCCESSFUL
    assert result.worker_name == "w"
    assert result.execution_id == claims[0].lease.execution_id
    assert result.execution_ended_at is not None
    assert Result.decode(result.return_value) == completed(claims[0], 'ünïcödé "" \u2028 漢')
    assert "漢".encode() in Serializer.dumps(result.return_value)
    registry = FinishedJobRegistry("q", connection=connection, serializer=Serializer)
    assert sorted(registry.get_job_ids()) == ["b-0-1", "b-0-2"]
    for key in (job.key, "rq:results:b-0-1"):
        assert 990 < connection.ttl(key) <= 1000
    assert log(connection) == {"b-0-1": None, "b-0-2": None}
    assert counts(connection) == {"completed": 2}
    assert not connection.keys("rq:execution*")
    assert not connection.exists("rq:wip:q")
    assert not connection.exists("rq:worker:w:executions")
    assert connection.hget("rq:worker:w", "successful_job_count") == b"2"
    assert job.args[0]["prompt"] == "prompt 1", "the payload is still there"


def test_a_failed_row_says_why_everywhere(bench: Bench, connection: redis.Redis) -> None:
    enqueue(connection, [request(1)])
    (claim,) = bench.claim(1)
    assert bench.write([ending(claim, failed(claim, "timeout"))]) == 1
    job = fetch(connection, "b-0-1")
    assert job.get_status() == JobStatus.FAILED
    assert job._exc_info == "timeout: it says why"
    assert job.retries_left == 10**6
    result = job.latest_result()
    assert result is not None and result.exc_string == "timeout: it says why"
    assert FailedJobRegistry("q", connection=connection, serializer=Serializer).get_job_ids() == ["b-0-1"]
    assert log(connection) == {"b-0-1": failed(claim, "timeout")}
    assert counts(connection) == {"failed": 1}


def test_a_cancelled_row_is_cancelled_for_rq_too(bench: Bench, connection: redis.Redis) -> None:
    enqueue(connection, [request(1)])
    (claim,) = bench.claim(1)
    bench.write([ending(claim, failed(claim, "batch_cancelled"))])
    assert fetch(connection, "b-0-1").get_status() == JobStatus.CANCELED
    assert CanceledJobRegistry("q", connection=connection, serializer=Serializer).get_job_ids() == ["b-0-1"]
    assert counts(connection) == {"cancelled": 1}
    assert 990 < connection.ttl("rq:job:b-0-1") <= 1000


def cancel(connection: redis.Redis) -> None:
    fetch(connection, "b-0-2").cancel()


def delete(connection: redis.Redis) -> None:
    fetch(connection, "b-0-2").delete()


def requeue_by_cleanup(connection: redis.Redis) -> None:
    """The lease runs out and RQ's own cleanup, run by anybody (`rq info`), puts the job back."""
    members = connection.zrange("rq:wip:q", 0, -1)
    connection.zadd("rq:wip:q", {member: 1 for member in members if member.startswith(b"b-0-2:")})
    Queue("q", connection=connection, serializer=Serializer).started_job_registry.cleanup()


def taken_by_another(connection: redis.Redis) -> None:
    requeue_by_cleanup(connection)
    (claim,) = Bench(connection, "other").claim(1)
    assert claim.lease.job_id == "b-0-2"


Deed = Callable[[redis.Redis], None]
DEEDS = {
    cancel: "canceled",
    delete: None,
    requeue_by_cleanup: "queued",
    taken_by_another: "started",
}


def inside_the_watch_window(monkeypatch: pytest.MonkeyPatch, deed: Callable[[], object]) -> None:
    """``deed`` is done between the look at an awaited row and the transaction that ends it; once."""
    multi = redis.client.Pipeline.multi

    def hooked(self: redis.client.Pipeline) -> None:
        monkeypatch.setattr(redis.client.Pipeline, "multi", multi)
        deed()
        multi(self)

    monkeypatch.setattr(redis.client.Pipeline, "multi", hooked)


def depend(connection: redis.Redis, parent: str, child: str) -> Queue:
    """A job of somebody's waits for ours."""
    line = Queue("other", connection=connection, serializer=Serializer)
    line.enqueue("some.function", depends_on=fetch(connection, parent), job_id=child)
    return line


@pytest.mark.parametrize("deed", DEEDS)
@pytest.mark.parametrize("is_awaited", [False, True])
def test_only_an_owner_writes(
    bench: Bench, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, deed: Deed, is_awaited: bool
) -> None:
    enqueue(connection, [request(number) for number in (1, 2, 3)])
    claims = bench.claim(3)
    if is_awaited:
        depend(connection, "b-0-2", "child")
        inside_the_watch_window(monkeypatch, lambda: deed(connection))
    else:
        deed(connection)
    assert bench.finish(claims) == 2
    assert status(connection, "b-0-2") == DEEDS[deed]
    assert not connection.exists("rq:results:b-0-2")
    assert log(connection) == {"b-0-1": None, "b-0-3": None}
    assert status(connection, "b-0-1") == status(connection, "b-0-3") == "finished"
    assert not connection.llen("rq:queue:other")
    assert connection.scard("rq:worker:w:executions") == 0
    assert len(Queue("q", connection=connection)) == (DEEDS[deed] == "queued")
    assert connection.hget("rq:worker:w", "successful_job_count") == b"2"


def test_a_thawed_worker_and_the_one_that_took_over_write_one_result(connection: redis.Redis) -> None:
    enqueue(connection, [request(2)])
    frozen, other = Bench(connection, "frozen"), Bench(connection, "other")
    old = frozen.claim(1)
    requeue_by_cleanup(connection)
    new = other.claim(1)
    assert frozen.finish(old, "frozen") == 0
    assert other.finish(new, "other") == 1
    assert frozen.finish(old, "frozen") == 0
    (value,) = returned(connection, "b-0-2")
    assert value["choices"][0]["text"] == "other"


def test_a_lease_renewed_behind_rqs_back_gives_no_second_result(connection: redis.Redis) -> None:
    """RQ requeues the job while its owner renews: both runs then have a lease. One may write."""
    (job,) = enqueue(connection, [request(2)])
    first, second = Bench(connection, "first"), Bench(connection, "second")
    old = first.claim(1)
    with connection.pipeline() as pipe:
        fetch(connection, job.id).retry(Queue("q", connection=connection, serializer=Serializer), pipe)
        pipe.execute()
    connection.delete("rq:executions:b-0-2")  # and the trace of the first run is gone
    new = second.claim(1)
    assert connection.zcard("rq:wip:q") == 2
    assert first.finish(old) == 0
    assert second.finish(new) == 1
    assert len(returned(connection, "b-0-2")) == 1


@pytest.mark.parametrize("code", [None, "timeout"])
def test_a_row_rq_queues_again_though_it_has_ended_keeps_its_first_result(
    connection: redis.Redis, code: str | None
) -> None:
    """RQ's cleanup looks, the row ends, RQ's cleanup writes."""
    enqueue(connection, [request(2)])
    bench = Bench(connection)
    claims = bench.claim(1)
    seen = fetch(connection, "b-0-2")
    assert bench.finish(claims, "first") == 1
    with connection.pipeline() as pipe:
        seen.retry(Queue("q", connection=connection, serializer=Serializer), pipe)
        pipe.execute()
    (again,) = bench.claim(1)
    second = failed(again, code) if code else completed(again, "second")
    assert bench.write([ending(again, second)]) == 1
    (result,) = returned(connection, "b-0-2")
    assert result["choices"][0]["text"] == "first"
    assert (log(connection), counts(connection)) == ({"b-0-2": None}, {"completed": 1})
    assert connection.ttl("rq:job:b-0-2") > 0
    assert not connection.exists("rq:wip:q", "rq:queue:q")


def test_writing_again_after_an_unclear_answer_is_harmless(bench: Bench, connection: redis.Redis) -> None:
    enqueue(connection, [request(1)])
    claims = bench.claim(1)
    assert bench.finish(claims) == 1
    assert bench.finish(claims) == 0
    assert len(returned(connection, "b-0-1")) == 1
    assert counts(connection) == {"completed": 1}


@pytest.mark.parametrize("code", [None, "timeout"])
def test_jobs_that_wait_for_a_row_are_released_once(
    bench: Bench, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, code: str | None
) -> None:
    enqueue(connection, [request(1), request(2)])
    claims = bench.claim(2)
    line = depend(connection, "b-0-1", "child")
    inside_the_watch_window(monkeypatch, lambda: depend(connection, "b-0-1", "late"))
    results = [failed(claim, code) if code else completed(claim) for claim in claims]
    ends = [ending(claim, result) for claim, result in zip(claims, results, strict=True)]
    assert bench.write(ends) == 2
    assert sorted(line.job_ids) == ([] if code else ["child", "late"])
    assert len(log(connection)) == 2


def test_a_redis_that_restarts_meanwhile_is_not_taken_for_a_touched_row(
    slow_redis: EmbeddedRedis, reload: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it loads its data it takes WATCH and nothing else: the loop must not wait for that."""
    with connector(slow_redis.url)(5.0) as connection:
        bench = Bench(connection)
        enqueue(connection, [request(1)])
        (claim,) = bench.claim(1)
        depend(connection, "b-0-1", "child")
        inside_the_watch_window(monkeypatch, reload)
        end = ending(claim, completed(claim))
        assert bench.finisher.write([end]) == (0, [end])


@pytest.mark.parametrize("broken", ["counts", "log", "ended:0"])
def test_a_broken_batch_costs_no_other_batch_its_log(
    bench: Bench, connection: redis.Redis, broken: str
) -> None:
    enqueue(connection, [request(1), request(2, "c")])
    claims = bench.claim(2)
    key = f"livebatch:batch:b:{broken}"
    connection.delete(key)
    connection.lpush(key, "not what it was")
    assert bench.finish(claims) == 2
    assert log(connection, "c") == {"c-0-2": None}
    assert counts(connection, "c") == {"completed": 1}
    assert connection.hget("rq:worker:w", "successful_job_count") == b"2"


def test_a_foreign_job_fails_without_a_batch(bench: Bench, connection: redis.Redis) -> None:
    line = Queue("q", connection=connection, serializer=Serializer)
    line.enqueue("os.system", "true", job_id="stranger")
    line.enqueue("os.system", "true", job_id="b-0-99")
    enqueue(connection, [request(1)])
    ends = [ending(claim, failed(claim, "invalid_request")) for claim in bench.claim(3)]
    assert bench.write(ends) == 3
    assert status(connection, "stranger") == "failed"
    assert list(log(connection)) == ["b-0-1"], "the batch never had a row 99"


def test_keys_of_one_job_turned_into_something_else_cost_its_neighbours_nothing(
    bench: Bench, connection: redis.Redis
) -> None:
    enqueue(connection, [request(number) for number in (1, 2, 3)])
    claims = bench.claim(3)
    for key in ("rq:results:b-0-2", "rq:executions:b-0-2"):
        connection.delete(key)
        connection.set(key, "not what it was")
    assert bench.leases.renew([claim.lease for claim in claims]) == []
    assert bench.finish(claims) == 3
    assert [len(returned(connection, f"b-0-{number}")) for number in (1, 2, 3)] == [1, 1, 1]
    assert not connection.exists("rq:wip:q")


def test_a_registry_that_is_none_any_more_costs_no_other_queue_its_ends(
    bench: Bench, connection: redis.Redis
) -> None:
    """It comes last: rows before it were ended in RQ, and would then miss in the log."""
    enqueue(connection, [request(1)])
    enqueue(connection, [request(2, "c")], queue="other")
    claims = bench.leases.claim(2, [("q", 1), ("other", 1)])
    connection.delete("rq:wip:other")
    connection.set("rq:wip:other", "not what it was")
    assert bench.finish(claims) == 1
    assert (log(connection), log(connection, "c")) == ({"b-0-1": None}, {})


def test_a_result_goes_where_none_could_be_added(bench: Bench, connection: redis.Redis) -> None:
    enqueue(connection, [request(1), request(2)])
    connection.xadd("rq:results:b-0-1", {"type": "1"}, id=f"{2**64 - 1}-{2**64 - 1}")
    assert bench.finish(bench.claim(2)) == 2
    assert len(returned(connection, "b-0-1")) == len(returned(connection, "b-0-2")) == 1
    assert len(log(connection)) == 2


def test_totals_that_are_none_cost_no_row_its_end(bench: Bench, connection: redis.Redis) -> None:
    enqueue(connection, [request(1)])
    connection.hset("rq:worker:w", "successful_job_count", "many")
    assert bench.finish(bench.claim(1)) == 1
    assert log(connection) == {"b-0-1": None}
    assert float(connection.hget("rq:worker:w", "total_working_time") or "nan") >= 0


def test_a_leased_job_that_is_no_hash_any_more_is_lost_alone(bench: Bench, connection: redis.Redis) -> None:
    enqueue(connection, [request(number) for number in (1, 2, 3, 4)])
    claims = bench.claim(4)
    for number in (2, 4):
        connection.delete(f"rq:job:b-0-{number}")
        connection.sadd(f"rq:job:b-0-{number}", "not what it was")
    leases = [claim.lease for claim in claims]
    assert bench.leases.renew(leases[:2]) == [leases[1]]
    assert bench.finish(claims[:2]) == 1
    connection.zadd("rq:wip:q", dict.fromkeys(connection.zrange("rq:wip:q", 0, -1), 1.0))  # the worker died
    assert recover(connection, "q") == ["b-0-3"]
    assert not connection.exists("rq:wip:q")


def test_a_result_that_is_no_json_becomes_an_internal_error(bench: Bench, connection: redis.Redis) -> None:
    enqueue(connection, [request(1)])
    (claim,) = bench.claim(1)
    end = ending(claim, completed(claim, "lone surrogate \ud800"))
    assert end.result.failure is not None and end.result.failure.code == "internal_error"
    bench.write([end])
    assert counts(connection) == {"failed": 1}


@pytest.mark.parametrize("ttl", [b"", b"0", b"-1", b"junk", b"99999999999999"])
def test_an_odd_ttl_is_our_own_default(bench: Bench, connection: redis.Redis, ttl: bytes) -> None:
    (job,) = enqueue(connection, [request(1)])
    connection.hset(job.key, "result_ttl", ttl)
    (claim,) = bench.claim(1)
    assert ending(claim, completed(claim)).keep_seconds == 7 * 86400


def test_the_batch_and_the_token_counts_add_up(bench: Bench, connection: redis.Redis) -> None:
    enqueue(connection, [request(number) for number in range(5)])
    enqueue(connection, [request(number, "c") for number in range(3)])
    claims = bench.claim(8)
    bench.finish(claims)
    assert counts(connection, BATCH) == {"completed": 5}
    assert counts(connection, "c") == {"completed": 3}
    assert connection.hget("livebatch:batch:b:counts", "completion_tokens") == b"20"
    started = float(connection.hget("livebatch:batch:b:counts", "started_at") or 0)
    assert started == min(claim.lease.started_at for claim in claims), "a batch's speed counts from there"
    assert connection.hget("livebatch:batch:b:counts", "prompt_tokens") == b"15"


def test_the_golden_form_of_a_return_value(bench: Bench, connection: redis.Redis, tmp_path: Path) -> None:
    enqueue(connection, [request(1)])
    bench.finish(bench.claim(1))
    assert json.loads(json.dumps(returned(connection, "b-0-1")[0]))["choices"] == [
        {"index": 0, "text": "answer", "finish_reason": "stop"}
    ]
