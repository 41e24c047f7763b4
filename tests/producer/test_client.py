"""Following a batch: each end once, in either order, whatever others do to its jobs in RQ; cancelling it."""

from __future__ import annotations

import gzip
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from rq.job import Job, JobStatus
from rq.registry import CanceledJobRegistry, StartedJobRegistry
from tiny_worker import TinyWorker, codes, ids, rows, write

from producer import Client as PublicClient
from producer import completions, enqueue
from producer.batch import Batch, Progress
from producer.client import Client
from producer.completions import InputOrder
from producer.embedded import EmbeddedRedis
from producer.errors import StoreError, UsageError
from producer.jsonl import BadRow
from producer.store import COMMANDS, Serializer, Store, ids_key
from producer.sweep import Sweeper
from producer.validation import BadLinesError
from producer.wire import Failure, Request, Result

pytestmark = pytest.mark.redis


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "BLOCK_MS", 20)


@pytest.fixture
def submit(client: Client, tmp_path: Path) -> Callable[..., Batch]:
    def submit(*lines: object, batch_id: str = "m") -> Batch:
        return client.submit([write(tmp_path / f"{batch_id}.jsonl", lines)], batch_id=batch_id)

    return submit


def job(connection: redis.Redis, job_id: str) -> Job:
    return Job.fetch(job_id, connection, serializer=Serializer)


def names_of(connection: redis.Redis, batch_id: str) -> completions.Names:
    store = Store(connection)
    return completions.Names(store, store.record(batch_id))


def test_package_gives_the_client() -> None:
    assert PublicClient is Client


def test_results_in_order_of_ending(client: Client, worker: TinyWorker, submit: Callable[..., Batch]) -> None:
    submit(*rows(6), "{bad")
    live = worker.claim()
    worker.complete([live[4], live[1]])
    worker.fail([live[2]])
    found = list(client.results("m"))
    assert ids(found) == ["line-7", "r4", "r1", "r2"]
    assert [result.failure and result.failure.code for result in found] == [
        "invalid_json",
        None,
        None,
        "model_not_found",
    ]
    assert found[1].choices[0].text == "echo r4"
    status = client.status("m")
    assert (status.rows, status.completed, status.failed, status.waiting) == (7, 2, 2, 3)
    assert (status.prompt_tokens, status.completion_tokens) == (6, 4)


def test_reading_goes_on_from_a_cursor(
    client: Client, worker: TinyWorker, submit: Callable[..., Batch]
) -> None:
    submit(*rows(6))
    live = worker.claim()
    worker.complete(live[:2])
    *_, page = client.pages("m")
    worker.complete(live[2:])
    assert ids(client.results("m", cursor=page.cursor)) == ["r2", "r3", "r4", "r5"]


def test_follow_ends_with_the_batch(client: Client, worker: TinyWorker, submit: Callable[..., Batch]) -> None:
    """Every row once, while a worker ends them one by one; over as soon as the last has ended."""
    submit(*rows(40))
    live = worker.claim()
    thread = threading.Thread(target=lambda: [worker.complete([row]) for row in live])
    thread.start()
    assert ids(client.results("m", follow=True)) == [f"r{n}" for n in range(40)]
    thread.join()


