"""What a person who waits for a batch is told: its id, what went wrong, where the rows are."""

from __future__ import annotations

import errno
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from tiny_worker import TinyWorker, rows, write

from producer import again, cli, completions, following, patience
from producer.batch import WorkerReport
from producer.client import Client
from producer.embedded import EmbeddedRedis

pytestmark = pytest.mark.redis

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def worker(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> TinyWorker:
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(completions, "BLOCK_MS", 20)
    return TinyWorker(connection)


@pytest.fixture
def run(worker: TinyWorker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`producer ...` in this process: its exit code, and what it said on stderr."""

    def run(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["producer", *arguments])
        with pytest.raises(SystemExit) as done:
            cli.main()
        said = capsys.readouterr()
        assert said.out == "" or "-o" not in arguments, "standard output is the data's"
        return int(done.value.code or 0), said.err

    return run


@pytest.fixture
def work(worker: TinyWorker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the rows ended whenever somebody who follows shows their progress."""

    def work(fail: int = 0) -> None:
        def end(*_: object) -> None:
            live = worker.claim()
            worker.fail(live[:fail], "timeout")
            worker.complete(live[fail:])

        monkeypatch.setattr("producer.progress.Lines.running", end)

    return work


def test_submit_wait_says_the_id_and_sums_up(run: Run, work: Callable[..., None]) -> None:
    write(Path("in.jsonl"), [*rows(5), '{"prompt": "x", "top_p": 7}', '{"prompt": "x", "top_p": 8}'])
    work(fail=1)
    code, said = run("submit", "in.jsonl", "--batch-id", "m", "--wait", "-o", "out.jsonl")
    assert code == 1
    first, *_ = [line for line in said.splitlines() if not line.startswith("queueing")]
    assert first == "batch m: queued 5 rows on livebatch, 2 bad (their results say why)"
    assert said.endswith("4 completed, 3 failed -> out.jsonl\nfailed: 2 invalid_value, 1 timeout\n")


def test_one_bad_line_has_one_result(run: Run) -> None:
    write(Path("in.jsonl"), [*rows(1), "{bad"])
    assert "1 bad (its result says why)" in run("submit", "in.jsonl")[1]


def test_results_sum_up_what_completed(run: Run, work: Callable[..., None]) -> None:
    write(Path("in.jsonl"), rows(5))
    run("submit", "in.jsonl", "--batch-id", "m")
    work()
    code, said = run("results", "m", "--follow", "--ordered")
    assert (code, said.splitlines()[-1]) == (0, "5 completed, 0 failed")


def test_results_that_go_on_name_the_failures_of_this_run(run: Run, worker: TinyWorker) -> None:
    flags = ["-o", "out.jsonl", "--errors-file", "bad.jsonl"]
    write(Path("in.jsonl"), rows(5))
    run("submit", "in.jsonl", "--batch-id", "m")
    live = worker.claim()
    worker.fail(live[:1], "invalid_logits")
    code, said = run("results", "m", *flags)
    assert code == 1
    assert "0 completed, 1 failed -> out.jsonl, failed rows -> bad.jsonl\nfailed: 1 invalid_logits\n" in said
    assert said.endswith("4 rows have not ended yet: add --follow to wait for them\n")
    worker.fail(live[1:2], "timeout")
    worker.complete(live[2:])
    code, said = run("results", "m", *flags)
    assert said.endswith(
        "3 completed, 2 failed -> out.jsonl, failed rows -> bad.jsonl\nfailed in this run: 1 timeout\n"
    )


def test_an_unfinished_batch_without_failures_exits_0(run: Run, worker: TinyWorker) -> None:
    write(Path("in.jsonl"), rows(5))
    run("submit", "in.jsonl", "--batch-id", "m")
    worker.complete(worker.claim(2))
    assert run("results", "m", "-o", "out.jsonl")[0] == 0


def test_a_cancelled_batch_exits_1(run: Run) -> None:
    write(Path("in.jsonl"), rows(5))
    run("submit", "in.jsonl", "--batch-id", "m")
    run("cancel", "m")
    code, said = run("results", "m", "-o", "out.jsonl")
    assert code == 1
    assert said.endswith("0 completed, 0 failed, 5 cancelled -> out.jsonl\nfailed: 5 batch_cancelled\n")


def test_results_that_are_gone_exit_1(run: Run, worker: TinyWorker) -> None:
    """The rows completed; who reads them after their release has failures in the file all the same."""
    write(Path("in.jsonl"), rows(3))
    run("submit", "in.jsonl", "--batch-id", "m")
    worker.run()
    assert run("results", "m", "-o", "out.jsonl", "--release")[0] == 0
    code, said = run("results", "m", "-o", "again.jsonl")
    assert code == 1
    assert said.endswith("3 completed, 0 failed -> again.jsonl\nfailed in this run: 3 batch_expired\n")


def test_rare_failures_are_counted_together(run: Run, worker: TinyWorker) -> None:
    write(Path("in.jsonl"), rows(8))
    run("submit", "in.jsonl", "--batch-id", "m")
    live = worker.claim()
    for row, code in zip(live, "aabcdefg", strict=True):
        worker.fail([row], code)
    said = run("results", "m", "-o", "out.jsonl")[1]
    assert said.splitlines()[-1] == "failed: 2 a, 1 b, 1 c, 1 d, 1 e, 2 others"


@pytest.mark.parametrize(
    ("queues", "done", "said"),
    [
        ("livebatch", 0, 0),
        (None, 0, 1),
        ("other", 0, 1),
        (None, 1, 1),
    ],
)
def test_nobody_who_serves_the_queue_is_told_of_once(  # noqa: PLR0917 - pytest passes by name
    run: Run,
    worker: TinyWorker,
    work: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    queues: str | None,
    done: int,
    said: int,
) -> None:
    looks: list[Client] = []

    def look(client: Client) -> list[WorkerReport]:
        looks.append(client)
        if said or len(looks) == 3:  # who saw a worker looks again: it may end
            work()  # from here on the batch goes on
        return [WorkerReport("w", {"queues": queues})] if queues else []

    write(Path("in.jsonl"), rows(5))
    run("submit", "in.jsonl", "--batch-id", "m")
    worker.complete(worker.claim(done))
    monkeypatch.setattr(following, "NO_WORKER_SECONDS", -1.0)
    monkeypatch.setattr(Client, "workers", look)
    _, told = run("results", "m", "--follow", "-o", "out.jsonl")
    start = 'no worker serves queue "livebatch": start one with: worker run --model FOLDER (one that still'
    assert told.count("no worker") == told.count(start) == said


def test_the_worker_that_is_missing_serves_this_queue_of_this_redis(
    run: Run, redis_url: str, work: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(_: Client) -> list[WorkerReport]:
        work()
        return []

    monkeypatch.setattr(following, "NO_WORKER_SECONDS", -1.0)
    monkeypatch.setattr(Client, "workers", look)
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    write(Path("in.jsonl"), rows(2))
    queue = ["--queue", "livebatch", "--batch-id", "m"]
    _, said = run("submit", "in.jsonl", "--wait", "-o", "out.jsonl", *queue, "--redis", redis_url)
    assert f": worker run --model FOLDER --redis {redis_url} (" in said
    assert again.worker("urgent", "redis://127.0.0.1:1") == "worker run --model FOLDER --queue urgent"


def test_nobody_is_looked_for_while_rows_end(
    run: Run, worker: TinyWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    write(Path("in.jsonl"), rows(5))
    run("submit", "in.jsonl", "--batch-id", "m")
    client, now = Client(), [0.0]
    lookout = following.Lookout(client, lambda: now[0])
    for _ in range(3):
        now[0] += 4.0
        worker.complete(worker.claim(1))
        lookout.see(client.status("m"))
    assert capsys.readouterr().err == ""
    for _ in range(3):
        now[0] += 4.0
        lookout.see(client.status("m"))
    assert capsys.readouterr().err.count("no worker") == 1


# Redis that goes away.


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch, worker: TinyWorker) -> Iterator[EmbeddedRedis]:
    """Batch m of 5 rows lies in it; it dies when somebody who follows has seen the first page."""
    with EmbeddedRedis() as server:
        monkeypatch.setenv("REDIS_URL", server.url)
        Client().submit([write(Path("in.jsonl"), rows(5))], batch_id="m")
        monkeypatch.setattr("producer.progress.Lines.running", lambda *_: server.kill())
        yield server


def test_an_outage_is_told_of_once_and_its_end_too(
    run: Run, dying: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def hear(text: str) -> None:
        told.append(text)
        if len(told) == 1:
            monkeypatch.setattr("producer.progress.Lines.running", lambda *_: None)
            dying.start()
            with redis.Redis.from_url(dying.url) as connection:
                TinyWorker(connection).run()

    monkeypatch.setattr(following, "say", hear)
    code, said = run("results", "m", "--follow", "-o", "out.jsonl")
    assert told == ["Redis cannot be reached any more: trying again for half a minute", "Redis is back"]
    assert (code, said) == (0, "5 completed, 0 failed -> out.jsonl\n")


def test_who_gives_up_says_how_to_come_back(
    run: Run, dying: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "SILENCE_SECONDS", 0.5)
    code, said = run("results", "m", "--follow", "-o", "out.jsonl", "--flat")
    assert code == 3
    away, last = said.splitlines()
    assert away.startswith("Redis cannot be reached any more")
    assert last.startswith(f"producer: cannot reach Redis at {dying.url}: ")
    assert last.endswith("; batch m goes on; come back with: producer results m --follow -o out.jsonl --flat")


# A disk that is full.


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Undone: there is room again."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("producer.output.ResultFile._write", refuse)
        yield disk


@pytest.mark.parametrize(
    ("line", "goes_on"),
    [
        ('{"prompt": "x"}', r"batch \S+ goes on; come back with: producer (results .*)"),
        ("{bad", r"queue the rest with: producer (submit in.jsonl --wait .*)"),  # written while it is queued
    ],
)
def test_a_full_disk_is_told_with_the_way_back(
    run: Run, work: Callable[..., None], full: pytest.MonkeyPatch, line: str, goes_on: str
) -> None:
    """Nobody chose a batch id here."""
    write(Path("in.jsonl"), [*rows(4), line])
    work()
    code, said = run("submit", "in.jsonl", "--wait", "-o", "out.jsonl")
    assert code == 2
    last = said.splitlines()[-1]
    (command,) = re.findall(goes_on, last)
    head = "producer: out.jsonl cannot be written: No space left on device. Nothing is lost: make room; "
    assert last.startswith(head)
    full.undo()
    assert run(*shlex.split(command))[0] == (line == "{bad")
    assert len(Path("out.jsonl").read_text().splitlines()) == 5
    assert len(Client().list()) == 1
