"""The `producer` command: what it prints where, which files it writes, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from tiny_worker import TinyWorker, rows, write

from producer import cli, completions, enqueue, patience
from producer.client import Client
from producer.embedded import EmbeddedRedis
from producer.store import Store

pytestmark = pytest.mark.redis

Run = Callable[..., int]


@pytest.fixture(autouse=True)
def environment(redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REDIS_URL", redis_url)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(completions, "BLOCK_MS", 20)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """`producer ...` in this process; its exit code."""

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["producer", *arguments])
        with pytest.raises(SystemExit) as done:
            cli.main()
        return int(done.value.code or 0)

    return run


@pytest.fixture
def background(worker: TinyWorker) -> Callable[[], threading.Thread]:
    """A worker that completes rows until the one called "last" has ended."""

    def work() -> None:
        while not any(row.custom_id == "last" for row in claim_and_complete(worker)):
            worker.connection.blpop("never", 0.01)

    def start() -> threading.Thread:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    return start


def claim_and_complete(worker: TinyWorker) -> list[Any]:
    live = worker.claim()
    worker.complete(live)
    return live


def spawn(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "producer.cli", *arguments]
    root = str(Path(cli.__file__).parents[1])
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
    )


def result_ids(path: str | Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in Path(path).read_text().splitlines()]


LAST = {"custom_id": "last", "prompt": "x"}


# submit


def test_submit_prints_the_batch_id_and_how_to_go_on(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("in.jsonl"), rows(3))
    assert run("submit", "in.jsonl") == 0
    said = capsys.readouterr()
    batch = said.out.strip()
    assert re.fullmatch(r"\d{8}-\d{6}-[0-9a-f]{8}", batch)
    assert f"producer results {batch} --follow" in said.err
    assert "queued 3 rows" in said.err


def test_submit_with_bad_lines_exits_1(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("in.jsonl"), [*rows(3), "{bad"])
    assert run("submit", "in.jsonl", "--json", "--batch-id", "m") == 1
    assert json.loads(capsys.readouterr().out) == {
        "id": "m",
        "queue": "livebatch",
        "queued": 3,
        "already": 0,
        "failed": 1,
    }


def test_submit_strict_names_every_bad_line(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("in.jsonl"), [*rows(3), "{bad", "[]"])
    assert run("submit", "in.jsonl", "--strict") == 1
    said = capsys.readouterr()
    assert "line 4:" in said.err
    assert "line 5:" in said.err
    assert "nothing was queued: 2 of 5 rows are bad" in said.err
    assert Client().list() == []


def test_submit_again_counts_what_was_there(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    write(Path("in.jsonl"), rows(3))
    run("submit", "in.jsonl", "--batch-id", "m")
    capsys.readouterr()
    assert run("submit", "in.jsonl", "--batch-id", "m") == 0
    assert "queued 0 rows on livebatch, 3 were there already" in capsys.readouterr().err


def test_submit_again_says_again_which_lines_are_bad(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """A line that is no JSON, and one whose custom_id is another's."""
    write(Path("in.jsonl"), [*rows(3), "{bad", *rows(1)])
    assert run("submit", "in.jsonl", "--batch-id", "m") == 1
    assert "queued 3 rows on livebatch, 2 bad" in capsys.readouterr().err
    assert run("submit", "in.jsonl", "--batch-id", "m") == 1
    assert "queued 0 rows on livebatch, 3 were there already, 2 bad" in capsys.readouterr().err
    assert Client().status("m").failed == 2


def test_submit_wait_writes_results(
    run: Run, background: Callable[[], threading.Thread], capsys: pytest.CaptureFixture[str]
) -> None:
    write(Path("in.jsonl"), [*rows(3), LAST])
    thread = background()
    assert run("submit", "in.jsonl", "--wait", "-o", "out.jsonl") == 0
    thread.join()
    assert result_ids("out.jsonl") == ["r0", "r1", "r2", "last"]
    said = capsys.readouterr()
    assert said.out == ""
    assert "4 of 4 rows" in said.err


