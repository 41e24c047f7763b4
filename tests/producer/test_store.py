"""The keyspace and the worker's side of it: a row ends once, counts follow the log, finished batches age."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import redis
from tiny_worker import TinyWorker, failed, log_completed, rows, write

from producer import store as keyspace
from producer.batch import Record, SourceFile
from producer.client import Client
from producer.errors import StoreError, UsageError
from producer.store import Serializer, Store, counts_key, ids_key, lines_key, log_key, worker_key
from producer.wire import Request

pytestmark = pytest.mark.redis


def record(batch_id: str = "b", files: int = 1, keep_seconds: int = 1000) -> Record:
    sources = tuple(SourceFile(f"f{index}", "0" * 64) for index in range(files))
    return Record(
        id=batch_id, queue="q", format="jsonl", created=1.0, files=sources, keep_seconds=keep_seconds
    )


@pytest.fixture
def store(connection: redis.Redis) -> Store:
    """A store with batch "b": lines 1 to 9 of file 0 accepted, as enqueue.py leaves them."""
    store = Store(connection)
    store.create(record())
    for line in range(1, 10):
        connection.setbit(lines_key("b", 0), line, 1)
    connection.hset(counts_key("b"), "rows", "9")
    return store


def request(line: int, batch_id: str = "b") -> Request:
    return Request(
        custom_id=f"r{line}", batch_id=batch_id, file=0, line=line, endpoint="completions", prompt="x"
    )


def complete(store: Store, *lines: int) -> None:
    with store.connection.pipeline() as pipe:
        names = [request(line).job_id for line in lines]
        log_completed(pipe, "b", names, prompt_tokens=10 * len(lines), completion_tokens=len(lines))
        pipe.execute()


def fail(store: Store, code: str, *lines: int) -> None:
    with store.connection.pipeline() as pipe:
        store.log_failed(pipe, "b", [failed(request(line), code) for line in lines])
        pipe.execute()


def logged(store: Store) -> list[str]:
    return [entry.job_id for entry in store.read_log("b", "0", 1000)]


def test_serializer_is_compact_utf8() -> None:
    value = {"text": "日本 \U0001f600", "n": [1, 2.5, None, 2**70]}
    data = Serializer.dumps(value)
    assert data == '{"text":"日本 \U0001f600","n":[1,2.5,null,1180591620717411303424]}'.encode()
    assert Serializer.loads(data) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "\ud800"])
def test_serializer_refuses_what_is_no_json(value: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        Serializer.dumps(value)


def test_rows_end_in_order_and_are_counted(store: Store) -> None:
    complete(store, 3, 1)
    fail(store, "model_not_found", 2)
    fail(store, "batch_cancelled", 5)
    assert logged(store) == ["b-0-3", "b-0-1", "b-0-2", "b-0-5"]
    status = store.status("b")
    assert (status.completed, status.failed, status.cancelled, status.waiting) == (2, 1, 1, 5)
    assert (status.prompt_tokens, status.completion_tokens) == (20, 2)


def test_a_batch_is_busy_from_the_first_row_taken_to_the_last_completed(store: Store) -> None:
    """Bad lines end while they are queued, long before a worker has loaded its model: they start no clock."""
    fail(store, "invalid_value", 1)
    assert store.status("b").busy_seconds == 0.0
    for line, started_at in ((2, time.time() - 50), (3, time.time() - 10)):
        with store.connection.pipeline() as pipe:
            log_completed(pipe, "b", [f"b-0-{line}"], completion_tokens=100, started_at=started_at)
            pipe.execute()
    fail(store, "batch_cancelled", 4)
    status = store.status("b")
    assert status.busy_seconds == pytest.approx(50, abs=5)
    assert status.tokens_per_second == pytest.approx(200 / status.busy_seconds)
    assert status.rows_per_second == pytest.approx(2 / status.busy_seconds)


def test_the_first_end_of_a_row_stands(store: Store) -> None:
    complete(store, 1)
    complete(store, 1)
    fail(store, "worker_lost", 1)
    status = store.status("b")
    assert logged(store) == ["b-0-1"]
    assert (status.completed, status.failed, status.completion_tokens) == (1, 0, 1)


def test_forged_job_ids_do_not_cost_other_rows_their_end(store: Store) -> None:
    """Redis refuses such bit numbers: an error in the script's middle would lose the rows behind it."""
    with store.connection.pipeline() as pipe:
        log_completed(pipe, "b", ["b-0-01", "b-0-4294967296", "b-0-9999999999", "b-0-0", "b-0-1"])
        pipe.execute()
    assert logged(store) == ["b-0-1"]
    assert store.status("b").completed == 1


def test_rows_nobody_accepted_leave_no_trace(store: Store) -> None:
    """Redis is not trusted: a forged job id must neither count nor make a bitmap of half a gigabyte."""
    before = store.connection.info("memory")["used_memory"]
    with store.connection.pipeline() as pipe:
        log_completed(pipe, "b", ["b-0-10", "b-0-4000000000", "b-7-1", "nonsense"])
        log_completed(pipe, "nobody", ["nobody-0-1"])
        pipe.execute()
    assert logged(store) == []
    assert store.connection.info("memory")["used_memory"] - before < 1_000_000
    assert not store.connection.keys("*nobody*")


