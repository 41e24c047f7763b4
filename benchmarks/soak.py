"""20,000 rows through Redis and a worker on the dummy model: memory of every process, CPU a row, pick-up.

Nothing of a model is in these figures: what is left is the queue, the text work and the engine's host cost.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from producer import Client
from producer.embedded import EmbeddedRedis

TICKS = os.sysconf("SC_CLK_TCK")
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "it", "rains", "today")


def rss_mb(pid: int) -> float:
    """Resident memory of a process, from the kernel."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def engine_of(worker: int) -> int:
    """The engine is the worker's child with the most memory (the other one tracks semaphores)."""
    children = Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    threads = [path.read_text().split() for path in Path(f"/proc/{worker}/task").glob("*/children")]
    found = {int(pid) for pids in [children, *threads] for pid in pids}
    return max(found, key=rss_mb)


class Sampler(threading.Thread):
    """Memory of some processes, twice a second, until ``stop``."""

    def __init__(self, pids: dict[str, int]) -> None:
        super().__init__(daemon=True)
        self.pids, self.samples = pids, {name: [rss_mb(pid)] for name, pid in pids.items()}
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.5):
            for name, pid in self.pids.items():
                self.samples[name].append(rss_mb(pid))

    def stop(self) -> None:
        self._over.set()
        self.join()


def rows(count: int, words: int) -> list[dict[str, Any]]:
    """Texts that differ, about 5 characters a word."""
    return [
        {
            "custom_id": str(n),
            "prompt": " ".join(WORDS[(n * 7 + k * k) % len(WORDS)] for k in range(words)) + f" {n}",
        }
        for n in range(count)
    ]


def run_batch(client: Client, lines: list[dict[str, Any]]) -> float:
    """Seconds from submit to the last result; every row must have come back, once."""
    begun = time.perf_counter()
    batch = client.submit_rows(lines)
    names = [result.custom_id for result in client.results(batch.id, follow=True)]
    assert sorted(names) == sorted(line["custom_id"] for line in lines)
    return time.perf_counter() - begun


def pick_up_ms(client: Client, tries: int) -> list[float]:
    """From the row's own enqueue to its end, an idle worker each time: Redis' clock says both."""
    taken = []
    for n in range(tries):
        time.sleep(0.3)  # idle
        batch = client.submit_rows([{"custom_id": str(n), "prompt": "hi"}])
        begun = time.perf_counter()
        list(client.results(batch.id, follow=True))
        taken.append(1000 * (time.perf_counter() - begun))
    return taken


def soak(count: int, words: int, batch: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as data, EmbeddedRedis(Path(data)) as redis:
        command = [sys.executable, "-m", "worker.cli", "run", "--model", "dummy", "--redis", redis.url]
        worker = subprocess.Popen([*command, "--max-batch", str(batch)], stderr=subprocess.DEVNULL)
        try:
            client = Client(redis.url)
            run_batch(client, rows(500, words))  # warm
            pids = {
                "worker": worker.pid,
                "engine": engine_of(worker.pid),
                "redis": redis.pid,
                "producer": os.getpid(),
            }
            before = {name: cpu_seconds(pid) for name, pid in pids.items()}
            sampler = Sampler(pids)
            sampler.start()
            seconds = run_batch(client, rows(count, words))
            sampler.stop()
            spent = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
            waits = pick_up_ms(client, 20)
        finally:
            worker.send_signal(signal.SIGTERM)
            worker.wait(60)
    return {
        "rows": count,
        "words": words,
        "max_batch": batch,
        "rows_per_second": count / seconds,
        "cpu_us_per_row": {name: 1e6 * value / count for name, value in spent.items()},
        "rss_mb": {name: quarters(samples) for name, samples in sampler.samples.items()},
        "pick_up_ms": {"median": statistics.median(waits), "worst": max(waits)},
    }


def quarters(samples: list[float]) -> list[float]:
    """Memory at the start, after each quarter of the run, and at the end."""
    last = len(samples) - 1
    return [round(samples[last * part // 4], 1) for part in range(5)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    found = soak(options.rows, options.words, options.batch)
    print(f"{found['rows']:,} rows of {options.words} words: {found['rows_per_second']:,.0f} rows/s")
    print(f"{'process':10}{'CPU us a row':>14}   RSS MB: start, quarters, end")
    for name, quarter in found["rss_mb"].items():
        print(f"{name:10}{found['cpu_us_per_row'][name]:>14.0f}   {'  '.join(map(str, quarter))}")
    waits = found["pick_up_ms"]
    print(f"idle worker, queued to read: median {waits['median']:.1f} ms, worst {waits['worst']:.1f} ms")
    if options.out:
        options.out.write_text(json.dumps({"command": sys.argv, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
