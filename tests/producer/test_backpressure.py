"""A file larger than Redis: what waits is bounded, what is read is released, and nobody is told nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.registry import FailedJobRegistry, FinishedJobRegistry
from tiny_worker import TinyWorker, codes, rows, write

from producer import completions, enqueue
from producer.backlog import ROW_BYTES, Backlog
from producer.batch import Progress
from producer.client import Client
from producer.embedded import EmbeddedRedis
from producer.store import as_text, ids_key

pytestmark = pytest.mark.redis


@pytest.fixture(autouse=True)
def short_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "HOLD_SECONDS", 0.001)


def used(connection: redis.Redis) -> int:
    return int(connection.info("memory")["used_memory"])


def noise(count: int, size: int) -> list[dict[str, Any]]:
    """Rows whose prompts zlib can only halve."""
    random_ = random.Random(0)
    return [{"custom_id": f"r{n}", "prompt": random_.randbytes(size // 2).hex()} for n in range(count)]


@contextmanager
def limited(connection: redis.Redis, maxmemory: int = 1) -> Iterator[None]:
    """A Redis with so many bytes for a while; 1 byte: it is above its maxmemory whatever it holds."""
    connection.config_set("maxmemory", maxmemory)
    try:
        yield
    finally:
        connection.config_set("maxmemory", 0)


def test_what_waits_are_the_rows_added_last() -> None:
    backlog = Backlog()
    assert backlog.bytes(0) == 0
    for payload in (1_000, 2_000, 4_000):
        backlog.add(10, payload)
    assert backlog.bytes(30) == 7_000 + 30 * ROW_BYTES
    assert backlog.bytes(21) == 7_000 + 30 * ROW_BYTES, "rounded up to whole chunks"
    assert backlog.bytes(20) == 6_000 + 20 * ROW_BYTES
    assert backlog.bytes(1) == 4_000 + 10 * ROW_BYTES
    assert backlog.bytes(0) == 0


def test_the_sum_is_about_what_redis_says(client: Client, connection: redis.Redis, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", noise(2_000, 1_000))
    before = used(connection)
    client.submit([path])
    told = Backlog()
    told.add(2_000, sum(connection.hstrlen(f"rq:job:{name}", "data") for name in job_ids(connection)))
    assert told.bytes(2_000) == pytest.approx(used(connection) - before, rel=0.2)


def job_ids(connection: redis.Redis) -> list[str]:
    return [as_text(name) for name in connection.lrange("rq:queue:livebatch", 0, -1)]


def test_a_file_larger_than_the_bound(client: Client, connection: redis.Redis, tmp_path: Path) -> None:
    """The producer holds, says why, goes on as rows end; Redis stays within the bound all the time."""
    bound, worker = 2 << 20, TinyWorker(connection)
    path = write(tmp_path / "a.jsonl", noise(350, 40_000))  # about 8 MB as they wait
    before, seen, reasons, read = used(connection), [0], set[str](), dict[str, str | None]()
    cursor: list[str | None] = [None]

    def on_progress(progress: Progress) -> None:
        seen.append(used(connection) - before)
        if progress.holding:
            reasons.add(progress.holding)
            worker.complete(worker.claim(40))
            take()

    def take() -> None:
        for page in client.pages("m", cursor=cursor[0]):
            read.update(codes(page.results))
            client.release("m", [result.job_id for result in page.results])
            cursor[0] = page.cursor

    batch = client.submit([path], batch_id="m", max_queued_bytes=bound, on_progress=on_progress)
    assert batch.queued == 350
    assert bound / 2 < max(seen) < bound + (1 << 20), "the rest is what connections buffer"
    assert any("rows wait in Redis" in reason and "--max-queued-bytes" in reason for reason in reasons)
    worker.run()
    take()
    assert read == {f"r{n}": None for n in range(350)}


def test_a_row_larger_than_the_bound_goes_in_alone(
    client: Client, connection: redis.Redis, tmp_path: Path
) -> None:
    path, worker, most = write(tmp_path / "a.jsonl", noise(6, 50_000)), TinyWorker(connection), [0]

    def on_progress(progress: Progress) -> None:
        most.append(len(job_ids(connection)))
        if progress.holding:
            worker.run()

    assert client.submit([path], max_queued_bytes=1_000, on_progress=on_progress).queued == 6
    assert max(most) == 1


def test_a_killed_producer_remembers_what_waits(
    client: Client, connection: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of an earlier submission wait as well, though this producer did not queue them."""
    path, worker = write(tmp_path / "a.jsonl", rows(40)), TinyWorker(connection)
    monkeypatch.setattr(enqueue, "CHUNK_ROWS", 10)

    def die(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.submit([path], batch_id="m", on_progress=die)
    waiting: list[int] = []

    def on_progress(progress: Progress) -> None:
        waiting.append(len(job_ids(connection)))
        if progress.holding:
            worker.complete(worker.claim(1))

    again = client.submit([path], batch_id="m", max_queued_bytes=12 * ROW_BYTES, on_progress=on_progress)
    assert (again.queued, again.already) == (30, 10)
    assert max(waiting) <= 12


def test_released_rows_leave_redis_and_are_not_run_again(
    client: Client, connection: redis.Redis, tmp_path: Path
) -> None:
    path, worker = write(tmp_path / "a.jsonl", rows(20)), TinyWorker(connection)
    client.submit([path], batch_id="m")
    live = worker.claim()
    worker.complete(live[:10])
    worker.fail(live[10:15])
    results = list(client.results("m"))
    assert len(results) == 15
    client.release("m", [result.job_id for result in results])
    client.release("m", [])
    client.release("m", [result.job_id for result in results])  # as after a kill
    left = {key.split(b":")[1] for key in connection.scan_iter("rq:*:m-0-1")}
    assert left <= {b"executions"}, "what notes its runs has a TTL of a minute"
    for registry in (FinishedJobRegistry, FailedJobRegistry):
        assert registry("livebatch", connection=connection).get_job_ids() == []
    assert connection.hlen(ids_key("m")) == 20
    assert client.submit([path], batch_id="m").already == 20, "what was there is not queued again"
    worker.complete(live[15:])
    again = codes(client.results("m", follow=True))
    assert {again[f"r{n}"] for n in range(10)} == {"batch_expired"}, "read a second time: gone, and told so"
    assert {again[f"r{n}"] for n in range(10, 15)} == {"model_not_found"}
    assert {again[f"r{n}"] for n in range(15, 20)} == {None}
    assert client.status("m").is_over


def test_failed_rows_of_a_released_batch_can_run_again(
    client: Client, connection: redis.Redis, tmp_path: Path
) -> None:
    """Their ends stand in the log, beside whatever else somebody wrote there."""
    path, worker = write(tmp_path / "a.jsonl", rows(4)), TinyWorker(connection)
    client.submit([path], batch_id="m")
    live = worker.claim()
    worker.complete(live[:2])
    worker.fail(live[2:])
    client.release("m", [result.job_id for result in client.results("m")])
    for name in ("m-9-1", "other-0-1", "x"):
        connection.xadd("livebatch:batch:m:log", {"j": name, "r": "{}"})
    assert client.submit([path], batch_id="again", retry_failed="m").queued == 2
    assert job_ids(connection) == ["again-0-3", "again-0-4"]


# Above maxmemory.


def test_a_batch_is_closed_above_maxmemory(client: Client, connection: redis.Redis, tmp_path: Path) -> None:
    """Its last rows filled Redis. Left open it would never be over, and its reader never done."""
    path = write(tmp_path / "a.jsonl", rows(3))
    with limited(connection, 0):
        client.submit([path], batch_id="m", on_progress=lambda _: connection.config_set("maxmemory", 1))
    assert client.status("m").state == "closed"


def test_a_reader_comes_to_the_end_above_maxmemory(
    client: Client, connection: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost rows end there, as results are read and released: what else makes room?"""
    monkeypatch.setattr(completions, "BLOCK_MS", 20)
    worker = TinyWorker(connection)
    client.submit([write(tmp_path / "a.jsonl", rows(3))], batch_id="m")
    worker.complete(worker.claim(1))
    connection.delete("rq:job:m-0-2", "rq:job:m-0-3")
    with limited(connection):
        found = list(client.results("m", follow=True))
        client.release("m", [result.job_id for result in found])
    assert codes(found) == {"r0": None, "r1": "worker_lost", "r2": "worker_lost"}


def test_a_batch_is_cancelled_above_maxmemory(
    client: Client, connection: redis.Redis, tmp_path: Path
) -> None:
    client.submit([write(tmp_path / "a.jsonl", rows(3))], batch_id="m")
    with limited(connection):
        assert client.cancel("m").cancelled == 3
    assert client.status("m").is_over


def test_a_chunk_larger_than_the_room_goes_in_by_parts(
    client: Client, connection: redis.Redis, tmp_path: Path
) -> None:
    """As one transaction it never fits, however much is drained."""
    path, worker = write(tmp_path / "a.jsonl", noise(100, 40_000)), TinyWorker(connection)
    room = used(connection) + (3 << 19)  # 1.5 MB, and the rows have 2 MB

    def drain(progress: Progress) -> None:
        if progress.holding:
            connection.config_set("maxmemory", 0)
            worker.run()
            client.release("m", [result.job_id for result in client.results("m")])
            connection.config_set("maxmemory", room)

    with limited(connection, room):
        assert client.submit([path], batch_id="m", on_progress=drain).queued == 100


def test_a_row_larger_than_redis_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "CHUNK_ROWS", 1)
    monkeypatch.setattr(enqueue, "REFUSALS", 2)  # redis-py takes a second to word a refusal of this size
    (large,) = noise(1, 5_600_000)  # half of it packed; an empty Redis takes 1.1 MB
    path = write(tmp_path / "a.jsonl", [*rows(1), large | {"custom_id": "large"}, *rows(1, 1)])
    with EmbeddedRedis(extra=("--maxmemory", "3500000")) as server:
        client = Client(server.url)
        batch = client.submit([path], batch_id="m")
        failures = [result.failure for result in client.results("m") if result.failure]
        with redis.Redis.from_url(server.url) as connection:
            assert job_ids(connection) == ["m-0-1", "m-0-3"]
    assert (batch.queued, batch.failed) == (2, 1)
    assert [failure.code for failure in failures] == ["line_too_long"]
    assert failures[0].message.startswith("line 2: Redis has no room for a row of this size (5.3 MB)")


def refused(monkeypatch: pytest.MonkeyPatch, connection: redis.Redis, *shares: float) -> None:
    """One attempt after the other finds a full Redis, of which so much is in use the moment after it.

    1.0: seen instead of an attempt.
    """
    left, attempts = list(shares), [False]

    def look(_: redis.Redis) -> float:
        was_attempt = attempts.pop() or left[:1] == [1.0]
        attempts.append(bool(left) and not was_attempt)
        connection.config_set("maxmemory", int(attempts[0]))
        return left.pop(0) if was_attempt else 0.0

    monkeypatch.setattr(enqueue, "memory_used", look)


def test_a_small_row_waits_though_redis_was_full_only_for_moments(
    client: Client, connection: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another producer's transaction filled it and was gone: the row is none that never fits."""
    path = write(tmp_path / "a.jsonl", rows(1))
    refused(monkeypatch, connection, *[0.1] * 5)
    assert client.submit([path]).queued == 1


def test_refusals_of_a_row_count_only_in_a_row(
    client: Client, connection: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueue, "LARGE_BYTES", 1)
    path = write(tmp_path / "a.jsonl", rows(1))
    refused(monkeypatch, connection, 0.1, 0.1, 0.6, 0.1, 0.1, 1.0, 0.1, 0.1)
    assert client.submit([path]).queued == 1
    path = write(tmp_path / "b.jsonl", rows(1))
    refused(monkeypatch, connection, 0.6, 0.1, 0.1, 0.1)
    assert client.submit([path]).failed == 1
