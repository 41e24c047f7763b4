"""Upkeep and listening against a real Redis: what is cleaned, what is heard, and what an outage changes."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest
import redis
from rq import Queue
from rq.command import send_shutdown_command
from rq.job import Job
from rq_rows import enqueue, fetch, request, status

from producer.embedded import EmbeddedRedis
from producer.store import COMMANDS, Serializer
from waiting import wait_until
from worker.compose import connector
from worker.events import Cancel, Event, Stop, Wake
from worker.leases import Leases, recover
from worker.link import Link
from worker.listeners import Commands, Listener, Meaning, Waiter, parse, to_all, to_one
from worker.maintenance import Maintenance, clean
from worker.rq_classes import SafeJob, safe_queue

pytestmark = pytest.mark.redis


@contextmanager
def running(thread: Listener | Maintenance) -> Iterator[None]:
    thread.start()
    try:
        yield
    finally:
        thread.stop()
        thread.join(10)
        assert not thread.is_alive()


def test_registries_lose_what_is_over(connection: redis.Redis) -> None:
    connection.zadd("rq:finished:q", {"old": 1, "new": time.time() + 100})
    connection.zadd("rq:failed:q", {"old": 1, "new": time.time() + 100})
    connection.zadd("rq:canceled:q", {"old": 1, "new": time.time()})
    connection.sadd("rq:workers:q", "rq:worker:gone")
    connection.sadd("rq:workers", "rq:worker:gone")
    clean(safe_queue("q", connection))
    for name in ("finished", "failed", "canceled"):
        assert connection.zrange(f"rq:{name}:q", 0, -1) == [b"new"]
    assert not connection.exists("rq:workers")


def test_dependents_in_limbo_are_queued_whole(connection: redis.Redis) -> None:
    """Saved through SafeJob, a job keeps its payload though nobody unpacked it."""
    line = Queue("q", connection=connection, serializer=Serializer)
    job = line.enqueue("some.function", "argument", job_id="child")
    connection.delete("rq:queue:q")
    connection.hset(job.key, "status", "ready_to_enqueue")
    connection.zadd("rq:ready:q", {"child": 1})
    clean(safe_queue("q", connection))
    assert line.job_ids == ["child"]
    assert fetch(connection, "child").args == ["argument"]


def test_a_safe_job_holds_nothing_that_could_run(connection: redis.Redis) -> None:
    line = Queue("q", connection=connection, serializer=Serializer)
    job = line.enqueue("os.system", "true")
    names = {f"{kind}_callback_name": "os.system" for kind in ("success", "failure", "stopped")}
    bomb = zlib.compress(b" " * 10_000_000)
    connection.hset(job.key, mapping={**names, "exc_info": bomb, "webhooks": '[{"url": "http://h"}]'})
    safe = SafeJob.fetch(job.id, connection=connection, serializer=Serializer)
    assert (safe.func, safe.success_callback, safe.failure_callback, safe.stopped_callback) == (None,) * 4
    assert safe.webhooks == []
    assert safe._exc_info is None
    safe.save()
    assert Job.fetch(job.id, connection=connection, serializer=Serializer).func_name == "os.system"


def test_the_thread_puts_rows_of_the_dead_back(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(1), request(2)])
    Leases(connection, "dead", 0.05, 1 << 20).claim(2, [("q", 2)])
    with running(Maintenance(["q"], connector(redis_url)(5.0), 0.02, 10.0)):
        wait_until(lambda: status(connection, "b-0-1") == "queued")
    assert connection.lrange("rq:queue:q", 0, -1) == [b"b-0-1", b"b-0-2"]


def test_a_queue_that_is_no_list_costs_no_row(
    redis_url: str, connection: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Each look at it fails, and shall leave the rows where the next one finds them."""
    enqueue(connection, [request(1), request(2)])
    Leases(connection, "dead", 0.05, 1 << 20).claim(2, [("q", 2)])
    connection.hset("rq:queue:q", "x", "y")
    with running(Maintenance(["q"], connector(redis_url)(5.0), 0.02, 10.0)):
        wait_until(lambda: len([record for record in caplog.records if record.exc_info]) > 3)
        connection.delete("rq:queue:q")
        wait_until(lambda: connection.llen("rq:queue:q") == 2)
    assert connection.lrange("rq:queue:q", 0, -1) == [b"b-0-1", b"b-0-2"]


