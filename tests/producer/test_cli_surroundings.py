"""The `producer` command where its surroundings are broken: streams, disks, cursors and names."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from tiny_worker import TinyWorker, rows, write

from producer import cli
from producer.client import Client
from producer.errors import UsageError
from producer.output import ResultFile, Style
from producer.wire import Failure, Result

RESULT = Result(custom_id="a", job_id="b-0-1", created=1, failure=Failure.of("timeout", "late"))


@pytest.fixture
def batch(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> TinyWorker:
    """A finished batch "b" of 50 rows, in a folder of its own."""
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.setenv("PYTHONPATH", str(Path(cli.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    Client().submit([write(Path("in.jsonl"), rows(50))], batch_id="b")
    worker = TinyWorker(connection)
    worker.run()
    return worker


def shell(line: str, first: str = "true") -> subprocess.CompletedProcess[bytes]:
    """``producer <line>`` in a shell, for its redirections; never a traceback."""
    command = ["bash", "-c", f"{first}\nexec {sys.executable} -m producer.cli {line}"]
    run = subprocess.run(command, capture_output=True, check=False, timeout=30)
    assert b"Traceback" not in run.stderr, run.stderr.decode()
    return run


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The same in this process."""
    monkeypatch.setattr(sys, "argv", ["producer", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    return int(done.value.code or 0)


@pytest.mark.redis
@pytest.mark.usefixtures("batch")
def test_closed_streams_cost_no_row_and_mix_nothing() -> None:
    assert shell("results b 2>&-").stdout.count(b"\n") == 50
    assert shell("results b >&-").returncode == 0
    assert shell("submit - <&-").returncode == 0
    unknown = shell("results nosuch 2>&-")
    assert (unknown.returncode, unknown.stdout) == (2, b"")


@pytest.mark.redis
@pytest.mark.usefixtures("batch")
def test_what_can_be_read_only_once_is_read_only_once() -> None:
    """Its digest is known before its first row is queued: it must be copied, as standard input is."""
    piped = shell("submit <(cat in.jsonl) --batch-id piped")
    assert b"queued 50 rows" in piped.stderr, piped.stderr.decode()
    os.mkfifo("fifo")
    named = shell("submit fifo --batch-id named", "cat in.jsonl >fifo &")
    assert b"queued 50 rows" in named.stderr, named.stderr.decode()
    Path("fifo").unlink()


@pytest.mark.redis
def test_rows_of_a_pipe_are_named_after_it(batch: TinyWorker) -> None:
    """Among several files, and not after the copy, whose name is another one each time."""
    os.mkfifo("fifo")
    write(Path("more.jsonl"), ['{"prompt": "x"}'])
    run = shell("submit fifo more.jsonl", """echo '{"prompt": "y"}' >fifo &""")
    assert run.returncode == 0, run.stderr.decode()
    assert [row.custom_id for row in batch.claim()] == ["fifo:line-1", "more.jsonl:line-1"]


@pytest.mark.redis
@pytest.mark.usefixtures("batch")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("command", ["results b", "status", "status --json", "list", "--help", "--version"])
def test_stdout_full(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of it only leaves at the end."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    run = shell(f"{command} >/dev/full")
    assert run.returncode == 2
    assert run.stderr == b"producer: standard output: No space left on device\n"


@pytest.mark.redis
@pytest.mark.usefixtures("batch")
@pytest.mark.parametrize("command", ["results b", "status", "--help"])
def test_a_reader_that_has_seen_enough(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of `head`: nothing is said, whenever it is noticed."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    run = shell(f"{command} >&4", "mkfifo fifo; (exec 3<fifo) & exec 4>fifo; wait")
    assert (run.returncode, run.stderr) == (1, b"")


@pytest.mark.redis
@pytest.mark.usefixtures("batch")
def test_a_full_disk_is_said_in_one_line_and_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    run = shell("results b -o out.jsonl", "ulimit -f 4")
    assert run.returncode == 2
    said = r"^producer: out.jsonl cannot be written: File too large. Nothing is lost"
    assert re.search(said, run.stderr.decode(), re.MULTILINE)
    assert main(monkeypatch, "results", "b", "-o", "out.jsonl") == 0
    ids = [json.loads(line)["custom_id"] for line in Path("out.jsonl").read_text().splitlines()]
    assert sorted(ids) == sorted(f"r{index}" for index in range(50))


def test_results_go_into_files_only() -> None:
    with pytest.raises(UsageError, match="/dev/null is no file"):
        ResultFile(Path(os.devnull), "b", Style())
    assert not Path(f"{os.devnull}.cursor").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"bytes": "x"},
        {"bytes": -5},
        {"bytes": 10**30},
        {"error_bytes": None},
        {"cursor": "zzz"},
        {"cursor": "1-x"},
        {"cursor": 7},
        {"cursor": "99999999999999999999-1"},
        {"cursor": f"1-{2**64}"},
        {"cursor": None},
    ],
)
def test_a_damaged_cursor_is_refused_and_the_results_stay(change: dict[str, object], tmp_path: Path) -> None:
    out, cursor = tmp_path / "out.jsonl", tmp_path / "out.jsonl.cursor"
    with ResultFile(out, "b", Style()) as sink:
        sink.write([RESULT], "17-0")
    written, saved = out.read_bytes(), json.loads(cursor.read_text())
    with ResultFile(out, "b", Style()) as sink:
        assert sink.cursor == "17-0"
    cursor.write_text(json.dumps({**saved, **change}))
    with pytest.raises(UsageError, match=r"no readable .* beside it"):
        ResultFile(out, "b", Style())
    assert out.read_bytes() == written


@pytest.mark.redis
def test_a_batch_that_redis_lost_does_not_come_twice_into_one_file(
    batch: TinyWorker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "results", "b", "-o", "out.jsonl") == 0
    written = Path("out.jsonl").read_bytes()
    assert main(monkeypatch, "results", "b", "-o", "out.jsonl") == 0
    batch.connection.flushall()
    Client().submit(["in.jsonl"], batch_id="b")
    batch.run()
    assert main(monkeypatch, "results", "b", "-o", "out.jsonl") == 2
    assert "out.jsonl holds results of an earlier batch b" in capsys.readouterr().err
    assert Path("out.jsonl").read_bytes() == written


@pytest.mark.redis
def test_a_file_whose_name_is_not_unicode(batch: TinyWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    name = os.fsdecode(b"\xff.jsonl")
    Path(name).write_bytes(Path("in.jsonl").read_bytes())
    assert main(monkeypatch, "submit", name, "--batch-id", "c") == 0
    assert batch.run() == 50


@pytest.mark.redis
@pytest.mark.usefixtures("batch")
@pytest.mark.parametrize("command", ["status", "results", "cancel"])
def test_a_batch_id_that_is_not_unicode(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "say", lambda text: print(ascii(text)))
    assert main(monkeypatch, command, os.fsdecode(b"\xff")) == 2
    assert "there is no batch" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["inf", "nan", "1e15", "1e308", "87601"])
@pytest.mark.parametrize(("flag", "most"), [("--keep-days", "3,650 days"), ("--expires-in", "87,600 hours")])
def test_no_span_is_longer_than_redis_can_count(
    flag: str, most: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(monkeypatch, "submit", "in.jsonl", flag, value) == 2
    said = f"producer: {flag} wants at least 0 and at most {most}, not {float(value):g}\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, 1e300])
def test_no_span_of_a_client_is(value: float) -> None:
    with pytest.raises(UsageError, match="expires_in wants at least 0 and at most 315,360,000 seconds"):
        Client("redis://127.0.0.1:1").submit(["in.jsonl"], expires_in=value)
    with pytest.raises(UsageError, match="keep_seconds wants at least 1 and at most 315,360,000 seconds"):
        Client(keep_seconds=value)  # type: ignore[arg-type]