def test_a_lone_row_is_read_without_a_pause(
    client: Client, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pauses save a follower of many rows the pages it would read too early; the last page ends the batch."""
    worker, pauses = TinyWorker(connection), list[float]()
    monkeypatch.setattr(completions.time, "sleep", pauses.append)
    client.submit_rows(rows(1), batch_id="m")
    pages = client.pages("m", follow=True)
    ending = threading.Timer(0.2, worker.run)
    ending.start()
    found = [result.custom_id for page in pages for result in page.results]
    ending.join()
    assert (found, pauses) == (["r0"], [])


def test_follow_waits_for_a_producer_that_is_still_queueing(
    client: Client, worker: TinyWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows so far have ended, but the batch is open: an empty page, not the end."""
    monkeypatch.setattr(enqueue, "CHUNK_ROWS", 10)
    path = write(tmp_path / "a.jsonl", rows(30))
    pages = client.pages("m", follow=True)
    arrived: list[str] = []

    def drain(_: Progress) -> None:
        worker.run()
        while results := next(pages).results:
            arrived.extend(ids(results))

    client.submit([path], batch_id="m", on_progress=drain)
    assert arrived == [f"r{n}" for n in range(30)]
    assert [page.results for page in pages] == [[]]


def test_follow_survives_a_restart_of_redis(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        client = Client(server.url)
        worker = TinyWorker(redis.Redis.from_url(server.url))
        client.submit([write(tmp_path / "a.jsonl", rows(20))], batch_id="m")
        live = worker.claim()
        worker.complete(live[:10])
        arrived: list[str] = []
        for page in client.pages("m", follow=True):
            arrived += ids(page.results)
            if len(arrived) == 10 and live:
                server.kill()
                server.start()
                worker.complete(live[10:])
                live = []
        assert arrived == [f"r{n}" for n in range(20)]


def test_an_unknown_batch_is_told(client: Client) -> None:
    for act in (client.status, client.cancel, lambda name: list(client.results(name))):
        with pytest.raises(UsageError, match="no batch nope"):
            act("nope")


# Results that cannot be read are failures, never silence.


def test_an_expired_result_is_a_failure_under_its_own_name(
    client: Client, worker: TinyWorker, connection: redis.Redis, submit: Callable[..., Batch]
) -> None:
    submit(*rows(3))
    worker.run()
    connection.delete("rq:results:m-0-2")
    assert codes(client.results("m")) == {"r0": None, "r1": "batch_expired", "r2": None}


def test_names_of_a_batch_read_after_its_release_cost_few_walks(
    client: Client,
    worker: TinyWorker,
    connection: redis.Redis,
    submit: Callable[..., Batch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not one a page: with a million rows that were millions of HSCANs."""
    monkeypatch.setattr(completions, "PAGE_ROWS", 10)
    submit(*rows(100))
    worker.run()
    connection.delete(*connection.keys("rq:results:*"))
    connection.config_resetstat()
    assert codes(client.results("m")) == {f"r{n}": "batch_expired" for n in range(100)}
    assert connection.info("commandstats")["cmdstat_hscan"]["calls"] == 5


def test_the_names_of_a_batch_are_kept_only_where_many_are_sought(
    connection: redis.Redis, submit: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few results that got lost must not bring the names of ten million rows into memory."""
    monkeypatch.setattr(completions, "PAGE_ROWS", 10)
    submit(*rows(100))
    names = names_of(connection, "m")
    for line in (1, 2, 3):
        names.learn({f"m-0-{line}"})
    assert [names.of(f"m-0-{line}") for line in (1, 2, 3, 4)] == ["r0", "r1", "r2", "m-0-4"]
    names.learn({f"m-0-{line}" for line in range(10, 50)})
    assert names.of("m-0-4") == "r3"


def test_rows_whose_names_are_sought_one_by_one_cost_few_walks(
    connection: redis.Redis, submit: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completions, "MANY_WALKS", 3)
    submit(*rows(20))
    names = names_of(connection, "m")
    connection.config_resetstat()
    for line in range(1, 21):
        names.learn({f"m-0-{line}"})
    assert [names.of(f"m-0-{line}") for line in range(1, 21)] == [f"r{n}" for n in range(20)]
    assert connection.info("commandstats")["cmdstat_hscan"]["calls"] == 4


def test_names_of_rows_queued_meanwhile_are_found(
    client: Client,
    worker: TinyWorker,
    connection: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(enqueue, "CHUNK_ROWS", 10)
    pages = client.pages("m", follow=True)
    found: list[Result] = []

    def drain(_: Progress) -> None:
        worker.run()
        connection.delete(*connection.keys("rq:results:*"))
        while results := next(pages).results:
            found.extend(results)

    client.submit([write(tmp_path / "a.jsonl", rows(40))], batch_id="m", on_progress=drain)
    assert codes(found) == {f"r{n}": "batch_expired" for n in range(40)}


def test_a_row_that_its_worker_could_not_name_keeps_its_custom_id(
    client: Client, worker: TinyWorker, submit: Callable[..., Batch]
) -> None:
    submit(*rows(3))
    unread = [replace(request, custom_id=request.job_id) for request in worker.claim()[1:]]
    worker.fail(unread, "invalid_request")
    assert codes(client.results("m")) == {"r1": "invalid_request", "r2": "invalid_request"}


@pytest.mark.parametrize(
    "stored", [b"", b'{"v":999}', b"{", b'"a string"', b"\xff", b"[" * 100_000, b'{"v":1,"custom_id":7}']
)
def test_a_damaged_result_is_a_failure(
    client: Client, worker: TinyWorker, connection: redis.Redis, submit: Callable[..., Batch], stored: bytes
) -> None:
    submit(*rows(2))
    worker.run()
    connection.xadd("livebatch:batch:m:log", {"j": "m-0-1", "r": stored})
    connection.delete("rq:results:m-0-2")
    connection.xadd("rq:results:m-0-2", {"type": 1, "return_value": stored})
    found = [(result.custom_id, result.failure and result.failure.code) for result in client.results("m")]
    assert found == [("r0", None), ("r1", "internal_error"), ("r0", "internal_error")]


def test_a_result_of_another_row_is_a_failure(
    client: Client, worker: TinyWorker, connection: redis.Redis, submit: Callable[..., Batch]
) -> None:
    """Whoever forges one cannot give a row its neighbour's answer, nor the neighbour two."""
    submit(*rows(3))
    worker.run()
    connection.delete("rq:results:m-0-2")
    (forged,) = connection.xrange("rq:results:m-0-1")
    connection.xadd("rq:results:m-0-2", forged[1])
    assert codes(client.results("m")) == {"r0": None, "r1": "internal_error", "r2": None}
    failures = [result.failure for result in client.results("m") if result.failure]
    assert 'belongs to row "m-0-1"' in failures[0].message


@pytest.mark.parametrize("ordered", [False, True])
def test_log_entries_that_tell_of_no_row_are_passed_over(
    client: Client, worker: TinyWorker, connection: redis.Redis, submit: Callable[..., Batch], ordered: bool
) -> None:
    submit(*rows(3))
    for entry in ({"x": "y"}, {"j": b"\xff"}, {"j": "m"}, {"j": "m-0-x"}, {"j": "other-0-1"}, {"j": "m-9-1"}):
        connection.xadd("livebatch:batch:m:log", entry)
    worker.run()
    assert codes(client.results("m", ordered=ordered, follow=True)) == {"r0": None, "r1": None, "r2": None}


def test_keys_made_into_something_else_cost_no_other_row_its_result(
    client: Client, worker: TinyWorker, connection: redis.Redis, submit: Callable[..., Batch]
) -> None:
    submit(*rows(4))
    worker.complete(worker.claim(2))
    for key in ("rq:results:m-0-1", "rq:job:m-0-3", "rq:executions:m-0-4"):
        connection.delete(key)
        connection.set(key, "not what it was")
    connection.hset("rq:job:m-0-4", "status", "started")
    client.cancel("m")
    found = codes(client.results("m", follow=True))
    assert found == {"r0": "internal_error", "r1": None, "r2": "worker_lost", "r3": "batch_cancelled"}


@pytest.mark.parametrize("value", ["junk", "nan", "inf", b"\xff"])
def test_damaged_counts_are_told(
    client: Client, connection: redis.Redis, submit: Callable[..., Batch], value: str | bytes
) -> None:
    submit(*rows(1))
    connection.hset("livebatch:batch:m:counts", "completed", value)
    with pytest.raises(StoreError, match="counts of batch m in Redis are damaged"):
        client.status("m")


def test_a_damaged_batch_does_not_hide_the_others(
    client: Client, connection: redis.Redis, submit: Callable[..., Batch], tmp_path: Path
) -> None:
    submit(*rows(1))
    for name in ("counts", "record", "kind"):
        client.submit([write(tmp_path / "in.jsonl", rows(1))], batch_id=name)
    connection.hset("livebatch:batch:counts:counts", "rows", "junk")
    connection.hset("livebatch:batch:record", "record", "junk")
    connection.delete("livebatch:batch:kind:counts")
    connection.sadd("livebatch:batch:kind:counts", "junk")
    told: list[str] = []
    assert [status.id for status in client.list(on_warning=told.append)] == ["m"]
    assert sorted(text.split(" is left out: ")[0] for text in told) == [
        "batch counts",
        "batch kind",
        "batch record",
    ]
    connection.delete("livebatch:batch:kind")
    connection.sadd("livebatch:batch:kind", "junk")
    assert Store(connection).is_cancelled(["m", "kind"]) == set()
    assert [status.id for status in client.list()] == ["m"]


# Input order.


def shuffled_batch(client: Client, worker: TinyWorker, tmp_path: Path) -> list[str]:
    """Two files, blank and bad lines among them; nothing has ended. The custom ids in input order."""
    first = write(tmp_path / "a.jsonl", ["", *rows(20), "{bad", "", *rows(5, 20)])
    second = write(tmp_path / "b.jsonl", ["[]", *rows(15, 25)])
    client.submit([first, second], batch_id="m")
    bad = [f"{first}:line-22", f"{second}:line-1"]
    names = [f"r{n}" for n in range(40)]
    return [*names[:20], bad[0], *names[20:25], bad[1], *names[25:]]


@pytest.mark.parametrize("seed", range(5))
def test_ordered_is_input_order(client: Client, worker: TinyWorker, tmp_path: Path, seed: int) -> None:
    wanted = shuffled_batch(client, worker, tmp_path)
    rng = random.Random(seed)
    live = rng.sample(worker.claim(), 40)
    arrived: list[str] = []
    for page in client.pages("m", follow=True, ordered=True):
        arrived += ids(page.results)
        assert arrived == wanted[: len(arrived)]
        if live:
            count = rng.randint(1, 8)
            worker.complete(live[:count])
            live = live[count:]
    assert arrived == wanted


def test_ordered_gives_what_is_due_and_goes_on_from_a_cursor(
    client: Client, worker: TinyWorker, tmp_path: Path
) -> None:
    wanted = shuffled_batch(client, worker, tmp_path)
    live = worker.claim()
    worker.complete(live[:10] + live[12:])
    *_, page = client.pages("m", ordered=True)
    assert ids(client.results("m", ordered=True)) == wanted[:10]
    worker.complete(live[10:12])
    assert ids(client.results("m", ordered=True, cursor=page.cursor)) == wanted[10:]


@pytest.mark.parametrize("cursor", ["zzz", "1-x", "-1", "99999999999999999999-1", "1-99999999999999999999"])
@pytest.mark.parametrize("ordered", [False, True])
def test_what_is_no_cursor(client: Client, tmp_path: Path, cursor: str, ordered: bool) -> None:
    client.submit([write(tmp_path / "a.jsonl", rows(1))], batch_id="m")
    with pytest.raises(UsageError, match=f'"{cursor}" is no cursor'):
        next(client.pages("m", ordered=ordered, cursor=cursor))


def test_ordered_cursor_before_anything_is_due(client: Client, worker: TinyWorker, tmp_path: Path) -> None:
    wanted = shuffled_batch(client, worker, tmp_path)
    live = worker.claim()
    worker.complete(live[1:])
    [page] = [page for page in client.pages("m", ordered=True) if page.results] or [None]
    assert page is None
    worker.complete(live[:1])
    assert ids(client.results("m", ordered=True)) == wanted


def test_ordered_while_files_are_still_queued(
    client: Client, worker: TinyWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order asks Redis between any two chunks: a file begun meanwhile hides no line of the one before."""
    monkeypatch.setattr(enqueue, "CHUNK_ROWS", 10)
    files = [write(tmp_path / f"{n}.jsonl", rows(25, 25 * n)) for n in range(3)]
    order: list[InputOrder] = []
    state = {"cursor": "0"}
    arrived: list[str] = []

    def take(_: Progress) -> None:
        store = worker.store
        if not order:
            order.append(InputOrder(store, store.record("m"), (0, 0)))
        worker.run()
        entries = store.read_log("m", state["cursor"], 10_000)
        state["cursor"] = entries[-1].cursor
        half = len(entries) // 2
        for part in (entries[half:], entries[:half]):  # out of order
            arrived.extend(entry.job_id for entry in order[0].arrange(part))

    client.submit(files, batch_id="m", on_progress=take)
    assert arrived == [f"m-{file}-{line}" for file in range(3) for line in range(1, 26)]


def test_ordered_passes_over_the_end_of_a_row_that_nobody_accepted(
    client: Client, worker: TinyWorker, connection: redis.Redis, submit: Callable[..., Batch]
) -> None:
    submit(*rows(3))
    connection.xadd("livebatch:batch:m:log", {"j": "m-0-999"})
    worker.run()
    assert codes(client.results("m", ordered=True, follow=True)) == {"r0": None, "r1": None, "r2": None}


# What others do to the jobs in RQ.


def delete_jobs(connection: redis.Redis) -> None:
    for line in (1, 2, 3):
        job(connection, f"m-0-{line}").delete()


def cancel_jobs(connection: redis.Redis) -> None:
    for line in (1, 2, 3):
        job(connection, f"m-0-{line}").cancel()


def fail_jobs(connection: redis.Redis) -> None:
    for line in (1, 2, 3):
        job(connection, f"m-0-{line}").set_status(JobStatus.FAILED)


@pytest.mark.parametrize("claimed", [False, True])
@pytest.mark.parametrize("act", [delete_jobs, cancel_jobs, fail_jobs])
def test_rows_ended_by_others_are_lost_rows_not_a_hang(
    redis_url: str,
    worker: TinyWorker,
    submit: Callable[..., Batch],
    act: Callable[[redis.Redis], None],
    claimed: bool,
) -> None:
    """While they wait, or run: a real worker's fence lets it write nothing for a job that is not its own."""
    submit(*rows(4))
    if claimed:
        worker.claim(3)
    act(worker.connection)
    worker.run()
    lost = dict.fromkeys(["r0", "r1", "r2"], "worker_lost")
    assert codes(Client(redis_url).results("m", follow=True)) == {**lost, "r3": None}
    assert Client(redis_url).status("m").is_over


def test_rows_of_an_emptied_queue_are_lost_rows(
    client: Client, worker: TinyWorker, submit: Callable[..., Batch]
) -> None:
    submit(*rows(3))
    worker.complete(worker.claim(1))
    worker.queue.empty()
    assert codes(client.results("m", follow=True)) == {"r0": None, "r1": "worker_lost", "r2": "worker_lost"}


def test_a_lost_row_that_runs_after_all_stays_lost(
    client: Client, worker: TinyWorker, connection: redis.Redis, submit: Callable[..., Batch]
) -> None:
    """Given up, then requeued from a dashboard: still one result."""
    submit(*rows(2))
    worker.complete(worker.claim(1))
    [row] = worker.claim()
    job(connection, row.job_id).set_status(JobStatus.FAILED)
    assert codes(client.results("m", follow=True)) == {"r0": None, "r1": "worker_lost"}
    job(connection, row.job_id).set_status(JobStatus.STARTED)
    worker.complete([row])
    assert codes(client.results("m", follow=True)) == {"r0": None, "r1": "worker_lost"}
    assert client.status("m").completed == 1


def test_rows_that_wait_or_run_are_left_alone(
    client: Client, worker: TinyWorker, submit: Callable[..., Batch]
) -> None:
    """Also one whose worker died: RQ's cleanup puts it back, and another worker runs it."""
    submit(*rows(3))
    worker.claim(1)
    worker.claim(1, lease_seconds=-10)
    pages = client.pages("m", follow=True)
    for _ in range(5):
        assert next(pages).results == []
    assert client.status("m").waiting == 3


# Cancelling.


def test_cancel_ends_what_waits_and_keeps_what_ended(
    client: Client, worker: TinyWorker, connection: redis.Redis, submit: Callable[..., Batch]
) -> None:
    submit(*rows(1200), "{bad")
    done, running = worker.claim(1), worker.claim(2)
    worker.complete(done)
    with connection.pubsub() as commands:
        commands.subscribe(COMMANDS)
        assert commands.get_message(timeout=5)["type"] == "subscribe"
        status = client.cancel("m")
        message = commands.get_message(timeout=5)
    assert json.loads(message["data"]) == {"command": "cancel", "batch": "m"}
    assert (status.state, status.completed, status.failed, status.cancelled) == ("cancelled", 1, 1, 1197)
    assert status.waiting == 2, "claimed rows are the worker's to end"
    assert worker.store.is_cancelled(["m"]) == {"m"}
    assert worker.claim() == [], "cancelled rows are dropped when they are claimed"
    worker.fail(running, "batch_cancelled")
    found = codes(client.results("m", follow=True))
    assert (found["r0"], found["line-1201"]) == (None, "invalid_json")
    assert {found[f"r{n}"] for n in range(1, 1200)} == {"batch_cancelled"}
    failed = job(connection, "m-0-1200")
    assert failed.get_status() == JobStatus.CANCELED
    assert "m-0-1200" in CanceledJobRegistry("livebatch", connection=connection)
    assert 0 < connection.ttl(failed.key) <= 7 * 86400


def test_a_cancelled_batch_ends_though_its_worker_died(
    client: Client, worker: TinyWorker, submit: Callable[..., Batch]
) -> None:
    submit(*rows(3))
    worker.claim(2, lease_seconds=-10)
    client.cancel("m")
    assert set(codes(client.results("m", follow=True)).values()) == {"batch_cancelled"}


def test_a_cancelled_row_that_comes_back_to_the_queue_ends_without_a_worker(
    client: Client, worker: TinyWorker, submit: Callable[..., Batch]
) -> None:
    """It ran when the batch was cancelled, its worker died, RQ's cleanup put it back, nobody claims it."""
    submit(*rows(3))
    worker.claim(2)
    client.cancel("m")
    registry = StartedJobRegistry("livebatch", connection=worker.connection, serializer=Serializer)
    registry.cleanup(timestamp=2**40)
    assert len(worker.queue.job_ids) == 3
    assert set(codes(client.results("m", follow=True)).values()) == {"batch_cancelled"}


def test_a_row_that_is_claimed_during_a_cancel_is_left_to_its_worker(
    client: Client, worker: TinyWorker, submit: Callable[..., Batch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen waiting, claimed before it could be ended: it runs, and its worker will hear of the cancel."""
    submit(*rows(3))
    live: list[Request] = []
    real = Sweeper._result

    def claim_first(sweeper: Sweeper, job_id: str, custom_id: str, failure: Failure) -> Result:
        live.extend(worker.claim(1) if not live else [])
        return real(sweeper, job_id, custom_id, failure)

    monkeypatch.setattr(Sweeper, "_result", claim_first)
    assert client.cancel("m").waiting == 1
    worker.complete(live)
    assert codes(client.results("m", follow=True)) == {
        "r0": None,
        "r1": "batch_cancelled",
        "r2": "batch_cancelled",
    }


def test_a_running_row_that_ends_during_a_cancel_keeps_its_result(
    client: Client, worker: TinyWorker, submit: Callable[..., Batch]
) -> None:
    submit(*rows(2))
    running = worker.claim(1)
    client.cancel("m")
    worker.complete(running)
    assert codes(client.results("m", follow=True)) == {"r0": None, "r1": "batch_cancelled"}


def test_cancelling_twice_or_too_late_changes_nothing(
    client: Client, worker: TinyWorker, submit: Callable[..., Batch]
) -> None:
    submit(*rows(2))
    assert client.cancel("m") == client.cancel("m")
    submit(*rows(2), batch_id="n")
    worker.run()
    status = client.cancel("n")
    assert (status.state, status.completed, status.cancelled) == ("closed", 2, 0)


def test_a_forged_place_in_the_ids_hurts_nobody(
    client: Client, worker: TinyWorker, connection: redis.Redis, submit: Callable[..., Batch]
) -> None:
    submit(*rows(2))
    connection.hset(ids_key("m"), "forged", "0-77")
    client.cancel("m")
    assert codes(client.results("m", follow=True)) == {"r0": "batch_cancelled", "r1": "batch_cancelled"}


# Sources.


def test_rows_from_python(client: Client, worker: TinyWorker) -> None:
    stream = ({"custom_id": f"p{n}", "prompt": "\ud800" if n == 1 else "x"} for n in range(3))
    batch = client.submit_rows([*stream, {"prompt": "y", "temperature": float("nan")}], batch_id="m")
    assert (batch.queued, batch.failed) == (2, 2)
    worker.run()
    assert codes(client.results("m")) == {
        "p0": None,
        "p1": "invalid_request",
        "p2": None,
        "line-4": "invalid_value",
    }


def test_rows_from_python_that_are_no_json(client: Client, connection: redis.Redis) -> None:
    with pytest.raises(UsageError, match="row 2"):
        client.submit_rows([{"prompt": "x"}, {"prompt": {1, 2}}])
    assert not connection.keys("*")


def test_files_patterns_and_gzip(client: Client, worker: TinyWorker, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"custom_id":"zipped","prompt":"x"}\n'))
    write(tmp_path / "c.jsonl", [{"custom_id": "third", "prompt": "x"}])
    write(tmp_path / "a.jsonl", [{"custom_id": "first", "prompt": "x"}])
    client.submit([str(tmp_path / "*.jsonl*")], batch_id="m")
    assert [request.custom_id for request in worker.claim()] == ["first", "zipped", "third"]


def test_a_file_called_like_a_pattern_is_a_file(client: Client, worker: TinyWorker, tmp_path: Path) -> None:
    path = write(tmp_path / "a[1].jsonl", rows(1))
    assert client.submit([path]).queued == 1


def test_text_files(client: Client, worker: TinyWorker, tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", ["Once", '{"prompt":"not JSON here"}'])
    client.submit([path], format="text", batch_id="m")
    assert [request.prompt for request in worker.claim()] == ["Once", '{"prompt":"not JSON here"}']


def test_standard_input_can_be_submitted_again(
    client: Client, worker: TinyWorker, stdin: Callable[[bytes], None]
) -> None:
    stdin(b'{"prompt":"x"}\n{"prompt":"y"}\n')
    assert client.submit(["-"], batch_id="m").queued == 2
    stdin(b'{"prompt":"x"}\n{"prompt":"y"}\n')
    assert client.submit(["-"], batch_id="m").already == 2
    stdin(b'{"prompt":"z"}\n')
    with pytest.raises(UsageError, match="producer submit - --batch-id m < FILE"):
        client.submit(["-"], batch_id="m")
    assert [request.custom_id for request in worker.claim()] == ["line-1", "line-2"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["none.jsonl"], "none.jsonl: no such file"),
        (["none*.jsonl"], "no file matches"),
        (["."], "folder"),
        ([], "no input file"),
        (["-", "."], "stands alone"),
    ],
)
def test_sources_that_are_not_there(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        Client(redis_url).submit(files)
    assert not Client(redis_url).list()


def test_strict_queues_nothing_if_a_line_is_bad(
    client: Client, connection: redis.Redis, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.jsonl", [*rows(3), "{bad", *rows(1)])
    bad: list[BadRow] = []
    with pytest.raises(BadLinesError, match="2 of 5 rows are bad") as caught:
        client.submit([path], strict=True, on_bad=bad.append)
    assert [row.line for row in bad] == [4, 5]
    assert caught.value.validation.first == bad[0]
    assert not connection.keys("*")
    assert client.submit([write(tmp_path / "b.jsonl", rows(3))], strict=True).queued == 3


def test_validate_needs_no_redis(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*rows(2), "", {"prompt": "x", "temprature": 1}, *rows(1)])
    bad: list[BadRow] = []
    found = Client("redis://127.0.0.1:1").validate([path], on_bad=bad.append)
    assert (found.rows, found.bad) == (4, 2)
    assert [(row.line, row.failure.code) for row in bad] == [
        (4, "invalid_request"),
        (5, "duplicate_custom_id"),
    ]


def test_list_is_newest_first(client: Client, submit: Callable[..., Batch]) -> None:
    submit(*rows(1), batch_id="old")
    submit(*rows(2), batch_id="new")
    assert [(status.id, status.rows) for status in client.list()] == [("new", 2), ("old", 1)]


def test_status_rates(client: Client, worker: TinyWorker, submit: Callable[..., Batch]) -> None:
    submit(*rows(3))
    first, *rest = worker.claim()
    worker.complete([first])
    time.sleep(0.05)  # a rate needs time to pass
    worker.complete(rest)
    status = client.status("m")
    assert status.rows_per_second == pytest.approx(3 / status.busy_seconds)
    assert status.tokens_per_second == pytest.approx(6 / status.busy_seconds)
    assert 0.04 < status.busy_seconds < 10
    assert status.to_dict()["waiting"] == 0


def test_results_live_as_long_as_asked(redis_url: str, connection: redis.Redis, tmp_path: Path) -> None:
    Client(redis_url, keep_seconds=100).submit([write(tmp_path / "a.jsonl", rows(1))], batch_id="m")
    TinyWorker(connection).run()
    for key in ("rq:results:m-0-1", "rq:job:m-0-1", "livebatch:batch:m"):
        assert 0 < connection.ttl(key) <= 100


def test_requests_reach_the_worker_as_they_were_read(
    client: Client, worker: TinyWorker, submit: Callable[..., Batch]
) -> None:
    row = {
        "custom_id": "c",
        "messages": [{"role": "user", "content": "größe\u2028"}],
        "top_p": 0.5,
        "seed": 3,
    }
    submit(row)
    [request] = worker.claim()
    assert isinstance(request, Request)
    assert (request.endpoint, list(request.messages or [])) == ("chat", row["messages"])
    assert (request.sampling.top_p, request.sampling.seed) == (0.5, 3)


def test_store_is_shared_by_one_client(client: Client) -> None:
    client.list()
    assert isinstance(client._store, Store)
    assert client._store is client._store
