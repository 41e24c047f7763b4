"""The whole path in one command: a Redis, a worker, a file of prompts, a table of answers (`make demo`)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from producer import Client
from producer.embedded import EmbeddedRedis

HERE = Path(__file__).resolve().parent
console = Console(stderr=True)


@contextlib.contextmanager
def redis_url(folder: Path) -> Iterator[str]:
    """REDIS_URL when set; else a server of our own, stopped afterwards."""
    if url := os.environ.get("REDIS_URL"):
        yield url
        return
    with EmbeddedRedis(folder / "redis") as server:
        console.print(f"[dim]Redis       {server.url} (embedded, data in {folder / 'redis'})")
        yield server.url


@contextlib.contextmanager
def worker(url: str, model: Path, queue: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker on ``queue``; asked to stop with SIGTERM at the end, as an operator would."""
    command = [
        sys.executable,
        "-m",
        "worker.cli",
        "run",
        "--model",
        str(model),
        "--queue",
        queue,
        "--redis",
        url,
    ]
    console.print(f"[dim]worker      worker run --model {model} --queue {queue}   (log: {log})")
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stderr=stream, stdout=stream)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)


def await_worker(url: str, process: subprocess.Popen[bytes], queue: str, log: Path) -> None:
    """Until the worker has loaded its model and says so in Redis."""
    client = Client(url)
    with console.status("loading the model ..."):
        while not any(report.fields.get("queues") == queue for report in client.workers()):
            if process.poll() is not None:
                sys.exit(f"the worker did not start; its log is {log}")
            time.sleep(0.1)


def submit(url: str, queue: str, results: Path) -> int:
    """The producer's own command, with its live progress bar; its exit code.

    In a session of its own: Ctrl-C is the demo's to handle, which stops everything.
    """
    command = [sys.executable, "-m", "producer.cli", "submit", str(HERE / "demo.jsonl"), "--queue", queue]
    command += ["--redis", url, "--wait", "-o", str(results)]
    console.print(
        f"[dim]producer    producer submit examples/demo.jsonl --queue {queue} --wait -o {results}\n"
    )
    return subprocess.run(command, check=False, start_new_session=True).returncode


def answer(line: dict[str, object]) -> tuple[str, str, str]:
    """(how it ended, tokens, text) of one output line."""
    response = line["response"]
    if not isinstance(response, dict):
        return "[red]error", "", str(line["error"])
    body = response["body"]
    if response["status_code"] >= 400:
        return f"[red]{body['error']['code']}", "", body["error"]["message"]
    choice = body["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return choice["finish_reason"], str(body["usage"]["completion_tokens"]), text


def table(results: Path) -> Table:
    view = Table("row", "ended", "tokens", "answer", title="Answers, in the order they finished")
    for line in map(json.loads, results.read_text(encoding="utf-8").splitlines()):
        ended, tokens, text = answer(line)
        view.add_row(line["custom_id"], ended, tokens, shorten(" ".join(text.split())))
    return view


def shorten(text: str, limit: int = 160) -> str:
    """Two or three lines of a narrow terminal; the whole text is in the results file."""
    return text if len(text) <= limit else text[: limit - 2] + " …"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="where results and logs go")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        return run(options.model, options.out)
    except KeyboardInterrupt:
        console.print("\ndemo stopped, and with it its worker and its Redis")
        return 130


def run(model: Path, out: Path) -> int:
    name = uuid.uuid4().hex[:8]
    queue, log, results = f"demo-{name}", out / "worker.log", out / f"results-{name}.jsonl"
    with redis_url(out) as url, worker(url, model, queue, log) as process:
        await_worker(url, process, queue, log)
        code = submit(url, queue, results)
    if not results.exists():
        console.print(f"[red]no results; the worker's log is {log}")
        return code or 1
    Console().print(table(results))
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    good = sum(line["response"]["status_code"] == 200 for line in lines)
    console.print(f"\n{good} rows answered, {len(lines) - good} refused on purpose (`mistyped`), alone.")
    console.print(f"Results file: [bold]{results}")
    return 0 if code == 1 else code  # 1: some rows failed, and one line of the file is wrong by design


if __name__ == "__main__":
    sys.exit(main())
