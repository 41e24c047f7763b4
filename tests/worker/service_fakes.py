"""A worker's whole parent in a thread, on a real Redis, with an engine that does what the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import redis

from kernels.rows import Status
from worker import settings
from worker.compose import build_preparer, connector
from worker.engine import Load
from worker.events import Died, Outputs, Post, Ready
from worker.metrics import Metrics
from worker.sequence import Output, Row
from worker.service import Service

EOS = 257


class FakeEngine:
    """Holds rows until the test ends them; with ``echo`` ends each at once, its answer its prompt.

    ``is_hung``: it takes rows and cancels, does and says nothing, until it is started again.
    """

    def __init__(self, post: Post, echo: bool = False) -> None:
        self.post = post
        self.echo = echo
        self.is_hung = False
        self.rows: dict[int, Row] = {}
        self.cancelled: list[int] = []
        self.starts = 0
        self.is_stopped = False
        self.on_start: Callable[[], None] = self.ready

    def ready(self) -> None:
        self.post(Ready(0.0))

    def start(self) -> None:
        self.starts += 1
        self.rows, self.is_hung = {}, False
        self.on_start()

    def send(self, rows: Sequence[Row], cancels: Sequence[int]) -> None:
        self.rows |= {row.id: row for row in rows}
        self.cancelled += cancels
        if self.is_hung:
            return
        if gone := [number for number in cancels if number in self.rows]:
            self.end(*gone, status=Status.CANCELLED)
        if self.echo and rows:
            self.end(*list(self.rows))

    def progress(self) -> object:
        return None if self.is_hung else time.monotonic()

    def kill(self) -> None:
        self.die()

    def stop(self) -> None:
        self.is_stopped = True

    def end(self, *numbers: int, status: Status = Status.EOS) -> None:
        """These rows end, with their prompt as answer."""
        outputs = [Output(n, [*self.rows.pop(n).prompt, EOS], status) for n in numbers]
        self.post(Outputs(outputs, Load(len(self.rows), 0, 0, 0, 0, 0, 0)))

    def say(self, number: int, text: str) -> None:
        """Part of a streamed row's answer."""
        self.post(Outputs([Output(number, list(text.encode()), Status.RUNNING)], Load(1, 0, 0, 0, 0, 0, 0)))

    def die(self) -> None:
        self.rows = {}
        self.post(Died("killed by SIGKILL"))

    @property
    def prompts(self) -> list[str]:
        """Prompts of the rows in the engine."""
        return [bytes(row.prompt).decode() for row in list(self.rows.values())]

    def number(self, prompt: str) -> int:
        return next(n for n, row in self.rows.items() if bytes(row.prompt).decode() == prompt)


class Worker:
    """A running Service and its engine. ``error``: what ``run`` raised."""

    def __init__(
        self, url: str, *, echo: bool = False, metrics: Metrics | None = None, **overrides: Any
    ) -> None:
        flags = {"model": "dummy", "redis_url": url, "queues": ["q"], "max_batch": 4}
        flags |= {key: overrides.pop(key) for key in list(overrides) if key in READ}
        self.settings = replace(settings.read(**flags), **overrides)
        self.service = Service(
            self.settings,
            build_preparer(self.settings),
            connector(url),
            lambda post: self._make(post, echo),
            metrics,
        )
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _make(self, post: Post, echo: bool) -> FakeEngine:
        self.engine = FakeEngine(post, echo)
        return self.engine

    def _run(self) -> None:
        try:
            self.service.run()
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.service.stop("the test")

    def join(self) -> None:
        """Wait for the end, which must come; raise what it raised."""
        self.thread.join(30)
        assert not self.thread.is_alive(), "the worker does not end"
        if self.error is not None:
            raise self.error


READ = {"queues", "max_batch", "burst", "grace", "sampling_defaults", "max_tokens_default"}


@contextmanager
def worker(url: str, **overrides: Any) -> Iterator[Worker]:
    """A worker on queue ``q`` that is stopped at once at the end, its rows handed back."""
    made = Worker(url, **overrides)
    made.thread.start()
    try:
        yield made
    finally:
        made.stop()
        made.stop()
        made.join()


def run_burst(url: str, **overrides: Any) -> Worker:
    """A worker that answers everything at once and ends when the queue is empty."""
    made = Worker(url, echo=True, burst=True, **overrides)
    made.thread.start()
    made.join()
    return made


def connect(url: str) -> redis.Redis:
    return redis.Redis.from_url(url)