def test_submit_wait_prints_results_where_no_file_is_named(
    run: Run, background: Callable[[], threading.Thread], capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    write(Path("in.jsonl"), ["{bad", LAST])
    thread = background()
    assert run("submit", "in.jsonl", "--wait", "--flat") == 1
    thread.join()
    lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [line["custom_id"] for line in lines] == ["line-1", "last"]
    assert lines[1] == {
        "custom_id": "last",
        "text": "echo last",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }


def test_submit_wait_json_is_the_final_status(
    run: Run, background: Callable[[], threading.Thread], capsys: pytest.CaptureFixture[str]
) -> None:
    write(Path("in.jsonl"), [*rows(3), LAST])
    thread = background()
    assert run("submit", "in.jsonl", "--wait", "-o", "out.jsonl", "--json", "--batch-id", "m") == 0
    thread.join()
    status = json.loads(capsys.readouterr().out)
    assert (status["id"], status["completed"], status["waiting"]) == ("m", 4, 0)


def test_submit_from_standard_input(worker: TinyWorker) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "producer.cli", "submit", "-", "--format", "text", "--batch-id", "n"],
        input=b"Once upon\n\n{x}\n",
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
    )
    assert process.stdout == b"n\n"
    assert [request.prompt for request in worker.claim()] == ["Once upon", "{x}"]


