"""docs/redis.acl on a real server: producer and worker can do all their work, and neither can do more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError
from rq import Queue
from rq.job import Job
from rq_rows import counts, enqueue, request, status
from service_fakes import worker as worker_in_thread

from e2e.harness import by_id, error_code, producer, worker, write
from producer.embedded import EmbeddedRedis
from producer.store import Serializer, Store
from waiting import wait_until

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

ACL = Path(__file__).resolve().parents[2] / "docs" / "redis.acl"
BOTH = ("producer", "worker")


@dataclass(frozen=True)
class Guarded:
    """A server that has loaded the file, a password per user."""

    server: EmbeddedRedis

    def url(self, user: str, password: str | None = None) -> str:
        secret = password or f"{user}-secret"
        return self.server.url.replace("//", f"//{user}:{secret}@")

    def connect(self, user: str) -> redis.Redis:
        return redis.Redis.from_url(self.url(user))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    users = tmp_path_factory.mktemp("acl") / "users.acl"
    users.touch()
    with EmbeddedRedis(extra=("--aclfile", str(users))) as server:
        text = ACL.read_text()
        for user in ("admin", *BOTH):
            text = text.replace(f"{user.upper()}-PASSWORD", f"{user}-secret")
        users.write_text(text)
        with redis.Redis.from_url(server.url) as connection:
            connection.acl_load()
        yield Guarded(server)


@pytest.fixture
def admin(guarded: Guarded) -> Iterator[redis.Redis]:
    with guarded.connect("admin") as connection:
        connection.flushall()
        connection.acl_log_reset()
        yield connection


def test_rows_go_the_whole_way(guarded: Guarded, admin: redis.Redis, tmp_path: Path) -> None:
    rows = [{"custom_id": f"r{n}", "prompt": f"prompt {n}"} for n in range(30)]
    rows += [
        {"custom_id": "bad", "prompt": 7},
        rows[0],
        {"custom_id": "lost", "prompt": "x", "model": "none"},
    ]
    given, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    url = guarded.url("producer")
    with worker(guarded.url("worker"), "dummy", "--max-batch", "4") as process:
        done = producer(url, "submit", given, "--batch-id", "b", "--wait", "-o", out)
        assert done.returncode == 1  # three rows failed, as they should
        assert producer(url, "submit", given, "--batch-id", "b").returncode in (0, 1)  # adds nothing
        assert "dummy" in producer(url, "status").stdout
        assert process.poll() is None
    found = [line for line in out.read_text().splitlines() if line]
    assert len(found) == len(rows)
    assert producer(url, "results", "b", "--release", "-o", tmp_path / "again.jsonl").returncode == 1
    assert not list(admin.scan_iter("rq:job:b-*")) and not list(admin.scan_iter("rq:results:b-*"))
    assert not admin.exists("rq:workers")
    assert admin.acl_log() == []


def test_a_batch_is_cancelled(guarded: Guarded, admin: redis.Redis, tmp_path: Path) -> None:
    rows = [{"custom_id": f"r{n}", "prompt": f"prompt {n}"} for n in range(4)]
    given, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    url = guarded.url("producer")
    assert producer(url, "submit", given, "--batch-id", "c", "--queue", "q").returncode == 0
    with worker_in_thread(guarded.url("worker"), max_batch=1) as made:
        wait_until(lambda: len(made.engine.rows) == 2)
        assert producer(url, "cancel", "c").returncode == 0
        wait_until(lambda: not made.engine.rows)
    assert producer(url, "results", "c", "-o", out).returncode == 1
    assert {error_code(line) for line in by_id(out).values()} == {"batch_cancelled"}
    assert admin.acl_log() == []


def test_a_batch_comes_to_its_end_above_maxmemory(
    guarded: Guarded, admin: redis.Redis, tmp_path: Path
) -> None:
    rows = [{"custom_id": f"r{n}", "prompt": f"prompt {n}"} for n in range(4)]
    given, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    url = guarded.url("producer")
    assert producer(url, "submit", given, "--batch-id", "f").returncode == 0
    admin.delete("rq:job:f-0-1")
    admin.config_set("maxmemory", 1)
    try:
        assert producer(url, "cancel", "f").returncode == 0
        assert producer(url, "results", "f", "--follow", "--release", "-o", out).returncode == 1
    finally:
        admin.config_set("maxmemory", 0)
    codes = [error_code(line) for line in by_id(out).values()]
    assert sorted(codes) == ["batch_cancelled"] * 3 + ["worker_lost"]
    assert admin.acl_log() == []


def test_rows_of_a_deleted_queue_are_put_back(guarded: Guarded, admin: redis.Redis, tmp_path: Path) -> None:
    rows = [{"custom_id": f"r{n}", "prompt": f"prompt {n}"} for n in range(3)]
    given, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    assert producer(guarded.url("producer"), "submit", given, "--batch-id", "d").returncode == 0
    with guarded.connect("producer") as connection:
        assert connection.expire("rq:queue:livebatch", 0), "a producer may do that"
    with worker(guarded.url("worker"), "dummy"):
        assert producer(guarded.url("producer"), "results", "d", "--follow", "-o", out).returncode == 0
    assert len(by_id(out)) == 3
    assert admin.acl_log() == []


def test_a_producer_cannot_stop_the_workers(guarded: Guarded, admin: redis.Redis) -> None:
    enqueue(admin, [request(1)])
    with worker_in_thread(guarded.url("worker")) as made, guarded.connect("producer") as connection:
        wait_until(lambda: bool(made.engine.rows))
        wait_until(lambda: connection.publish("livebatch:commands", '{"command":"shutdown"}') == 1)
        connection.publish("livebatch:commands", '{"command":"cancel","batch":"b"}')
        wait_until(lambda: counts(admin) == {"cancelled": 1})
        enqueue(admin, [request(2, batch="c")])
        wait_until(lambda: bool(made.engine.rows))


def test_rows_are_handed_back_recovered_and_noted(guarded: Guarded, admin: redis.Redis) -> None:
    """A worker's rarer deeds: rows back on SIGTERM, a dead worker's rows, engine deaths, others waiting."""
    enqueue(admin, [request(number) for number in (1, 2, 3)])
    Queue("q", connection=admin, serializer=Serializer).enqueue(
        "some.function", depends_on=Job.fetch("b-0-1", admin, Serializer), job_id="child"
    )
    with worker_in_thread(guarded.url("worker"), max_batch=2, beat_seconds=0.1) as made:
        wait_until(lambda: len(made.engine.rows) == 3)
        made.engine.die()
        wait_until(lambda: admin.hget("rq:job:b-0-3", "livebatch_deaths") == b"1")
        wait_until(lambda: len(made.engine.rows) == 3)
        admin.delete("rq:job:b-0-3")
        wait_until(lambda: len(made.engine.rows) == 2)
        made.engine.end(made.engine.number("prompt 1"))
        wait_until(lambda: counts(admin) == {"completed": 1})
        wait_until(lambda: status(admin, "child") in ("queued", "started", "failed"))
    wait_until(lambda: status(admin, "b-0-2") == "queued")
    with worker_in_thread(
        guarded.url("worker"), max_batch=2, beat_seconds=60.0, maintenance_seconds=0.1
    ) as made:
        wait_until(lambda: made.engine.rows)
        runs = set(admin.zrange("rq:wip:q", 0, -1))
        admin.zadd("rq:wip:q", dict.fromkeys(runs, 1.0))  # as if their worker had died
        wait_until(lambda: runs.isdisjoint(admin.zrange("rq:wip:q", 0, -1)))
    assert admin.acl_log() == []


FORBIDDEN = [
    "CONFIG GET *",
    "CONFIG SET maxmemory 1",
    "FLUSHALL",
    "FLUSHDB",
    "SCRIPT KILL",
    "SCRIPT FLUSH",
    "FUNCTION LIST",
    "SHUTDOWN NOSAVE",
    "ACL LIST",
    "MONITOR",
    "CLIENT KILL TYPE normal",
    "CLIENT LIST",
    "KEYS *",
    "SCAN 0",
    "SAVE",
    "REPLICAOF NO ONE",
    "RENAME rq:queue:q elsewhere",
    "GET somebody:elses",
    "HGET somebody:elses key",
    "HSET somebody:elses key value",
    "SUBSCRIBE elsewhere",
    "PUBLISH elsewhere hello",
    'PUBLISH rq:pubsub:w {"command":"shutdown"}',
    "SPUBLISH rq:pubsub:w {}",
]
WORKERS_ONLY = [
    "LPOP rq:queue:q",
    "BLMOVE rq:queue:q rq:queue:q LEFT LEFT 0.1",
    "DEL rq:wip:q",
    "UNLINK rq:wip:q",
    "UNLINK rq:queue:q",
    "ZADD rq:wip:q 9999999999 b-0-1:mine",
    "HSET rq:execution:b-0-1:mine worker_name me",
    "ZADD rq:executions:b-0-1 9999999999 mine",
    "XADD rq:results:b-0-1 * type 1",
    "ZADD rq:finished:q 9999999999 b-0-1",
    "ZADD rq:failed:q 9999999999 b-0-1",
    "SADD rq:workers rq:worker:me",
    "HSET rq:worker:me state idle",
    "HSET livebatch:worker:me host me",
    "SUBSCRIBE livebatch:commands",
    "PERSIST rq:job:b-0-1",
]
PRODUCERS_ONLY = [
    "PUBLISH livebatch:commands {}",
    "SETRANGE livebatch:batch:b:lines:0 0 x",
    "HSCAN livebatch:batch:b:ids 0",
]


def refused(connection: redis.Redis, command: str) -> bool:
    try:
        connection.execute_command(*command.split(" "))
    except NoPermissionError:
        return True
    return False


@pytest.mark.parametrize("user", BOTH)
def test_nobody_administers(guarded: Guarded, admin: redis.Redis, user: str) -> None:
    with guarded.connect(user) as connection:
        assert [command for command in FORBIDDEN if not refused(connection, command)] == []


@pytest.mark.parametrize(("user", "commands"), [("producer", WORKERS_ONLY), ("worker", PRODUCERS_ONLY)])
def test_neither_does_the_others_work(
    guarded: Guarded, admin: redis.Redis, user: str, commands: list[str]
) -> None:
    enqueue(admin, [request(1)])
    with guarded.connect(user) as connection:
        assert [command for command in commands if not refused(connection, command)] == []


def test_a_script_is_no_way_around(guarded: Guarded, admin: redis.Redis) -> None:
    enqueue(admin, [request(1)])
    with guarded.connect("producer") as connection:
        for command in (
            "'LPOP', 'rq:queue:q'",
            "'SADD', 'rq:workers', 'x'",
            "'FLUSHALL'",
            "'CONFIG', 'GET', '*'",
            "'PUBLISH', 'rq:pubsub:w', '{}'",
        ):
            with pytest.raises(ResponseError):
                connection.eval(f"return redis.call({command})", 0)
    assert admin.llen("rq:queue:q") == 1
    assert not admin.exists("rq:workers")


def test_without_a_user_there_is_no_way_in(guarded: Guarded, admin: redis.Redis) -> None:
    run = producer(guarded.server.url, "status")
    assert run.returncode == 3
    assert "refused the login" in run.stderr


def test_a_wrong_password_is_not_shown(guarded: Guarded, admin: redis.Redis) -> None:
    run = producer(guarded.url("producer", "hunter2"), "status")
    assert run.returncode == 3
    assert "refused the login" in run.stderr
    assert "hunter2" not in run.stdout + run.stderr


def test_a_producer_forgets_workers_that_fell_silent(guarded: Guarded, admin: redis.Redis) -> None:
    admin.sadd("livebatch:workers", "silent")
    with guarded.connect("producer") as connection:
        assert Store(connection).workers() == []
    assert not admin.exists("livebatch:workers")
