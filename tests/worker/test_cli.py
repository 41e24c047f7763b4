"""The worker's command line: help, errors in one line, exit codes, the doctor, the log's form."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import redis
from rq_rows import counts, enqueue, request

from worker.logs import Lines

pytestmark = pytest.mark.redis
NOWHERE = "redis://127.0.0.1:1"
HOSTILE = "x\x1b[2J\x07\n\x9b"
FLAGS = ["model", "queue", "redis", "device", "max-batch", "threads", "kv-memory", "burst", "grace"]
FLAGS += ["sampling-defaults", "max-tokens-default", "engine-timeout"]


def run(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("LIVEBATCH_", "REDIS_"))}
    done = subprocess.run(
        [sys.executable, "-m", "worker.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**clean, **env},
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


SHORT = ["--help", "--version", "run --help", f"check --model dummy --redis {NOWHERE}"]
SHORT += ["bench --model dummy --max-batch 1"]


def shell(line: str, first: str = "true") -> tuple[int, str]:
    """``worker <line>`` in a shell, for its redirections: its exit code, and what it said on stderr."""
    command = ["bash", "-c", f"{first}\nexec {sys.executable} -m worker.cli {line}"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False, timeout=100, env=buffered)
    return done.returncode, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("line", SHORT)
def test_a_full_disk_under_standard_output_is_said(line: str) -> None:
    assert shell(f"{line} >/dev/full") == (2, "worker: standard output: No space left on device\n")


@pytest.mark.parametrize("line", SHORT)
def test_a_reader_that_has_seen_enough(line: str, tmp_path: Path) -> None:
    gone = f"mkfifo {tmp_path}/fifo; (exec 3<{tmp_path}/fifo) & exec 4>{tmp_path}/fifo; wait"
    assert shell(f"{line} >&4", gone) == (1, "")


def test_closed_streams_mix_nothing() -> None:
    """What is opened next would be standard output."""
    assert shell(f"check --model dummy --redis {NOWHERE} >&-") == (3, "")


def test_help_shows_every_flag_and_an_example() -> None:
    shown = run("run", "--help").stdout
    for flag in FLAGS:
        assert f"--{flag}" in shown
    assert "worker run --model models/" in shown
    assert "LIVEBATCH_MAX_BATCH" in shown
    about, _, commands = run("--help").stdout.partition("Commands:")
    assert "worker build model.gguf" in about
    assert "..." not in commands, "what a command does is told in a sentence that fits"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_anything_has_begun_ends_it_as_asked(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # a Redis that never answers
        url = f"redis://127.0.0.1:{mute.getsockname()[1]}"
        command = [sys.executable, "-m", "worker.cli", "run", "--model", "dummy", "--redis", url]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        mute.accept()[0].close()  # it has got so far
        process.send_signal(number)
        assert process.communicate(timeout=30)[1] == ""
        assert process.returncode == 0


def test_starting_imports_nothing_heavy() -> None:
    code = "import sys, worker.cli; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {"numpy", "numba", "onnxruntime", "tokenizers", "rq", "redis", "rich"} & set(loaded)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "--model", "dummy", "--redis", NOWHERE], 3, "127.0.0.1:1"),
        (["run", "--model", "dummy", "--redis", "http://h"], 2, "not a Redis URL"),
        (["run", "--model", "dummy", "--max-batch", "0", "--redis", NOWHERE], 2, "--max-batch must be"),
        (["run", "--model", "dummy", "--max-batch", "x"], 2, "max-batch"),
        (["run"], 2, "--model"),
        (["run", "--model", "dummy", "--queue", "a=0"], 2, "weight"),
        (["build", "none.gguf", "--out", "no-such-folder"], 2, "none.gguf"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(arguments: list[str], code: int, said: str) -> None:
    done = run(*arguments)
    assert done.returncode == code
    assert said in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "--model", HOSTILE, "--redis", NOWHERE],
        ["run", "--model", "dummy", "--queue", HOSTILE, "--redis", NOWHERE],
        ["run", "--model", "dummy", "--device", HOSTILE],
        ["run", "--model", "dummy", "--max-batch", HOSTILE],
        ["run", "--model", "dummy", f"--{HOSTILE}"],
        ["build", HOSTILE, "--out", "no-such-folder"],
        ["bench", "--model", HOSTILE],
    ],
)
def test_no_control_reaches_a_terminal(arguments: list[str]) -> None:
    done = run(*arguments)
    shown = (done.stdout + done.stderr).removesuffix("\n").split("\n")
    assert [line for line in shown if not line.isprintable()] == []
    assert any(r"\x1b[2J" in line for line in shown)


def test_a_missing_model_folder_is_named(redis_url: str, tmp_path: Path) -> None:
    done = run("run", "--model", tmp_path / "none", "--redis", redis_url)
    assert done.returncode == 2
    assert "none" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_environment_speaks_where_no_flag_does(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(1)], "one")
    enqueue(connection, [request(2)], "two")
    done = run("run", "--burst", REDIS_URL=redis_url, LIVEBATCH_MODEL="dummy", LIVEBATCH_QUEUE="one two=3")
    assert done.returncode == 0, done.stderr
    assert counts(connection) == {"completed": 2}
    assert "one=1, two=3" in done.stderr
    for line in done.stderr.strip().splitlines():
        assert re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING) \S+: ", line), line


def test_a_redis_that_evicts_is_refused_and_one_that_forgets_is_warned_of(
    redis_url: str, connection: redis.Redis
) -> None:
    try:
        connection.config_set("maxmemory-policy", "allkeys-lru")
        refused = run("run", "--model", "dummy", "--burst", "--redis", redis_url)
        checked = run("check", "--model", "dummy", "--redis", redis_url)
        connection.config_set("maxmemory-policy", "noeviction")
        connection.config_set("appendonly", "no")
        warned = run("run", "--model", "dummy", "--burst", "--redis", redis_url)
    finally:
        connection.config_set("maxmemory-policy", "noeviction")
        connection.config_set("appendonly", "yes")
    assert (refused.returncode, checked.returncode) == (3, 3)
    assert "allkeys-lru" in refused.stderr and "allkeys-lru" in checked.stdout
    assert warned.returncode == 0
    assert "WARNING" in warned.stderr and "append" in warned.stderr


def test_the_doctor_looks_at_everything(redis_url: str) -> None:
    done = run("check", "--model", "dummy", "--redis", redis_url)
    assert done.returncode == 0, done.stdout
    subjects = [line.split()[:2] for line in done.stdout.splitlines()]
    assert subjects == [["ok", "redis"], ["ok", "device"], ["ok", "model"], ["ok", "prompt"]]
    assert "'The cap" in done.stdout


def test_the_doctor_goes_on_after_an_error() -> None:
    done = run("check", "--model", "dummy", "--redis", NOWHERE)
    assert done.returncode == 3
    subjects = [line.split()[:2] for line in done.stdout.splitlines()]
    assert subjects == [["error", "redis"], ["ok", "device"], ["ok", "model"], ["ok", "prompt"]]


def test_the_doctor_ends_with_the_first_errors_code(tmp_path: Path) -> None:
    done = run("check", "--model", tmp_path / "none", "--redis", NOWHERE)
    assert done.returncode == 3
    errors = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("error")]
    assert errors == ["redis", "model"], "that the prompt cannot run is the same trouble"


def test_the_doctor_names_a_broken_folder(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text("{")
    done = run("check", "--model", tmp_path, "--redis", redis_url)
    assert done.returncode == 1
    assert "genai_config.json" in done.stdout


def test_passwords_are_not_shown() -> None:
    done = run("run", "--model", "dummy", "--redis", "redis://user:secret@127.0.0.1:1/0")
    assert done.returncode == 3
    assert "secret" not in done.stderr + done.stdout


def test_a_log_message_stays_on_its_line() -> None:
    record = logging.LogRecord("worker.service", logging.INFO, "f", 1, "a\n%s", ("b\x1b[0m漢",), None)
    line = Lines().format(record)
    assert line.endswith(" INFO service: a\\nb\\x1b[0m漢")
    assert "\n" not in line


def test_a_url_that_is_none_is_shown_without_its_password() -> None:
    done = run("run", "--model", "dummy", "--redis", "redis://user:se#cret@127.0.0.1:x/0")
    assert done.returncode == 2
    assert "--redis" in done.stderr and "not a Redis URL" in done.stderr
    assert "cret" not in done.stderr + done.stdout