def test_an_append_only_file_that_is_missing_is_warned_of(
    run: Run, connection: redis.Redis, capsys: pytest.CaptureFixture[str]
) -> None:
    write(Path("in.jsonl"), rows(1))
    connection.config_set("appendonly", "no")
    try:
        assert run("submit", "in.jsonl") == 0
    finally:
        connection.config_set("appendonly", "yes")
    assert "warning: this Redis keeps no append-only file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-o", "out.jsonl"], "--wait"),
        (["--errors-file", "e.jsonl"], "--wait"),
        (["--wait", "--errors-file", "e.jsonl"], "-o"),
        (["--wait", "--json"], "-o"),
        (["--batch-id", "a b"], "batch id"),
        (["--batch-id", ""], "batch id"),
        (["--queue", "a b"], "queue"),
        (["--wait", "-o", "none/out.jsonl"], "none/out.jsonl cannot be written: folder none does not exist"),
        (["--wait", "-o", "."], "cannot be written"),
        (["--wait", "-o", "out.jsonl", "--errors-file", "none/e.jsonl"], "none/e.jsonl cannot be written"),
        (["--nonsense"], "--nonsense"),
        (["--format", "xml"], "--format"),
        (["--keep-days", "0"], "--keep-days"),
        (["--release"], "--release needs -o OUT"),
        (["--wait", "--release"], "--release needs -o OUT"),
        (["--wait", "-o", "out.jsonl", "--ordered", "--release"], "--release with --ordered makes no room"),
        (["--max-queued-bytes", "lots"], "--max-queued-bytes wants a size such as 512M"),
        (["missing.jsonl"], "missing.jsonl: no such file"),
    ],
)
def test_what_cannot_be_done_exits_2_and_queues_nothing(
    run: Run, connection: redis.Redis, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    write(Path("in.jsonl"), rows(1))
    before = sorted(path.name for path in Path().iterdir())
    assert run("submit", "in.jsonl", *flags) == 2
    assert said in capsys.readouterr().err
    assert not connection.keys("*")
    assert sorted(path.name for path in Path().iterdir()) == before, "no empty output is left behind"


@pytest.mark.parametrize(
    "command", ["status", "list", "results m", "results m -o out.jsonl", "cancel m", "submit in.jsonl"]
)
def test_redis_away_exits_3(run: Run, capsys: pytest.CaptureFixture[str], command: str) -> None:
    write(Path("in.jsonl"), rows(1))
    assert run(*command.split(), "--redis", "redis://:secret@127.0.0.1:1") == 3
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "redis://:***@127.0.0.1:1" in said
    assert "redis-server --appendonly yes, or python -m producer.embedded --directory out/redis" in said
    assert "secret" not in said
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize("command", ["status nope", "results nope -o out.jsonl", "cancel nope"])
def test_an_unknown_batch_exits_2(run: Run, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run(*command.split()) == 2
    assert "no batch nope" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()


# Interrupted.


def interrupt(process: subprocess.Popen[str], number: int, ready: Callable[[], bool]) -> str:
    """A signal once ``ready``; what it says on stderr. Another process gives us nothing else to wait on."""
    while not ready():
        assert process.poll() is None, process.communicate()
        threading.Event().wait(0.01)
    process.send_signal(number)
    return process.communicate(timeout=30)[1]


@pytest.fixture
def interrupted(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """`producer ...` with Ctrl-C somewhere, by default once the first rows are queued; what it says."""

    def interrupted(*arguments: str, place: str = "producer.progress.Lines.queueing") -> str:
        with monkeypatch.context() as patch:
            patch.setattr(place, ctrl_c)
            assert run(*arguments) == 4
        return capsys.readouterr().err

    monkeypatch.setattr(enqueue, "CHUNK_ROWS", 2)
    return interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_waiting_leaves_the_batch_running(run: Run, worker: TinyWorker, number: int) -> None:
    write(Path("in.jsonl"), rows(3))
    process = spawn("submit", "in.jsonl", "--wait", "-o", "out.jsonl", "--batch-id", "m")
    said = interrupt(
        process, number, lambda: "0 of 3 rows" in (process.stderr.readline() if process.stderr else "")
    )
    assert process.returncode == 4
    assert "Traceback" not in said
    assert "batch m goes on; come back with: producer results m --follow -o out.jsonl" in said
    assert worker.run() == 3
    assert run("results", "m", "--follow", "-o", "out.jsonl") == 0
    assert result_ids("out.jsonl") == ["r0", "r1", "r2"]


def test_ctrl_c_while_queueing_says_how_to_queue_the_rest(run: Run, interrupted: Callable[..., str]) -> None:
    write(Path("a file.jsonl"), rows(5))
    said = interrupted("submit", "a file.jsonl", "--batch-id", "m", "--queue", "q")
    assert "producer submit 'a file.jsonl' --batch-id m --queue q --format jsonl" in said
    assert run("submit", "a file.jsonl", "--batch-id", "m", "--queue", "q", "--format", "jsonl") == 0
    assert Client().status("m").rows == 5


def test_who_waits_for_the_rest_waits_again(run: Run, interrupted: Callable[..., str]) -> None:
    write(Path("in.jsonl"), rows(5))
    said = interrupted("submit", "in.jsonl", "--wait", "-o", "out.jsonl", "--flat", "--batch-id", "m")
    assert "producer submit in.jsonl --wait -o out.jsonl --flat --batch-id m --queue" in said


def test_the_way_back_leads_to_the_redis_that_was_given(
    run: Run,
    interrupted: Callable[..., str],
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    host = redis_url.removeprefix("redis://")
    shown = f"--redis 'redis://default:***@{host}?***'"
    flags = ["--batch-id", "m", "--redis", f"redis://default:s3cret@{host}?socket_timeout=30"]
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    write(Path("in.jsonl"), rows(1))
    said = interrupted("submit", "in.jsonl", *flags)
    assert said.endswith(f"--batch-id m --queue livebatch --format jsonl {shown}\n")
    assert run("submit", "in.jsonl", *flags) == 0
    assert f"Collect with: producer results m --follow {shown}\n" in capsys.readouterr().err


def test_rows_queued_later_are_kept_as_long_as_those_before(
    run: Run, interrupted: Callable[..., str], connection: redis.Redis
) -> None:
    write(Path("in.jsonl"), rows(3))
    said = interrupted("submit", "in.jsonl", "--batch-id", "m", "--keep-days", "30")
    assert said.endswith(" --batch-id m --queue livebatch --format jsonl --keep-days 30\n")
    assert run("submit", "in.jsonl", "--batch-id", "m") == 0
    kept = {connection.hget(f"rq:job:m-0-{line}", "result_ttl") for line in (1, 2, 3)}
    assert kept == {b"2592000"}, "the batch says it, not who submits it again"


def test_redis_that_dies_while_rows_are_queued(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Nobody chose a batch id here: unless it is told, submitting again queues every row a second time."""
    monkeypatch.setattr(enqueue, "CHUNK_ROWS", 2)
    monkeypatch.setattr(patience, "SILENCE_SECONDS", 0.0)
    write(Path("in.jsonl"), rows(5))
    with EmbeddedRedis(tmp_path / "redis") as dying:
        monkeypatch.setenv("REDIS_URL", dying.url)
        with monkeypatch.context() as patch:
            patch.setattr("producer.progress.Lines.queueing", lambda *_: dying.kill())
            assert run("submit", "in.jsonl") == 3
        said = capsys.readouterr().err
        (again,) = re.findall("queue the rest with: producer (submit .*)", said)
        assert said.count("\n") == 1
        dying.start()
        assert run(*shlex.split(again)) == 0
        assert [status.rows for status in Client().list()] == [5]


def test_the_way_on_bears_what_no_record_says_yet(
    run: Run, interrupted: Callable[..., str], connection: redis.Redis
) -> None:
    """Interrupted while the input was looked through: the batch will be what the second command says."""
    write(Path("in.jsonl"), rows(1))
    flags = ["--batch-id", "m", "--strict", "--expires-in", "1.5"]
    said = interrupted("submit", "in.jsonl", *flags, place="producer.store.Store.create")
    (again,) = re.findall("queue the rest with: producer (submit .*)", said)
    assert "--strict" in again
    assert run(*shlex.split(again)) == 0
    left = float(connection.hget("livebatch:batch:m", "expires") or 0) - time.time()
    assert left == pytest.approx(5_400, abs=60)


@pytest.mark.parametrize("name", ["-", "pipe", "in.jsonl", "*.jsonl"])
def test_what_can_be_read_only_once_must_be_given_again(
    run: Run,
    stdin: Callable[[bytes], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    """The command alone would wait for ever, or find no such file."""
    write(Path("in.jsonl"), rows(1))
    stdin(b'{"prompt": "x"}')
    read, fill = os.pipe()
    os.close(fill)
    monkeypatch.setattr(Store, "create", ctrl_c)
    assert run("submit", f"/dev/fd/{read}" if name == "pipe" else name, "--batch-id", "m") == 4
    os.close(read)
    is_once = capsys.readouterr().err.endswith(" --format jsonl (give the same input again)\n")
    assert is_once is (name in {"-", "pipe"})


def ctrl_c(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_elsewhere_exits_4(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "list", ctrl_c)
    assert run("list") == 4


# results


@pytest.fixture
def batch(run: Run, worker: TinyWorker, capsys: pytest.CaptureFixture[str]) -> list[Any]:
    """Batch m: r0 to r5 claimed, and a bad line 7. The live requests."""
    write(Path("in.jsonl"), [*rows(6), "{bad"])
    run("submit", "in.jsonl", "--batch-id", "m")
    capsys.readouterr()
    return worker.claim()


def test_results_of_a_running_batch(
    run: Run, worker: TinyWorker, batch: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    worker.complete([batch[3], batch[1]])
    assert run("results", "m", "-o", "out.jsonl") == 1
    assert result_ids("out.jsonl") == ["line-7", "r3", "r1"]
    assert "4 rows have not ended yet: add --follow" in capsys.readouterr().err


def test_results_go_on_where_they_stopped(run: Run, worker: TinyWorker, batch: list[Any]) -> None:
    worker.complete(batch[:2])
    run("results", "m", "-o", "out.jsonl")
    worker.complete(batch[2:])
    run("results", "m", "-o", "out.jsonl")
    run("results", "m", "-o", "out.jsonl", "--follow")
    assert result_ids("out.jsonl") == ["line-7", "r0", "r1", "r2", "r3", "r4", "r5"]


def test_what_a_kill_cut_off_is_dropped_and_comes_again(
    run: Run, worker: TinyWorker, batch: list[Any]
) -> None:
    """Killed between writing lines and moving the cursor: whole lines and a torn one stand beyond it."""
    worker.complete(batch[:2])
    run("results", "m", "-o", "out.jsonl")
    with Path("out.jsonl").open("a") as stream:
        stream.write('{"id":"m-0-3","custom_id":"r2"}\n{"id":"m-0-4","cus')
    worker.complete(batch[2:])
    run("results", "m", "-o", "out.jsonl")
    assert result_ids("out.jsonl") == ["line-7", "r0", "r1", "r2", "r3", "r4", "r5"]


def test_results_killed_again_and_again(run: Run, worker: TinyWorker, connection: redis.Redis) -> None:
    """kill -9 of a following reader at three moments: every row once."""
    write(Path("in.jsonl"), rows(60))
    run("submit", "in.jsonl", "--batch-id", "m")
    live = worker.claim()
    for part in range(3):
        process = spawn("results", "m", "--follow", "-o", "out.jsonl")
        for row in live[20 * part : 20 * part + 20]:
            worker.complete([row])
        while not Path("out.jsonl").exists() or Path("out.jsonl").read_text().count("\n") < 20 * part + 5:
            assert process.poll() is None
            threading.Event().wait(0.005)
        process.kill()
        process.communicate()
    assert run("results", "m", "--follow", "-o", "out.jsonl") == 0
    assert result_ids("out.jsonl") == [f"r{n}" for n in range(60)]


def test_ordered_results_go_on_too(run: Run, worker: TinyWorker, batch: list[Any]) -> None:
    worker.complete([batch[0], batch[1], batch[4]])
    run("results", "m", "-o", "out.jsonl", "--ordered")
    assert result_ids("out.jsonl") == ["r0", "r1"]
    worker.complete([batch[5], batch[3], batch[2]])
    run("results", "m", "-o", "out.jsonl", "--ordered")
    assert result_ids("out.jsonl") == ["r0", "r1", "r2", "r3", "r4", "r5", "line-7"]


def test_what_is_in_the_file_is_released(
    run: Run, worker: TinyWorker, batch: list[Any], connection: redis.Redis
) -> None:
    worker.complete(batch[:2])
    run("results", "m", "-o", "out.jsonl", "--release")
    assert sorted(connection.keys("rq:job:*")) == [f"rq:job:m-0-{n}".encode() for n in (3, 4, 5, 6)]
    worker.complete(batch[2:])
    assert run("results", "m", "-o", "out.jsonl", "--release", "--follow") == 1
    assert result_ids("out.jsonl") == ["line-7", "r0", "r1", "r2", "r3", "r4", "r5"]
    assert connection.keys("rq:job:*") + connection.keys("rq:results:*") == []


def test_errors_file_takes_the_failed_rows(run: Run, worker: TinyWorker, batch: list[Any]) -> None:
    flags = ["-o", "out.jsonl", "--errors-file", "errors.jsonl", "--flat"]
    worker.fail(batch[:1])
    run("results", "m", *flags)
    with Path("errors.jsonl").open("a") as stream:
        stream.write("torn")
    worker.complete(batch[1:3])
    worker.fail(batch[3:])
    assert run("results", "m", "--follow", *flags) == 1
    assert result_ids("out.jsonl") == ["r1", "r2"]
    assert result_ids("errors.jsonl") == ["line-7", "r0", "r3", "r4", "r5"]


def test_an_output_that_is_something_else_is_left_alone(
    run: Run, worker: TinyWorker, batch: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    worker.complete(batch)
    run("results", "m", "-o", "out.jsonl")
    stands = Path("out.jsonl").read_bytes()
    write(Path("precious.txt"), ["mine"])
    run("submit", "in.jsonl", "--batch-id", "n")
    capsys.readouterr()
    for arguments, said in [
        (["results", "n", "-o", "out.jsonl"], "holds results of batch m"),
        (["submit", "in.jsonl", "--wait", "-o", "out.jsonl"], "holds results of batch m"),
        (["results", "m", "-o", "out.jsonl", "--flat"], "--flat"),
        (["results", "m", "-o", "out.jsonl", "--ordered"], "--ordered"),
        (
            ["results", "m", "-o", "out.jsonl", "--errors-file", "e.jsonl"],
            "out.jsonl was begun without --err",
        ),
        (["results", "m", "-o", "precious.txt"], "precious.txt is not empty"),
    ]:
        assert run(*arguments) == 2
        assert said in capsys.readouterr().err
    assert Path("out.jsonl").read_bytes() == stands
    assert Path("precious.txt").read_text() == "mine\n"
    assert len(Client().list()) == 2


def test_an_output_cut_by_hand_is_told(
    run: Run, worker: TinyWorker, batch: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    worker.complete(batch)
    run("results", "m", "-o", "out.jsonl")
    os.truncate("out.jsonl", 10)
    assert run("results", "m", "-o", "out.jsonl") == 2
    assert "To start over delete out.jsonl and out.jsonl.cursor" in capsys.readouterr().err
    Path("out.jsonl").unlink()
    run("results", "m", "-o", "out.jsonl")
    assert len(result_ids("out.jsonl")) == 7, "a cursor without its file starts over"


def test_two_writers_of_one_output(
    run: Run, worker: TinyWorker, batch: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    process = spawn("results", "m", "--follow", "-o", "out.jsonl")
    while not Path("out.jsonl.cursor").exists():  # written under the lock
        threading.Event().wait(0.01)
    code = run("results", "m", "-o", "out.jsonl")
    worker.complete(batch)
    process.communicate(timeout=30)
    assert code == 2
    assert "being written by another producer" in capsys.readouterr().err
    assert len(result_ids("out.jsonl")) == 7


def test_a_reader_that_closes_the_pipe_ends_us_quietly(run: Run, worker: TinyWorker) -> None:
    write(Path("in.jsonl"), rows(500))
    run("submit", "in.jsonl", "--batch-id", "m")
    worker.run()
    process = spawn("results", "m")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait(timeout=30)


# status, list, cancel, validate


def test_status_shows_batches_and_workers(
    run: Run, worker: TinyWorker, batch: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with worker.connection.pipeline() as pipe:
        fields = {"rows": "4", "tokens_per_second": "120", "model": "evil\x1b[2J"}
        worker.store.report_worker(pipe, "w1", fields, 30)
        pipe.execute()
    worker.complete(batch[:2])
    assert run("status") == 0
    said = capsys.readouterr().out
    assert re.search(r"^m +livebatch +running +7 +2 +1 +0 +4 ", said, re.MULTILINE)
    assert re.search(r"^worker +rows +tokens/s +model$", said, re.MULTILINE)
    assert re.search(r"^w1 +4 +120 +evil\?\[2J$", said, re.MULTILINE)
    assert run("status", "m", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["batch"]["rows"], found["batch"]["waiting"]) == (7, 4)
    assert found["batch"]["state"] == "running"
    numbers = {"rows": 4, "tokens_per_second": 120}
    assert found["workers"] == [{"name": "w1", **fields, **numbers}]
    assert run("status", "--json") == 0
    assert [status["id"] for status in json.loads(capsys.readouterr().out)["batches"]] == ["m"]


def test_status_of_nothing(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status") == 0
    said = capsys.readouterr().out
    assert "no batches" in said
    assert "no worker reports: start one" in said


def test_status_tells_of_a_producer_that_died(
    run: Run,
    interrupted: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(Path("in.jsonl"), rows(5))
    interrupted("submit", "in.jsonl", "--batch-id", "m")
    monkeypatch.setattr("producer.tables.SILENT_SECONDS", 0.0)
    run("status")
    assert "submit the same files again with --batch-id m" in capsys.readouterr().err


def test_list(run: Run, batch: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == ["m", "livebatch", "waiting"]
    assert run("list", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(status["id"], status["state"]) for status in found] == [("m", "waiting")]


@pytest.mark.parametrize(
    ("claimed", "stopped"), [(1, "1 row in a worker's hands is"), (2, "2 rows in workers' hands are")]
)
def test_cancel(
    run: Run, worker: TinyWorker, capsys: pytest.CaptureFixture[str], claimed: int, stopped: str
) -> None:
    """A row that is claimed need not run yet: a worker holds up to twice its live batch."""
    write(Path("in.jsonl"), rows(5))
    run("submit", "in.jsonl", "--batch-id", "m")
    held, ended = worker.claim(claimed), 5 - claimed
    capsys.readouterr()
    assert run("cancel", "m") == 0
    said = f"batch m: 0 completed, 0 failed, {ended} cancelled, {stopped} being stopped\n"
    assert capsys.readouterr().err == said
    assert run("cancel", "m", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["state"], said["cancelled"], said["waiting"]) == ("cancelled", ended, claimed)
    worker.fail(held, "batch_cancelled")
    assert run("results", "m", "--follow", "-o", "out.jsonl") == 1
    lines = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert {(line["response"], line["error"]["code"]) for line in lines} == {(None, "batch_cancelled")}


@pytest.mark.parametrize("by", ["the worker", "cancel"])
def test_cancelling_what_is_over_says_what_it_held(
    run: Run, worker: TinyWorker, batch: list[Any], capsys: pytest.CaptureFixture[str], by: str
) -> None:
    worker.complete(batch[:2])
    if by == "cancel":
        run("cancel", "m")
        worker.fail(batch[2:], "batch_cancelled")
        capsys.readouterr()
    worker.complete(batch[2:])
    held = "2 completed, 1 failed, 4 cancelled" if by == "cancel" else "6 completed, 1 failed, 0 cancelled"
    assert run("cancel", "m") == 0
    assert capsys.readouterr().err == f"batch m was over already: {held}\n"


def test_validate(run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDIS_URL", "redis://127.0.0.1:1")
    write(Path("in.jsonl"), [*rows(2), "{bad", *rows(1)])
    assert run("validate", "in.jsonl") == 1
    said = capsys.readouterr()
    assert [line.split(":")[0] for line in said.out.splitlines()] == ["line 3", "line 4"]
    assert "4 rows, 2 bad" in said.err
    assert run("validate", "in.jsonl", "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["rows"], found["bad"]) == (4, 2)
    assert [(problem["line"], problem["code"]) for problem in found["problems"]] == [
        (3, "invalid_json"),
        (4, "duplicate_custom_id"),
    ]
    write(Path("in.jsonl"), rows(2))
    assert run("validate", "in.jsonl") == 0


@pytest.mark.parametrize("command", ["submit", "results", "cancel", "validate", "status"])
def test_help_shows_an_example(run: Run, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run(command, "--help") == 0
    assert f"\n  producer {command}" in capsys.readouterr().out


def test_help_shows_that_a_batch_one_waits_for_can_be_named(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("submit", "--help") == 0
    assert "--batch-id monday --wait -o results.jsonl\n" in capsys.readouterr().out
