"""Real processes for end-to-end tests: a worker and a producer as a person would start them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}


@contextlib.contextmanager
def worker(
    url: str, model: str | Path, *flags: str, queue: str = "livebatch"
) -> Iterator[subprocess.Popen[str]]:
    """A worker process; SIGTERM at the end, and its log printed for the failing test to show."""
    command = [sys.executable, "-m", "worker.cli", "run", "--model", str(model)]
    command += ["--queue", queue, "--redis", url, *flags]
    with running(command, environment()) as process:
        yield process


@contextlib.contextmanager
def running(command: list[str], env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process; SIGTERM at the end, and its output printed."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=env)
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
            log.seek(0)
            print(f"--- worker {process.pid} exit {process.returncode}\n{log.read()[-6000:]}")


def producer(url: str, *arguments: str | Path, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """`producer ...` to its end."""
    command = [sys.executable, "-m", "producer.cli", *map(str, arguments)]
    env = {**environment(), "REDIS_URL": url}
    run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, check=False)
    shown = " ".join(map(str, arguments))
    print(f"--- producer {shown} exit {run.returncode}\n{run.stdout[-3000:]}\n{run.stderr[-3000:]}")
    assert "Traceback" not in run.stderr
    return run


def engine_of(process: subprocess.Popen[Any]) -> int | None:
    """The engine's process id: the worker's child that multiprocessing spawned. None between two engines."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    engines = [pid for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return int(engines[0]) if engines else None


def lines(path: Path) -> list[Line]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def by_id(path: Path) -> dict[str, Line]:
    """Output lines by custom_id; a row that came back twice is an error here."""
    found = lines(path)
    table = {line["custom_id"]: line for line in found}
    assert len(table) == len(found), "a row has two results"
    return table


def text(line: Line) -> str:
    choice = line["response"]["body"]["choices"][0]
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def error_code(line: Line) -> str | None:
    """The error's code, whether the row's own or the batch's; None when the row succeeded."""
    if line["error"]:
        return str(line["error"]["code"])
    body = line["response"]["body"]
    return str(body["error"]["code"]) if "error" in body else None


def write(path: Path, rows: list[Line]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