def test_a_finished_batch_ages_and_no_other(store: Store) -> None:
    complete(store, *range(1, 9))
    store.set_state("b", "closed")
    assert store.connection.ttl(log_key("b")) == -1
    complete(store, 9)
    keys = store.connection.keys(f"{keyspace.batch_key('b')}*")
    assert len(keys) == 5  # ids are not there: this test queued nothing
    assert all(0 < store.connection.ttl(key) <= 1000 for key in keys)


def test_an_open_batch_never_ages(store: Store) -> None:
    complete(store, *range(1, 10))
    assert store.connection.ttl(log_key("b")) == -1
    store.set_state("b", "closed")
    assert 0 < store.connection.ttl(log_key("b")) <= 1000


def test_an_aged_batch_is_forgotten(store: Store) -> None:
    store.create(record("c"))
    for key in store.connection.keys(f"{keyspace.batch_key('b')}*"):
        store.connection.delete(key)
    assert store.batch_ids() == ["c"]
    assert store.connection.zrange(keyspace.BATCHES, 0, -1) == [b"c"]
    with pytest.raises(UsageError, match="no batch b"):
        store.status("b")


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        (["closed"], "closed"),
        (["cancelled"], "cancelled"),
        (["closed", "cancelled"], "cancelled"),
        (["cancelled", "closed"], "cancelled"),
    ],
)
def test_states(store: Store, changes: list[str], state: str) -> None:
    for change in changes:
        store.set_state("b", change)  # type: ignore[arg-type]
    assert store.status("b").state == state
    assert store.is_cancelled(["b", "b", "nobody"]) == ({"b"} if state == "cancelled" else set())


def test_a_state_is_not_given_to_what_is_no_batch(store: Store) -> None:
    store.set_state("nobody", "cancelled")
    assert store.states(["nobody"]) == [None]


def test_the_first_record_of_a_batch_stands(store: Store) -> None:
    assert store.create(record(keep_seconds=5)).keep_seconds == 1000
    assert store.record("b") == record()


def test_a_damaged_record_is_told(store: Store) -> None:
    store.connection.hset(keyspace.batch_key("b"), "record", '{"id":1}')
    with pytest.raises(StoreError, match="damaged"):
        store.record("b")


def test_log_is_read_from_a_cursor(store: Store) -> None:
    complete(store, 1, 2, 3)
    first = store.read_log("b", "0", 2)
    assert [entry.job_id for entry in first] == ["b-0-1", "b-0-2"]
    assert [entry.job_id for entry in store.read_log("b", first[-1].cursor, 10)] == ["b-0-3"]


def test_log_waits_for_the_next_end(store: Store) -> None:
    started = time.monotonic()
    assert store.read_log("b", "0", 10, block_ms=50) == []
    assert time.monotonic() - started >= 0.04


def test_workers_report_and_fall_silent(store: Store) -> None:
    with store.connection.pipeline() as pipe:
        store.report_worker(pipe, "w1", {"rows": "3", "model": "größer"}, 30)
        store.report_worker(pipe, "w0", {"rows": "0"}, 30)
        pipe.execute()
    assert [(worker.name, dict(worker.fields)) for worker in store.workers()] == [
        ("w0", {"rows": "0"}),
        ("w1", {"rows": "3", "model": "größer"}),
    ]
    assert 0 < store.connection.ttl(worker_key("w1")) <= 30
    store.connection.delete(worker_key("w1"))  # as its TTL does
    assert [worker.name for worker in store.workers()] == ["w0"]
    assert store.connection.smembers(keyspace.WORKERS) == {b"w0"}


def test_every_key_of_ours_is_drawn(redis_url: str, connection: redis.Redis, tmp_path: Path) -> None:
    """After a whole journey, Redis holds no key of our prefix that the keyspace's drawing does not name."""
    client, worker = Client(redis_url), TinyWorker(connection)
    batch = client.submit([write(tmp_path / "a.jsonl", [*rows(5), "{bad"])])
    worker.complete(worker.claim(2))
    with connection.pipeline() as pipe:
        worker.store.report_worker(pipe, "w", {"rows": "1"}, 30)
        pipe.execute()
    client.cancel(batch.id)
    drawn = re.findall(r"^    (livebatch:\S+)", keyspace.__doc__ or "", re.MULTILINE)
    patterns = [re.sub(r"\\\{\w+\\\}", "[^:]+", re.escape(name)) for name in drawn]
    ours = [key.decode() for key in connection.keys("livebatch:*")]
    assert len(ours) == 9
    assert [key for key in ours if not any(re.fullmatch(pattern, key) for pattern in patterns)] == []
    assert [
        key for key in map(bytes.decode, connection.keys("*")) if not key.startswith(("livebatch:", "rq:"))
    ] == []


def test_ids_know_every_queued_row(redis_url: str, connection: redis.Redis, tmp_path: Path) -> None:
    batch = Client(redis_url).submit([write(tmp_path / "a.jsonl", rows(3))])
    assert connection.hgetall(ids_key(batch.id)) == {b"r0": b"0-1", b"r1": b"0-2", b"r2": b"0-3"}