def test_a_queue_that_is_no_list_is_said(connection: redis.Redis, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody could take what waits there, and the worker would be silent about it."""
    clean(safe_queue("q", connection))
    assert not caplog.records
    connection.set("rq:queue:q", "text")
    clean(safe_queue("q", connection))
    assert "queue q, whose key rq:queue:q is no list" in caplog.text
    caplog.clear()
    assert recover(connection, "q") == [], "no row of the dead, nothing that fails"


def in_limbo(connection: redis.Redis, job_id: str) -> str:
    """A dependent that waits for nothing any more; its key."""
    job = Queue("q", connection=connection, serializer=Serializer).enqueue("f", job_id=job_id)
    connection.delete("rq:queue:q")
    connection.hset(job.key, "status", "ready_to_enqueue")
    connection.zadd("rq:ready:q", {job_id: 1})
    return str(job.key)


ODD: dict[str, Callable[[redis.Redis, str], object]] = {
    "a date that is none": lambda it, key: it.hset(key, "created_at", "never"),
    "a time to live that is none": lambda it, key: it.hset(key, "result_ttl", "soon"),
    "a status that is none": lambda it, key: it.hset(key, "status", "weird"),
    "bytes that are no text": lambda it, key: it.hset(key, "origin", b"\xff"),
    "no hash": lambda it, key: it.delete(key) and it.set(key, "text"),
    "a name that is no text": lambda it, key: it.zadd("rq:ready:q", {b"\xff\xfe": 0}),
    "workers that are no text": lambda it, key: it.sadd("rq:workers:q", b"\xff\xfe"),
    "a registry that is none": lambda it, key: it.set("rq:finished:q", "text"),
}


@pytest.mark.parametrize("spoil", ODD.values(), ids=ODD.keys())
def test_an_odd_entry_costs_no_other_its_upkeep(
    redis_url: str,
    connection: redis.Redis,
    spoil: Callable[[redis.Redis, str], object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoil(connection, in_limbo(connection, "a"))
    in_limbo(connection, "child")
    with running(Maintenance(["q"], connector(redis_url)(5.0), 0.02, 10.0)):
        wait_until(lambda: status(connection, "child") == "queued")
        enqueue(connection, [request(1)])
        connection.lrem("rq:queue:q", 0, "child")
        Leases(connection, "dead", 0.05, 1 << 20).claim(8, [("q", 8)])
        wait_until(lambda: status(connection, "b-0-1") == "queued")
    assert any(record.exc_info for record in caplog.records), "it is said"


def test_after_an_outage_owners_get_time_to_renew() -> None:
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as connection:
        enqueue(connection, [request(1)])
        owner = Leases(connection, "owner", 0.5, 1 << 20)
        (claim,) = owner.claim(1, [("q", 1)])
        upkeep = Maintenance(["q"], connector(server.url)(5.0), 0.02, patience_seconds=1.0)
        with running(upkeep):
            server.kill()
            wait_until(lambda: upkeep._link.is_away)
            server.start()
            wait_until(lambda: not upkeep._link.is_away)
            assert owner.renew([claim.lease]) == [], "the owner came first"
            wait_until(lambda: status(connection, "b-0-1") == "queued")  # and then never renewed again


def test_a_waiter_takes_nothing_and_wakes_once(redis_url: str, connection: redis.Redis) -> None:
    events: SimpleQueue[Event] = SimpleQueue()
    waiters = [Waiter("q", connector(redis_url)(5.0), events.put) for _ in range(2)]
    with running(waiters[0]), running(waiters[1]):
        for waiter in waiters:
            waiter.arm()
        wait_until(lambda: connection.info("clients")["blocked_clients"] == 2)
        enqueue(connection, [request(1), request(2)])
        assert [events.get(timeout=5), events.get(timeout=5)] == [Wake()] * 2
        assert connection.lrange("rq:queue:q", 0, -1) == [b"b-0-1", b"b-0-2"]
        waiters[0].arm()
        assert events.get(timeout=5) == Wake(), "rows that are there already wake at once"
    assert events.empty()


def test_commands_are_heard_also_after_an_outage() -> None:
    events: SimpleQueue[Event] = SimpleQueue()
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as connection:

        def cancel() -> bool:
            return bool(connection.publish(COMMANDS, '{"command":"cancel","batch":"b"}'))

        with running(Commands("w", connector(server.url)(5.0), events.put)):
            wait_until(cancel)
            assert events.get(timeout=5) == Cancel("b")
            server.kill()
            server.start()
            wait_until(cancel)
            assert events.get(timeout=5) == Cancel("b")


@pytest.mark.parametrize(
    ("message", "meaning", "event"),
    [
        ({"command": "cancel", "batch": "b"}, to_all, Cancel("b")),
        ({"command": "stop-job", "job_id": "b-1-2"}, to_one, Cancel("b", "b-1-2")),
        ({"command": "stop-execution", "job_id": "b-1-2", "execution_id": "e"}, to_one, Cancel("b", "b-1-2")),
        ({"command": "shutdown"}, to_one, Stop("rq's shutdown command")),
        ({"command": "shutdown"}, to_all, None),
        ({"command": "stop-job", "job_id": "b-1-2"}, to_all, None),
        ({"command": "stop-execution", "job_id": "b-1-2", "execution_id": "e"}, to_all, None),
        ({"command": "cancel", "batch": "b"}, to_one, None),
        ({"command": "stop-job", "job_id": "stranger"}, to_one, None),
        ({"command": "kill-horse"}, to_one, None),
        ({"command": ["cancel"]}, to_all, None),
        ({"command": "cancel"}, to_all, None),
        (["cancel"], to_all, None),
        ("text", to_one, None),
    ],
)
def test_what_a_command_means(message: object, meaning: Meaning, event: Event | None) -> None:
    assert parse(json.dumps(message).encode(), meaning) == event


def test_nonsense_is_no_command() -> None:
    assert parse(b"\xff{", to_all) is None
    assert parse(b"[" * 100_000, to_one) is None


def test_who_may_cancel_cannot_stop_every_worker(redis_url: str, connection: redis.Redis) -> None:
    events: SimpleQueue[Event] = SimpleQueue()
    shutdown, name = '{"command":"shutdown"}', "nobody-else"  # workers of other tests may still be listening
    with running(Commands(name, connector(redis_url)(5.0), events.put)):
        wait_until(
            lambda: connection.pubsub_numsub(f"rq:pubsub:{name}")[0][1] == 1
        )  # to both channels at once
        connection.publish(COMMANDS, shutdown)
        connection.publish(COMMANDS, '{"command":"stop-job","job_id":"b-0-1"}')
        connection.publish(COMMANDS, '{"command":"cancel","batch":"b"}')
        assert events.get(timeout=5) == Cancel("b")
        send_shutdown_command(connection, name)
        assert events.get(timeout=5) == Stop("rq's shutdown command")


def test_a_link_swallows_only_what_redis_does(caplog: pytest.LogCaptureFixture) -> None:
    link = Link("me")
    assert link.is_due
    for _ in range(3):
        with link:
            raise redis.exceptions.ConnectionError("refused")
    assert link.is_away
    assert not link.is_due
    assert link.again > time.monotonic()
    with pytest.raises(ZeroDivisionError), link:
        _ = 1 / 0
    assert link.is_away, "another error says nothing about Redis"
    with link:
        pass
    assert not link.is_away
    assert link.is_due
    away, back = (record.getMessage() for record in caplog.records)
    assert away.startswith("me: Redis does not serve us (refused)")
    assert back.startswith("me: Redis is back after")


def test_a_listener_survives_what_it_hears(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    heard = []

    class Startled(Listener):
        def turn(self) -> None:
            heard.append(self.stopped.wait(0.01))
            if len(heard) == 1:
                raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    with running(Startled("startled", connector(redis_url)(5.0), print)):
        wait_until(lambda: len(heard) > 1)
    assert "startled goes on" in caplog.text


def test_threads_end_when_asked(redis_url: str) -> None:
    connect = connector(redis_url)
    before = threading.active_count()
    with running(Waiter("q", connect(5.0), print)), running(Commands("w", connect(5.0), print)):
        assert threading.active_count() == before + 2
    assert threading.active_count() == before
