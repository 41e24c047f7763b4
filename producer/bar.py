"""Progress on a terminal: a live bar, what is going on in words, and a clock that ticks until the end.

Owns the only use of rich, which takes long to import. Must not know Redis or files; the words are
progress.py's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from producer.batch import BatchStatus, Progress
from producer.progress import Rates, describe_queueing, describe_running, duration


class Clock(ProgressColumn):
    """Since the command began. rich's own stops when a task is full, as it is once everything is queued."""

    def render(self, task: Task) -> Text:
        return Text(duration(task.elapsed or 0.0), style="progress.elapsed")


class Bar:
    """For a terminal: one line, first of the queueing, then of the rows."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._now = clock
        self._rates = Rates()
        columns = (BarColumn(), TextColumn("{task.description}", markup=False), Clock())
        screen = Console(stderr=True)
        self._bar = RichProgress(*columns, console=screen, redirect_stdout=False, get_time=clock)
        self._task = self._bar.add_task("", total=None)

    def queueing(self, progress: Progress) -> None:
        self._show(describe_queueing(progress), progress.fraction)

    def running(self, status: BatchStatus) -> None:
        self._rates.update(status, self._now())
        done = status.ended / status.rows if status.rows else None
        self._show(describe_running(status, self._rates), done)

    @property
    def renderable(self) -> RenderableType:
        """What the terminal shows now."""
        return self._bar.get_renderable()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def _show(self, text: str, done: float | None) -> None:
        total = None if done is None else 1.0
        self._bar.update(self._task, description=text, total=total, completed=done or 0.0)
