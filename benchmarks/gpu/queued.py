"""(d): rows through a real Redis and a real worker, from the first line read to the last result read.

This process is the producer. The same rows given to Engine.generate directly are cases.py's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

from benchmarks.gpu import load, machine
from benchmarks.gpu.watch import Watch
from benchmarks.soak import engine_of, quarters, rss_mb
from producer import Client
from producer.embedded import EmbeddedRedis
from producer.wire import Result

STOP_SECONDS = 60


def measure(worker_flags: list[str], rows: int, warm_rows: int, limit: float) -> dict[str, Any]:
    """Tokens a second, and the memory of every process at the start, after each quarter, and at the end.

    RuntimeError when the worker ends, a row fails, or a batch takes more than ``limit`` seconds.
    """
    with EmbeddedRedis() as redis, working(worker_flags, redis.url) as worker:
        client = Client(redis.url)
        through(client, warm_rows, worker, limit)
        watch = Watch(gauges(worker.pid, redis.pid))
        watch.start()
        found = through(client, rows, worker, limit)
        samples = watch.stop()
    return found | {"memory_mb": {name: quarters(each) for name, each in samples.items()}}


@contextmanager
def working(flags: list[str], url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A worker, ended in the end."""
    command = [sys.executable, "-m", "worker.cli", "run", "--redis", url, *flags]
    process = subprocess.Popen(command, stdout=sys.stderr)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def gauges(worker: int, redis: int) -> dict[str, Callable[[], float]]:
    pids = {"worker": worker, "engine": engine_of(worker), "redis": redis, "producer": os.getpid()}
    found: dict[str, Callable[[], float]] = {name: partial(rss_mb, pid) for name, pid in pids.items()}
    if machine.gpu_memory_mb() is not None:
        found["gpu"] = lambda: machine.gpu_memory_mb() or 0.0
    return found


def through(client: Client, rows: int, worker: subprocess.Popen[bytes], limit: float) -> dict[str, Any]:
    """Submits ``rows``, reads every result. Every row must have all its tokens."""
    begun = perf_counter()
    batch = client.submit_rows(load.texts(rows))
    submitted = perf_counter()
    used: Counter[str] = Counter()
    for page in client.pages(batch.id, follow=True):  # an empty one a second at least
        for result in page.results:
            used.update(tokens_of(result))
        if worker.poll() is not None or perf_counter() - begun > limit:
            raise RuntimeError(f"{used['rows']} of {rows} rows are done and the worker {worker.poll()!r}")
    seconds = perf_counter() - begun
    if used["tokens"] != rows * load.TEXT_TOKENS:
        raise RuntimeError(f"{used} came of {rows} rows of {load.TEXT_TOKENS} tokens")
    rate = {"total_tok_s": used["tokens"] / seconds, "seconds": seconds}
    return dict(used) | rate | {"submit_seconds": submitted - begun}


def tokens_of(result: Result) -> dict[str, int]:
    if result.usage is None:
        raise RuntimeError(f"row {result.custom_id} failed: {result.failure}")
    used = result.usage
    return {"rows": 1, "tokens": used.completion_tokens, "prompt_tokens": used.prompt_tokens}
