"""Rows without an answer: of a batch whose time is over, and those submitted again because they failed."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from tiny_worker import TinyWorker, codes, rows, write
from typer.testing import CliRunner

from producer import completions
from producer.cli import app
from producer.client import Client
from producer.errors import NothingToRetryError, UsageError
from producer.store import batch_key

pytestmark = pytest.mark.redis


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "BLOCK_MS", 20)


def test_queued_rows_end_when_the_batch_expires(client: Client, worker: TinyWorker, tmp_path: Path) -> None:
    client.submit([write(tmp_path / "in.jsonl", rows(4))], batch_id="m", expires_in=0.5)
    worker.complete(worker.claim(1))
    (running,) = worker.claim(1)
    pages = client.pages("m", follow=True)
    found = []
    while len(found) < 3:  # nobody has to wait for the running one: that is its worker's
        found += next(pages).results
    assert [result.failure and result.failure.code for result in found] == [None] + ["batch_expired"] * 2
    worker.complete([running])
    found += [result for page in pages for result in page.results]
    assert [result.custom_id for result in found] == ["r0", "r2", "r3", "r1"]
    assert (client.status("m").completed, client.status("m").failed) == (2, 2)


def test_a_batch_without_an_end_has_none(client: Client, connection: redis.Redis, tmp_path: Path) -> None:
    client.submit([write(tmp_path / "in.jsonl", rows(1))], batch_id="m")
    assert connection.hget(batch_key("m"), "expires") is None
    client.submit([write(tmp_path / "in.jsonl", rows(1))], batch_id="n", expires_in=100)
    assert 90 < float(connection.hget(batch_key("n"), "expires") or 0) - time.time() <= 100


@pytest.fixture
def half_failed(client: Client, worker: TinyWorker, tmp_path: Path) -> str:
    """Batch m is over: r1 and r3 have no answer, line 5 is no JSON."""
    path = write(tmp_path / "in.jsonl", [*rows(4), "{bad"])
    client.submit([path], batch_id="m")
    live = worker.claim()
    worker.complete([live[0], live[2]])
    worker.fail([live[1], live[3]], "timeout")
    return path


@pytest.mark.parametrize("named", [True, False])
def test_rows_that_failed_are_submitted_again(
    client: Client, worker: TinyWorker, half_failed: str, named: bool
) -> None:
    files = [half_failed] if named else []
    batch = client.submit(files, retry_failed="m", batch_id="n")
    assert (batch.queued, batch.already, batch.failed) == (2, 0, 0)
    again = client.submit(files, retry_failed="m", batch_id="n")
    assert (again.queued, again.already, again.failed) == (0, 2, 0)
    assert worker.run() == 2
    assert codes(client.results("n", ordered=True)) == {"r1": None, "r3": None}
    assert client.status("n").is_over


def test_where_every_row_has_its_answer_no_batch_is_made(
    client: Client, worker: TinyWorker, half_failed: str
) -> None:
    client.submit([], retry_failed="m", batch_id="n")
    worker.run()
    with pytest.raises(NothingToRetryError, match="batch n has no rows without an answer: nothing to retry"):
        client.submit([], retry_failed="n", batch_id="o")
    assert {status.id for status in client.list()} == {"m", "n"}


@pytest.mark.parametrize(
    ("bad", "said"),
    [(1, "but its bad line, which is never run again"), (2, "but its 2 bad lines, which are")],
)
def test_bad_lines_are_not_retried_but_corrected(
    client: Client, worker: TinyWorker, tmp_path: Path, bad: int, said: str
) -> None:
    client.submit([write(tmp_path / "in.jsonl", [*rows(2), *["{bad"] * bad])], batch_id="m")
    worker.run()
    with pytest.raises(NothingToRetryError, match=f"{said}.* correct them in a file of their own"):
        client.submit([], retry_failed="m")


def test_a_row_whose_custom_id_was_taken_is_not_retried(
    client: Client, worker: TinyWorker, tmp_path: Path
) -> None:
    """Its answer would be taken for that of the row that has the name."""
    lines = [*rows(2), {"custom_id": "r0", "prompt": "another"}]
    client.submit([write(tmp_path / "in.jsonl", lines)], batch_id="m")
    worker.fail(worker.claim(1))
    worker.run()
    assert client.submit([], retry_failed="m", batch_id="n").queued == 1
    assert [request.line for request in worker.claim()] == [1]


def test_the_command_with_nothing_to_retry_exits_0(
    redis_url: str, client: Client, worker: TinyWorker, tmp_path: Path
) -> None:
    client.submit([write(tmp_path / "in.jsonl", rows(2))], batch_id="m")
    worker.run()
    out = tmp_path / "out.jsonl"
    for flags in ([], ["--wait", "-o", str(out)], ["--json"]):
        done = CliRunner().invoke(app, ["submit", "--retry-failed", "m", "--redis", redis_url, *flags])
        assert done.exit_code == 0, done.output
        assert done.stderr == "batch m has no rows without an answer: nothing to retry, nothing was queued\n"
        nothing = {"id": None, "queue": "livebatch", "queued": 0, "already": 0, "failed": 0}
        assert done.stdout == (json.dumps(nothing) + "\n" if flags == ["--json"] else "")
    assert not out.exists()
    assert len(client.list()) == 1


def test_a_retried_batch_is_read_as_it_was(client: Client, worker: TinyWorker, tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text('one\n{"prompt": "two"}\n')
    client.submit([str(path)], batch_id="m", format="text")
    worker.fail(worker.claim())
    assert client.submit([], retry_failed="m").queued == 2
    assert [request.prompt for request in worker.claim()] == ["one", '{"prompt": "two"}']


def test_standard_input_must_be_given_again(
    client: Client, worker: TinyWorker, stdin: Callable[[bytes], None]
) -> None:
    stdin(b"one\ntwo\n")
    client.submit(["-"], batch_id="m", format="text")
    worker.fail(worker.claim())
    again = r"give the same input again \(producer submit - --format text --retry-failed m < FILE\)"
    with pytest.raises(UsageError, match=f"batch m was read from standard input: {again}"):
        client.submit([], retry_failed="m")
    stdin(b"another\n")
    with pytest.raises(
        UsageError, match=f"standard input is not the input that batch m was made of: {again}"
    ):
        client.submit(["-"], retry_failed="m", format="text")
    stdin(b"one\ntwo\n")
    assert client.submit(["-"], retry_failed="m", format="text").queued == 2


def test_a_file_that_is_gone_must_be_given_again(client: Client, half_failed: str) -> None:
    copy = Path(half_failed).rename(f"{half_failed}.moved")
    again = r"give the same input again \(producer submit FILE --retry-failed m\)"
    with pytest.raises(UsageError, match=f"made of .*in.jsonl, which is not there: {again}"):
        client.submit([], retry_failed="m")
    assert client.submit([str(copy)], retry_failed="m").queued == 2


def test_what_cannot_be_tried_again(client: Client, worker: TinyWorker, half_failed: str) -> None:
    client.submit([half_failed], retry_failed="m", batch_id="n")
    with pytest.raises(UsageError, match="not over yet"):
        client.submit([half_failed], retry_failed="n")
    worker.run()
    with pytest.raises(UsageError, match="n was submitted with --retry-failed m"):
        client.submit([half_failed], batch_id="n")
    with pytest.raises(UsageError, match="m was submitted without --retry-failed"):
        client.submit([half_failed], batch_id="m", retry_failed="m")
    with pytest.raises(UsageError, match="there is no batch x"):
        client.submit([half_failed], retry_failed="x")
    write(Path(half_failed), rows(4))
    with pytest.raises(UsageError, match=r"is not the .* that batch m was made of"):
        client.submit([], retry_failed="m")


def test_the_command_names_both(
    redis_url: str, client: Client, half_failed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["--redis", redis_url, "--batch-id", "n"]
    done = CliRunner().invoke(app, ["submit", "--retry-failed", "m", "--expires-in", "0.5", *flags])
    assert done.exit_code == 0, done.output
    assert client.status("n").rows == 2
    done = CliRunner().invoke(app, ["submit", *flags])
    assert isinstance(done.exception, UsageError)
    assert "name the files to submit" in str(done.exception)


NAMELESS = ['{"prompt": "x"}', '{"prompt": "y"}']


def test_rows_without_ids_of_files_whose_names_look_the_same(
    client: Client, worker: TinyWorker, tmp_path: Path
) -> None:
    files = [str(tmp_path / os.fsdecode(name)) for name in (b"n\xff.jsonl", b"n\xfe.jsonl")]
    for file in files:
        write(Path(file), NAMELESS)
    assert client.validate(files).bad == 0
    batch = client.submit(files, batch_id="m")
    assert (batch.queued, batch.failed) == (4, 0)
    again = client.submit(files, batch_id="m")
    assert (again.queued, again.already, again.failed) == (0, 4, 0)
    assert worker.run() == 4


def test_rows_keep_the_ids_they_got_though_their_files_are_renamed(
    client: Client, worker: TinyWorker, tmp_path: Path
) -> None:
    """Those of a second submission, of the failed ones, and of those that failed again."""
    files = [write(tmp_path / name, NAMELESS) for name in ("a.jsonl", "b.jsonl")]
    client.submit(files, batch_id="m")
    named = [f"{file}:line-{line}" for file in files for line in (1, 2)]
    moved = [str(Path(file).rename(f"{file}.moved")) for file in files]
    again = client.submit(moved, batch_id="m")
    assert (again.queued, again.already, again.failed) == (0, 4, 0)
    worker.fail(worker.claim())
    for before, batch in (("m", "n"), ("n", "o")):
        client.submit(moved, retry_failed=before, batch_id=batch)
        live = worker.claim()
        assert [request.custom_id for request in live] == named
        worker.fail(live)


def test_a_batch_keeps_its_bounds_and_says_so(redis_url: str, client: Client, tmp_path: Path) -> None:
    path, said = write(tmp_path / "in.jsonl", rows(1)), list[str]()
    keep = Client(redis_url, keep_seconds=86_400)
    keep.submit([path], batch_id="m", expires_in=5_000, on_warning=said.append)
    client.submit([path], batch_id="n", on_warning=said.append)
    assert said == []
    for batch in ("m", "n"):
        client.submit([path], batch_id=batch, on_warning=said.append)
    assert said == [], "nothing is asked"
    keep.submit([path], batch_id="m", expires_in=9_000, on_warning=said.append)
    start, end = "was there already and keeps", "another needs a new batch id"
    assert said == [f"batch m {start} its end, in 1.4 hours (--expires-in): {end}"]
    keep.submit([path], batch_id="n", expires_in=9_000, on_warning=said.append)
    assert said[1:] == [
        f"batch n {start} having no end (--expires-in): {end}",
        f"batch n {start} its results for 7 days (--keep-days): {end}",
    ]


def test_the_command_says_so_too(redis_url: str, client: Client, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", rows(1))
    client.submit([path], batch_id="m", expires_in=0)
    flags = ["--redis", redis_url, "--batch-id", "m", "--expires-in", "2", "--keep-days", "30"]
    done = CliRunner().invoke(app, ["submit", path, *flags])
    assert done.exit_code == 0, done.output
    assert "warning: batch m was there already and keeps its end, 0.0 hours ago (--exp" in done.stderr
    assert "warning: batch m was there already and keeps its results for 7 days (--keep-days):" in done.stderr
