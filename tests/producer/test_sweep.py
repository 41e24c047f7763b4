"""Rows that no worker will come to: queued again, or ended as lost, and never waited for without end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError
from tiny_worker import TinyWorker, codes, rows, write

from producer import completions, sweep
from producer.client import Client
from producer.errors import StoreError
from producer.store import Store, batch_key, counts_key, ids_key, log_key
from producer.sweep import Sweeper
from producer.wire import Failure, Result

pytestmark = pytest.mark.redis
QUEUE = "rq:queue:livebatch"
Submit = Callable[[int], Sweeper]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "BLOCK_MS", 20)


@pytest.fixture
def submit(client: Client, connection: redis.Redis, tmp_path: Path) -> Submit:
    """Queue so many rows as batch m; who walks over them."""

    def submit(count: int) -> Sweeper:
        client.submit([write(tmp_path / "m.jsonl", rows(count))], batch_id="m")
        store = Store(connection)
        return Sweeper(store, store.record("m"))

    return submit


def queued(connection: redis.Redis) -> list[str]:
    return sorted(name.decode() for name in connection.lrange(QUEUE, 0, -1))


def row_ids(*lines: int) -> list[str]:
    return [f"m-0-{line}" for line in lines]


@contextmanager
def full(connection: redis.Redis) -> Iterator[None]:
    connection.config_set("maxmemory", 1)
    try:
        yield
    finally:
        connection.config_set("maxmemory", 0)


def test_rows_whose_queue_was_deleted_run_all_the_same(
    client: Client, worker: TinyWorker, connection: redis.Redis, submit: Submit
) -> None:
    sweeper = submit(5)
    connection.delete(QUEUE)
    with full(connection):
        assert sweeper.step() == 0, "none of them has ended"
    assert queued(connection) == row_ids(1, 2, 3, 4, 5)
    sweeper.step()
    assert len(queued(connection)) == 5, "once"
    assert worker.run() == 5
    assert set(codes(client.results("m", follow=True)).values()) == {None}


def test_who_follows_puts_them_back(
    client: Client, worker: TinyWorker, connection: redis.Redis, submit: Submit
) -> None:
    submit(3)
    connection.delete(QUEUE)
    for page in client.pages("m", follow=True):
        worker.run()
        if page.status.is_over:
            break
    assert client.status("m").completed == 3


def test_only_rows_that_nobody_has_are_put_back(
    worker: TinyWorker, connection: redis.Redis, submit: Submit
) -> None:
    sweeper = submit(6)
    worker.complete(worker.claim(1))
    worker.claim(2)
    connection.lrem(QUEUE, 0, "m-0-5")
    sweeper.step()
    assert queued(connection) == row_ids(4, 5, 6)
    assert [name.decode() for name in connection.lrange(QUEUE, 0, -1)] == row_ids(4, 6, 5)


def test_a_row_that_is_claimed_just_now_is_not_put_back(
    worker: TinyWorker, connection: redis.Redis, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweeper = submit(3)

    def claim_first(found: Sequence[Any], _: int) -> Sequence[Any]:
        worker.claim(2)
        return found

    monkeypatch.setattr("producer.sweep.random.sample", claim_first)
    sweeper.step()
    assert queued(connection) == row_ids(3)


def test_one_step_puts_back_many_pages(connection: redis.Redis, submit: Submit) -> None:
    """Else a worker would take a page of rows a second."""
    sweeper = submit(1200)
    connection.delete(QUEUE)
    sweeper.step()
    assert len(queued(connection)) > 2 * sweep.PAGE_ROWS
    while len(queued(connection)) < 1200:
        sweeper.step()
    assert queued(connection) == sorted(row_ids(*range(1, 1201)))


@pytest.mark.parametrize(("seconds", "found"), [(0.0, 0), (60.0, 1)])
def test_a_step_goes_on_for_a_while(
    connection: redis.Redis,
    submit: Submit,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    found: int,
) -> None:
    """A page a second would take half an hour to come to one lost row of a million."""
    sweeper = submit(1200)
    *_, (_, last) = connection.hscan_iter(ids_key("m"), count=sweep.PAGE_ROWS)
    connection.lrem(QUEUE, 0, f"m-{last.decode()}")
    monkeypatch.setattr(sweep, "STEP_SECONDS", seconds)
    monkeypatch.setattr(sweep, "LOOKS", 10**9)
    sweeper.step()
    assert connection.llen(QUEUE) == 1199 + found


def test_a_long_list_is_looked_at_in_part(
    connection: redis.Redis, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look goes over the whole list: a million rows of other batches must not hold up Redis."""
    sweeper = submit(4)
    connection.delete(QUEUE)
    connection.rpush(QUEUE, *[f"other-0-{n}" for n in range(10)])
    monkeypatch.setattr(sweep, "LOOKS", 9)
    sweeper.step()
    assert connection.llen(QUEUE) == 10
    monkeypatch.setattr(sweep, "LOOKS", 29)
    sweeper.step()
    assert connection.llen(QUEUE) == 12
    connection.delete(QUEUE)
    sweeper.step()
    assert queued(connection) == row_ids(1, 2, 3, 4)


