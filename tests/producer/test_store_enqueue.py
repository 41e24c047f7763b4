"""Rows into the queue exactly once: whoever submits, how often, and whatever happens in between."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from rq import Queue
from rq.job import Job
from tiny_worker import TinyWorker, codes, rows, write

from producer import connection as server
from producer import enqueue
from producer.batch import Progress
from producer.client import Client
from producer.embedded import EmbeddedRedis
from producer.errors import StoreError, UsageError
from producer.store import Serializer, Store, ids_key
from producer.wire import FUNCTION, Request

pytestmark = pytest.mark.redis


class Stop(Exception):
    """A producer that dies at a chosen moment."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "CHUNK_ROWS", 10)


def queued(connection: redis.Redis, queue: str = "livebatch") -> list[str]:
    return [name.decode() for name in connection.lrange(f"rq:queue:{queue}", 0, -1)]


def die_after(chunks: int) -> Callable[[Progress], None]:
    seen = Counter[str]()

    def on_progress(_: Progress) -> None:
        seen["chunks"] += 1
        if seen["chunks"] == chunks:
            raise Stop

    return on_progress


def test_a_row_is_an_rq_job(client: Client, connection: redis.Redis, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"custom_id": "日", "prompt": "x", "seed": 7}])
    batch = client.submit([path], queue="other", batch_id="mine")
    assert (batch.id, batch.queued, batch.already, batch.failed) == ("mine", 1, 0, 0)
    assert Queue("other", connection=connection).job_ids == ["mine-0-1"]
    job = Job.fetch("mine-0-1", connection, serializer=Serializer)
    assert (job.func_name, job.kwargs, job.timeout, job.get_status().value) == (FUNCTION, {}, -1, "queued")
    assert (job.retries_left, job.result_ttl, job.failure_ttl) == (10**6, 7 * 86400, 7 * 86400)
    assert job.description == f"{path}:1"
    request = Request.decode(job.args[0])
    assert (request.custom_id, request.prompt, request.sampling.seed) == ("日", "x", 7)


def test_the_job_is_what_rqs_own_enqueue_writes(
    client: Client, connection: redis.Redis, tmp_path: Path
) -> None:
    """Field by field: an RQ release that writes another hash fails here, not in somebody's dashboard."""
    path = write(tmp_path / "a.jsonl", [{"custom_id": "a", "prompt": "x", "seed": 7}])
    client.submit([path], batch_id="m")
    ours = connection.hgetall("rq:job:m-0-1")
    queue = Queue("theirs", connection=connection, serializer=Serializer)
    data = queue.prepare_data(
        FUNCTION,
        args=Job.fetch("m-0-1", connection, serializer=Serializer).args,
        timeout=-1,
        result_ttl=7 * 86400,
        failure_ttl=7 * 86400,
        description=f"{path}:1",
        job_id="m-0-1",
        retry=enqueue.FOREVER,
    )
    queue.enqueue_many([data])
    theirs = connection.hgetall("rq:job:m-0-1")
    assert theirs.pop(b"origin") == b"theirs" and ours.pop(b"origin") == b"livebatch"
    for moment in (b"created_at", b"enqueued_at"):
        assert len(theirs.pop(moment)) == len(ours.pop(moment))
    assert ours == theirs
    assert connection.smembers("rq:queues") == {b"rq:queue:livebatch", b"rq:queue:theirs"}


def test_rows_keep_their_order(client: Client, connection: redis.Redis, tmp_path: Path) -> None:
    files = [write(tmp_path / "b.jsonl", rows(25)), write(tmp_path / "a.jsonl", ["", *rows(3, 25)])]
    client.submit(files, batch_id="m")
    assert queued(connection) == [f"m-0-{n}" for n in range(1, 26)] + ["m-1-2", "m-1-3", "m-1-4"]


def test_submitting_again_adds_nothing(client: Client, connection: redis.Redis, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [*rows(25), "{bad", rows(1)[0]])
    client.submit([path], batch_id="m")
    again = client.submit([path], batch_id="m")
    assert (again.queued, again.already, again.failed) == (0, 25, 2)
    assert len(queued(connection)) == 25
    status = client.status("m")
    assert (status.rows, status.failed, status.state) == (27, 2, "closed")


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_killed_producer_goes_on(
    client: Client, connection: redis.Redis, tmp_path: Path, chunks: int
) -> None:
    path = write(tmp_path / "a.jsonl", rows(35))
    with pytest.raises(Stop):
        client.submit([path], batch_id="m", on_progress=die_after(chunks))
    assert client.status("m").state == "open"
    TinyWorker(connection).run()  # what is queued already runs, and must not come again
    batch = client.submit([path], batch_id="m")
    assert (batch.queued, batch.already) == (35 - 10 * chunks, 10 * chunks)
    TinyWorker(connection).run()
    assert codes(client.results("m", follow=True)) == {f"r{n}": None for n in range(35)}


