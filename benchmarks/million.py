"""A million rows of about 1 KB through real processes: is everything bounded, and is every row there, once?

    python benchmarks/million.py --rows 20000
    python benchmarks/million.py --rows 1000000 --out benchmarks/results/million.json

`producer submit --max-queued-bytes`, `worker run --model dummy` and `producer results --follow --release` run
side by side, on a Redis of their own. Each answer is its row's number: a mixed-up row is found as well as a
lost one. Needs 3 KB of disk a row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.soak import cpu_seconds, engine_of, rss_mb  # noqa: E402
from producer.embedded import EmbeddedRedis  # noqa: E402
from producer.sizes import parse_bytes  # noqa: E402
from producer.store import Store  # noqa: E402

BATCH = "million"
DIGITS = 7  # of a row's number, which its prompt begins with and the dummy model answers
WORDS = [random.Random(n).randbytes(2 + n % 4).hex() for n in range(4096)]  # zlib leaves about half of them
SAMPLE_SECONDS = 0.5
PROCESSES = ("submit", "results", "worker", "engine", "redis")


def write_rows(path: Path, count: int, size: int) -> None:
    """The input file: prompts of ``size`` characters that begin with the row's number."""
    chance = random.Random(0)
    with path.open("w") as stream:
        for number in range(count):
            text = " ".join([f"{number:0{DIGITS}}", *chance.choices(WORDS, k=size // 5)])
            row = {"custom_id": f"row-{number}", "prompt": text[:size], "max_tokens": DIGITS + 1}
            stream.write(json.dumps({**row, "temperature": 0}) + "\n")


def check_answers(path: Path, count: int) -> None:
    """Every row is there, once, with its own number as its answer."""
    seen = bytearray(count)
    with path.open() as stream:
        for line in stream:
            row = json.loads(line)
            number = int(row["custom_id"].removeprefix("row-"))
            assert row["response"]["body"]["choices"][0]["text"] == f"{number:0{DIGITS}}", line
            seen[number] += 1
    assert seen.count(1) == count, (
        f"{seen.count(0)} rows lost, {count - seen.count(0) - seen.count(1)} doubled"
    )


class Watch:
    """Memory of the processes, bytes of Redis and the batch's counts, twice a second."""

    def __init__(self, connection: redis.Redis, pids: dict[str, int]) -> None:
        self._connection = connection
        self._pids = pids
        self._begun = time.perf_counter()
        self.samples: list[dict[str, float]] = []
        self.cpu = dict.fromkeys(pids, 0.0)

    def look(self) -> None:
        """One sample; a process that has ended is not in it."""
        info: dict[str, Any] = self._connection.info()
        status = Store(self._connection).status(BATCH)
        sample = {
            "seconds": time.perf_counter() - self._begun,
            "data": info["used_memory"] / 2**20,
            "append_only_file": info["aof_current_size"] / 2**20,
            "waiting": status.waiting,
            "ended": status.ended,
        }
        for name, pid in self._pids.items():
            try:
                sample[name], self.cpu[name] = rss_mb(pid), cpu_seconds(pid)
            except (OSError, ProcessLookupError):
                continue
        self.samples.append(sample)

    def column(self, name: str) -> list[float]:
        return [sample[name] for sample in self.samples if name in sample]


class Processes:
    """Everything of the run, started as a person would; ``stack`` ends it."""

    def __init__(self, server: EmbeddedRedis, folder: Path, stack: ExitStack) -> None:
        self._env = {**os.environ, "REDIS_URL": server.url, "PYTHONUNBUFFERED": "1"}
        self._stack = stack
        self.folder = folder

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *words], env=self._env, stdout=log, stderr=log, cwd=ROOT
            )
        self._stack.callback(end, process)
        return process

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Look until it holds; a process that ends instead ends us."""
    while not condition():
        if process.poll() is not None:
            raise SystemExit(f"{process.args!r} ended with {process.returncode}")
        time.sleep(0.05)


def measure(options: argparse.Namespace, server: EmbeddedRedis, folder: Path) -> Watch:
    """From the first row read to the last result written."""
    with ExitStack() as stack:
        run = Processes(server, folder, stack)
        connection = stack.enter_context(redis.Redis.from_url(server.url))
        worker = run.start(
            "worker", "worker.cli", "run", "--model", "dummy", "--max-batch", str(options.batch)
        )
        wait_for(lambda: "takes rows from" in run.said("worker"), worker)
        words = ["--batch-id", BATCH, "--max-queued-bytes", options.max_queued_bytes]
        submit = run.start("submit", "producer.cli", "submit", str(folder / "in.jsonl"), *words)
        wait_for(lambda: Store(connection).batch_ids() == [BATCH], submit)
        words = ["--follow", "--release", "-o", str(folder / "out.jsonl")]
        results = run.start("results", "producer.cli", "results", BATCH, *words)
        pids = (submit.pid, results.pid, worker.pid, engine_of(worker.pid), server.pid)
        watch = Watch(connection, dict(zip(PROCESSES, pids, strict=True)))
        while results.poll() is None:
            watch.look()
            time.sleep(SAMPLE_SECONDS)
        if results.returncode or submit.wait(60):
            raise SystemExit(run.said("submit")[-2000:] + run.said("results")[-2000:])
    return watch


def figures(options: argparse.Namespace, watch: Watch, input_bytes: int) -> dict[str, Any]:
    count, seconds, held = options.rows, watch.column("seconds")[-1], watch.column("data")
    queued = watch.column("submit")  # as long as it ran
    return {
        "rows": count,
        "input_bytes": input_bytes,
        "max_batch": options.batch,
        "max_queued_mb": parse_bytes(options.max_queued_bytes, "--max-queued-bytes") / 2**20,
        "seconds": round(seconds, 1),
        "rows_per_second": round(count / seconds, 1),
        "queueing_seconds": round(watch.samples[len(queued) - 1]["seconds"], 1),
        "most_waiting_rows": int(max(watch.column("waiting"))),
        "redis_data_mb": {"most": round(max(held), 1), "quarters": quarters(held)},
        "redis_left_bytes_a_row": round((held[-1] - held[0]) * 2**20 / count),
        "append_only_file_mb": round(max(watch.column("append_only_file")), 1),
        "rss_mb": {
            name: {"most": round(max(watch.column(name)), 1), "quarters": quarters(watch.column(name))}
            for name in PROCESSES
        },
        "cpu_us_a_row": {name: round(1e6 * spent / count) for name, spent in watch.cpu.items()},
    }


def quarters(values: list[float]) -> list[float]:
    """At the start, after each quarter, at the end."""
    last = len(values) - 1
    return [round(values[last * part // 4], 1) for part in range(5)]


def report(found: dict[str, Any]) -> None:
    rows, data = found["rows"], found["redis_data_mb"]
    print(f"{rows:,} rows of {found['input_bytes'] // rows:,} bytes, each there once with its own answer")
    print(f"{found['seconds']:,.0f} s, {found['rows_per_second']:,.0f} rows/s")
    print(f"all queued after {found['queueing_seconds']:,.0f} s")
    print(f"most rows waiting: {found['most_waiting_rows']:,}")
    print(f"Redis' data: at most {data['most']} MB where {found['max_queued_mb']:g} MB may wait")
    print(f"  MB at the start, quarters, end: {data['quarters']}")
    print(f"  {found['redis_left_bytes_a_row']} bytes a row are left at the end")
    print(f"append-only file: at most {found['append_only_file_mb']} MB")
    print(f"{'process':10}{'CPU us a row':>14}{'most MB':>10}   MB: start, quarters, end")
    for name, memory in found["rss_mb"].items():
        shown = "  ".join(map(str, memory["quarters"]))
        print(f"{name:10}{found['cpu_us_a_row'][name]:>14}{memory['most']:>10}   {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--size", type=int, default=1000, help="characters of a prompt")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--max-queued-bytes", default="128M")
    parser.add_argument("--folder", type=Path, help="for the files of the run; default: a temporary one")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="livebatch-million-", dir=options.folder))
    try:
        write_rows(folder / "in.jsonl", options.rows, options.size)
        with EmbeddedRedis(folder / "redis") as server:
            watch = measure(options, server, folder)
        check_answers(folder / "out.jsonl", options.rows)
        found = figures(options, watch, (folder / "in.jsonl").stat().st_size)
    finally:
        shutil.rmtree(folder)
    report(found)
    if options.out:
        machine = {
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "machine": platform.machine(),
        }
        options.out.write_text(json.dumps({"command": sys.argv, **machine, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