def test_a_row_whose_lease_was_deleted_is_put_back_in_time(
    worker: TinyWorker, connection: redis.Redis, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started, and no registry names it: nobody's upkeep would find it. But its owner may only be away."""
    sweeper = submit(2)
    worker.claim(2)
    connection.delete("rq:wip:livebatch", "rq:executions:m-0-1")
    sweeper.step()
    sweeper.step()
    assert queued(connection) == []
    monkeypatch.setattr(sweep, "PATIENCE_SECONDS", 0.0)
    sweeper.step()
    assert queued(connection) == row_ids(1)
    assert connection.hmget("rq:job:m-0-1", "status", "worker_name") == [b"queued", b""]
    assert worker.run() == 1


@pytest.mark.parametrize("how", ["cancelled", "expired"])
def test_rows_that_shall_not_run_are_not_put_back(
    client: Client, connection: redis.Redis, tmp_path: Path, how: str
) -> None:
    lines = [write(tmp_path / "m.jsonl", rows(3))]
    client.submit(lines, batch_id="m", expires_in=0.001 if how == "expired" else None)
    connection.delete(QUEUE)
    connection.set("rq:canceled:livebatch", "no registry")
    if how == "cancelled":
        client.cancel("m")
    assert set(codes(client.results("m", follow=True)).values()) == {f"batch_{how}"}
    assert queued(connection) == []


@pytest.mark.parametrize("status", ["deferred", "scheduled", "created", "", b"\xff", "x" * 10**6, "Odd one"])
def test_a_status_no_row_can_have_is_no_hang(
    client: Client, connection: redis.Redis, submit: Submit, status: str | bytes
) -> None:
    submit(1)
    connection.delete(QUEUE)
    connection.hset("rq:job:m-0-1", "status", status)
    (result,) = client.results("m", follow=True)
    assert result.failure and result.failure.code == "worker_lost"
    assert len(result.failure.message) < 200


def test_a_queue_that_is_no_list_is_said(
    client: Client, worker: TinyWorker, connection: redis.Redis, submit: Submit
) -> None:
    sweeper = submit(3)
    connection.delete(QUEUE)
    connection.hset(QUEUE, "x", "y")
    with pytest.raises(StoreError, match=r"is no list.* DEL rq:queue:livebatch"):
        list(client.results("m", follow=True))
    connection.delete(QUEUE)
    sweeper.step()
    assert worker.run() == 3


def ended(job_id: str, code: str = "worker_lost") -> Result:
    return Result(custom_id="r", job_id=job_id, created=1, failure=Failure.of(code, "it is so"))


@pytest.mark.parametrize("place", ["nowhere", b"\xff", "0-", "0-4294967296", "0-1e3", "9" * 50 + "-1"])
def test_an_id_that_names_no_row_hides_no_lost_row(
    client: Client, connection: redis.Redis, submit: Submit, place: str | bytes
) -> None:
    submit(2)
    connection.hset("livebatch:batch:m:ids", b"forged \xff", place)
    connection.delete("rq:job:m-0-1", QUEUE)
    client.cancel("m")
    assert codes(client.results("m", follow=True)) == {"r0": "worker_lost", "r1": "batch_cancelled"}


def test_a_submission_into_no_list_is_made_good(
    client: Client, worker: TinyWorker, connection: redis.Redis, submit: Submit
) -> None:
    """RQ's jobs and our counts were written, the list could not be."""
    connection.hset(QUEUE, "x", "y")
    with pytest.raises(StoreError, match="WRONGTYPE"):
        submit(2)
    connection.delete(QUEUE)
    sweeper = submit(2)
    sweeper.step()
    assert worker.run() == 2
    assert codes(client.results("m", follow=True)) == {"r0": None, "r1": None}


SPOILT: dict[str, Callable[[redis.Redis], object]] = {
    "a log that is none": lambda it: it.set(log_key("m"), "text"),
    "a log that takes no more": lambda it: it.xadd(log_key("m"), {"j": "x"}, id=f"{2**64 - 1}-{2**64 - 1}"),
    "a count that is none": lambda it: it.hset(counts_key("m"), "failed", "many"),
    "counts that are none": lambda it: it.delete(counts_key("m")) and it.set(counts_key("m"), "text"),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_a_row_ends_wholly_or_not_at_all(
    connection: redis.Redis, submit: Submit, spoil: Callable[[redis.Redis], object]
) -> None:
    """Its bit, its count and its entry: a row with one of them alone would never be read."""
    submit(2)
    counts, (log, keys) = connection.hgetall(counts_key("m")), (log_key("m"), batch_key("m"))
    spoil(connection)
    lost = [ended("m-0-1")]
    store = Store(connection)
    with pytest.raises(ResponseError), connection.pipeline() as pipe:
        store.log_failed(pipe, "m", lost)
        pipe.execute()
    connection.delete(log, counts_key("m"))
    assert not connection.getbit(f"{keys}:ended:0", 1)
    connection.hset(counts_key("m"), mapping=counts)
    with connection.pipeline() as pipe:
        store.log_failed(pipe, "m", lost)
        pipe.execute()
    assert store.status("m").failed == 1
    assert [entry.job_id for entry in store.read_log("m", "0", 9)] == ["m-0-1"]


def test_an_end_that_fails_leaves_the_count_as_it_was(connection: redis.Redis, submit: Submit) -> None:
    submit(1)
    connection.set(log_key("m"), "text")
    store = Store(connection)
    with pytest.raises(ResponseError), connection.pipeline() as pipe:
        store.log_failed(pipe, "m", [ended("m-0-1")])
        pipe.execute()
    assert store.status("m").failed == 0


def test_a_row_that_cannot_end_costs_its_neighbours_nothing(connection: redis.Redis, submit: Submit) -> None:
    submit(2)
    connection.hset(counts_key("m"), "failed", "many")
    store = Store(connection)
    with pytest.raises(ResponseError), connection.pipeline() as pipe:
        store.log_failed(pipe, "m", [ended("m-0-1"), ended("m-0-2", "batch_cancelled")])
        pipe.execute()
    assert [entry.job_id for entry in store.read_log("m", "0", 9)] == ["m-0-2"]