def test_producers_side_by_side(redis_url: str, connection: redis.Redis, tmp_path: Path) -> None:
    """Four producers, one batch: every line is queued by exactly one of them."""
    path = write(tmp_path / "a.jsonl", [*rows(400), *rows(5)])
    added: list[int] = []

    def produce() -> None:
        added.append(Client(redis_url).submit([path], batch_id="m").queued)

    threads = [threading.Thread(target=produce) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(added) == 4
    assert sum(added) == 400
    assert sorted(queued(connection)) == sorted(f"m-0-{n}" for n in range(1, 401))
    status = Client(redis_url).status("m")
    assert (status.rows, status.failed) == (405, 5)


def in_the_window(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do something once between a transaction's WATCH and its MULTI."""
    real = redis.client.Pipeline.multi

    def multi(pipe: redis.client.Pipeline) -> None:
        if pipe.watching:  # not the other pipelines of whoever acts
            monkeypatch.setattr(redis.client.Pipeline, "multi", real)
            act()
        real(pipe)

    monkeypatch.setattr(redis.client.Pipeline, "multi", multi)


def test_another_producer_within_the_transaction(
    redis_url: str, client: Client, connection: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", rows(12))
    in_the_window(monkeypatch, lambda: Client(redis_url).submit([path], batch_id="m"))
    batch = client.submit([path], batch_id="m")
    assert (batch.queued, batch.already) == (0, 12)
    assert queued(connection) == [f"m-0-{n}" for n in range(1, 13)]


def test_another_use_of_a_custom_id_within_the_transaction(
    client: Client, connection: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", rows(2))
    in_the_window(monkeypatch, lambda: connection.hset(ids_key("m"), "r1", "0-99"))
    batch = client.submit([path], batch_id="m")
    assert (batch.queued, batch.failed) == (1, 1)


def test_a_cancel_within_the_transaction(
    client: Client, connection: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is queued behind a cancel's back; those queued before are cancelled, but for a running one."""
    path = write(tmp_path / "a.jsonl", rows(35))

    def cancel_in_second_chunk(progress: Progress) -> None:
        TinyWorker(connection).claim(1)
        in_the_window(monkeypatch, lambda: Client(client.url).cancel("m"))

    with pytest.raises(UsageError, match="was cancelled"):
        client.submit([path], batch_id="m", on_progress=cancel_in_second_chunk)
    status = client.status("m")
    assert (status.state, status.rows, status.cancelled) == ("cancelled", 10, 9)
    with pytest.raises(UsageError, match="was cancelled"):
        client.submit([path], batch_id="m")


def test_an_answer_lost_on_the_way(
    client: Client, connection: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transaction happened, the connection broke before the answer: the accepted lines tell."""
    path = write(tmp_path / "a.jsonl", rows(20))
    real = redis.client.Pipeline._execute_transaction
    lost = Counter[str]()

    def execute(pipe: redis.client.Pipeline, *arguments: object) -> object:
        watching = pipe.watching
        answer = real(pipe, *arguments)
        if watching and not lost["answers"]:
            lost["answers"] += 1
            pipe.watching = True  # redis-py clears it only once it has read the answer
            raise redis.exceptions.ConnectionError("broken after EXEC")
        return answer

    monkeypatch.setattr(redis.client.Pipeline, "_execute_transaction", execute)
    batch = client.submit([path], batch_id="m")
    assert lost["answers"] == 1
    assert (batch.queued, batch.already) == (10, 10)
    assert queued(connection) == [f"m-0-{n}" for n in range(1, 21)]
    assert client.status("m").rows == 20


def test_redis_restarts_while_rows_are_queued(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(50))
    with EmbeddedRedis(tmp_path / "redis") as server:
        client = Client(server.url)

        def crash(progress: Progress) -> None:
            if progress.rows == 20:
                server.kill()
                server.start()

        assert client.submit([path], batch_id="m", on_progress=crash).queued == 50
        assert TinyWorker(redis.Redis.from_url(server.url)).run() == 50
        assert codes(client.results("m", follow=True)) == {f"r{n}": None for n in range(50)}


def test_duplicate_custom_ids(client: Client, connection: redis.Redis, tmp_path: Path) -> None:
    """In one chunk, in another, in another file: the first wins, both lines are named."""
    one = {"custom_id": "same", "prompt": "x"}
    first = write(tmp_path / "a.jsonl", [one, one, *rows(12), one])
    second = write(tmp_path / "b.jsonl", [one])
    batch = client.submit([first, second], batch_id="m")
    assert (batch.queued, batch.failed) == (13, 3)
    failures = [result.failure for result in client.results("m") if result.failure]
    assert {failure.code for failure in failures} == {"duplicate_custom_id"}
    assert {failure.status_code for failure in failures} == {400}
    assert [failure.message for failure in failures] == [
        f'{first}, line 2: custom_id "same" was first used on line 1, which wins',
        f'{first}, line 15: custom_id "same" was first used on line 1, which wins',
        f'{second}, line 1: custom_id "same" was first used on line 1 of {first}, which wins',
    ]


def test_a_forged_place_of_a_custom_id_is_named_as_it_stands(
    client: Client, connection: redis.Redis, tmp_path: Path
) -> None:
    connection.hset(ids_key("m"), "r1", "9-7")
    client.submit([write(tmp_path / "a.jsonl", rows(2))], batch_id="m")
    failures = [result.failure for result in client.results("m") if result.failure]
    assert [failure.message.partition("first used on ")[2] for failure in failures] == [
        "line 7 of file 10, which wins"
    ]


def test_a_changed_file_is_refused(client: Client, connection: redis.Redis, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(3))
    client.submit([path], batch_id="m")
    write(tmp_path / "a.jsonl", rows(4))
    with pytest.raises(UsageError, match=r"a\.jsonl.*batch m") as caught:
        client.submit([path], batch_id="m")
    assert "new batch id" in str(caught.value)
    assert len(queued(connection)) == 3
    moved = write(tmp_path / "elsewhere.jsonl", rows(3))
    assert client.submit([moved], batch_id="m").already == 3, "the same bytes are the same file"


def test_another_queue_format_or_number_of_files_is_refused(client: Client, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(3))
    client.submit([path], batch_id="m")
    with pytest.raises(UsageError, match="--queue livebatch"):
        client.submit([path], batch_id="m", queue="other")
    with pytest.raises(UsageError, match="--format jsonl"):
        client.submit([path], batch_id="m", format="text")
    with pytest.raises(UsageError, match=r"a\.jsonl"):
        client.submit([path, path], batch_id="m")


def test_a_file_that_grows_while_it_is_read_is_told(client: Client, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", rows(30))

    def grow(progress: Progress) -> None:
        if progress.rows == 10:
            with Path(path).open("a") as stream:
                stream.write('{"prompt":"late"}\n')

    with pytest.raises(UsageError, match="producer cancel m"):
        client.submit([path], batch_id="m", on_progress=grow)
    assert client.status("m").state == "open"


def test_chunks_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enqueue, "CHUNK_BYTES", 1000)

    def request(line: int, size: int, file: int = 0) -> Request:
        return Request(
            custom_id="x", batch_id="m", file=file, line=line, endpoint="completions", prompt="x" * size
        )

    stream = [
        request(1, 600),
        request(2, 600),
        request(3, 10),
        request(4, 5000),
        request(5, 1),
        request(1, 1, 1),
    ]
    lengths = [[row.line for row in chunk] for chunk in enqueue.chunks(stream)]
    assert lengths == [[1, 2], [3, 4], [5], [1]]


def test_progress_follows_the_file(client: Client, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["{bad", *rows(24)])
    seen: list[tuple[int, int, float | None]] = []
    client.submit([path], on_progress=lambda p: seen.append((p.queued, p.failed, p.fraction)))
    assert [counts[:2] for counts in seen] == [(9, 1), (19, 1), (24, 1)]
    assert seen[-1][2] == 1.0


@pytest.mark.parametrize("filled", [0.9, 1.1])
def test_a_full_redis_is_waited_for(
    client: Client, connection: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: float
) -> None:
    """Held back before the limit; and at it, where memory fills up between the look and the transaction."""
    monkeypatch.setattr(enqueue, "HOLD_SECONDS", 0.01)
    path = write(tmp_path / "a.jsonl", rows(30))
    held: list[int] = []
    if filled > 1:
        look = enqueue.memory_used
        monkeypatch.setattr(enqueue, "memory_used", lambda redis: look(redis) if held else 0.0)

    def make_room(progress: Progress) -> None:
        if progress.holding:
            held.append(progress.rows)
            connection.delete("filler")
        elif progress.rows == 10:
            connection.set("filler", b"x" * int(filled * 30_000_000))
            connection.config_set("maxmemory", 30_000_000)

    try:
        batch = client.submit([path], batch_id="m", on_progress=make_room)
    finally:
        connection.config_set("maxmemory", 0)
    assert batch.queued == 30
    assert held[:1] == [10]
    assert queued(connection) == [f"m-0-{n}" for n in range(1, 31)]


@pytest.mark.parametrize(
    ("policy", "what"),
    [("allkeys-lru", "rows"), ("allkeys-random", "rows"), ("volatile-ttl", "results that nobody has read")],
)
def test_redis_that_evicts_is_refused(
    client: Client, connection: redis.Redis, tmp_path: Path, policy: str, what: str
) -> None:
    path = write(tmp_path / "a.jsonl", rows(3))
    connection.config_set("maxmemory-policy", policy)
    try:
        with pytest.raises(StoreError, match=rf"\({policy}\): {what}.*maxmemory-policy noeviction"):
            client.submit([path])
    finally:
        connection.config_set("maxmemory-policy", "noeviction")
    assert not connection.keys("*")


def test_a_redis_without_append_only_file_is_warned_of(client: Client, connection: redis.Redis) -> None:
    assert client.check() == []
    connection.config_set("appendonly", "no")
    try:
        assert client.check() == [server.NOT_DURABLE]
    finally:
        connection.config_set("appendonly", "yes")


def test_a_cluster_is_refused_with_the_reason(tmp_path: Path) -> None:
    with (
        EmbeddedRedis(tmp_path / "redis", extra=("--cluster-enabled", "yes")) as cluster,
        pytest.raises(StoreError, match="Cluster"),
    ):
        Client(cluster.url).check()


def test_passwords_are_never_printed(redis_url: str, connection: redis.Redis) -> None:
    connection.config_set("requirepass", "s3cret")
    try:
        for url in (redis_url.replace("://", "://:wrong-s3cret@"), redis_url):
            with pytest.raises(StoreError, match=r"password|login") as caught:
                Client(url).check()
            assert "s3cret" not in str(caught.value)
        assert Client(redis_url.replace("://", "://:s3cret@")).check() == []
    finally:
        redis.Redis.from_url(redis_url, password="s3cret").config_set("requirepass", "")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:pw@h:1/2?password=pw", "redis://:***@h:1/2"),
        ("redis://me:pw@h", "redis://me:***@h"),
        ("redis://me@h:1", "redis://me@h:1"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock"),
        ("redis://[", "the given Redis URL"),
        ("redis://:p#w@h:1", "the given Redis URL"),
        ("localhost:6379", "localhost:6379"),
        ("me:pw@localhost:6379", "***@localhost:6379"),
        (":p?w@localhost:6379", "the given Redis URL"),
    ],
)
def test_urls_as_they_are_shown(url: str, shown: str) -> None:
    assert server.redact(url) == shown


@pytest.mark.parametrize("url", ["nonsense", "http://x", "redis://127.0.0.1:port"])
def test_malformed_urls_are_usage_errors(url: str) -> None:
    with pytest.raises(UsageError, match="not a Redis URL"):
        Client(url).check()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("localhost:6379", "localhost:6379 is not a Redis URL: did you mean redis://localhost:6379?"),
        (":s3@h:1", "***@h:1 is not a Redis URL: did you mean redis://***@h:1?"),
        ("/run/redis.sock", "/run/redis.sock is not a Redis URL: did you mean unix:///run/redis.sock?"),
    ],
)
def test_a_url_without_its_scheme_is_shown_as_it_was_given(url: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Client(url).check()
    assert str(caught.value) == said


def test_words_of_a_url_do_not_hold_half_a_password() -> None:
    with pytest.raises(UsageError, match="special characters as %XX") as caught:
        Client("redis://:s3cret#pw@h:1").check()
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "x" * 65, "../x", "é"])
def test_batch_ids_that_cannot_be(client: Client, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="batch id"):
        client.submit([write(tmp_path / "a.jsonl", rows(1))], batch_id=name)


def test_queue_names_that_cannot_be(client: Client, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="queue"):
        client.submit([write(tmp_path / "a.jsonl", rows(1))], queue="a b")


def test_store_without_rows(client: Client, connection: redis.Redis, tmp_path: Path) -> None:
    batch = client.submit([write(tmp_path / "a.jsonl", ["", " "])])
    assert client.status(batch.id).is_over
    assert Store(connection).record(batch.id).files[0].sha256 != ""
