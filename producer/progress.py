"""Progress on stderr: a live bar on a terminal, else a plain line every few seconds.

Owns what progress looks like and the rates it shows. Must not know Redis or files.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from types import TracebackType
from typing import Protocol, Self

from producer.batch import BatchStatus, Progress

WINDOW_SECONDS = 15.0  # rates are of the last while, not of the whole batch: workers come and go
RATE_ROWS = 5  # that must have ended, and seconds that must have passed, since the first end: no rate before
RATE_SECONDS = 2.0
LINE_SECONDS = 5.0
QUIET_SECONDS = 60.0  # between lines that say that nothing has changed


class Rates:
    """Rows and tokens a second over the last WINDOW_SECONDS, or longer where few rows end.

    The clock starts when the first row ends under our eyes: before that, a worker may have loaded its model.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()  # (when, rows ended, tokens)
        self._at_first: int | None = None  # rows ended when we began to look

    def update(self, status: BatchStatus, now: float) -> None:
        if self._at_first is None:
            self._at_first = status.ended
        if status.ended == self._at_first:
            return
        self._seen.append((now, status.ended, status.completion_tokens))
        while len(self._seen) > 2 and self._is_enough(self._seen[1], WINDOW_SECONDS):
            self._seen.popleft()

    @property
    def rows_per_second(self) -> float:
        """0: not known yet."""
        return self._rate(1)

    @property
    def tokens_per_second(self) -> float:
        """0: not known yet."""
        return self._rate(2)

    def _is_enough(self, since: tuple[float, int, int], seconds: float) -> bool:
        now, ended, _ = self._seen[-1]
        return now - since[0] >= seconds and ended - since[1] >= RATE_ROWS

    def _rate(self, column: int) -> float:
        if not self._seen or not self._is_enough(self._seen[0], RATE_SECONDS):
            return 0.0
        first, last = self._seen[0], self._seen[-1]
        return (last[column] - first[column]) / (last[0] - first[0])


def describe_queueing(progress: Progress) -> str:
    parts = [f"queueing: {progress.rows:,} rows"]
    if progress.already:
        parts.append(f"{progress.already:,} there already")
    if progress.failed:
        parts.append(f"{progress.failed:,} bad")
    if progress.holding:
        parts.append(progress.holding)
    return ", ".join(parts)


def describe_running(status: BatchStatus, rates: Rates) -> str:
    """``1,200 of 5,000 rows, 3 failed, 412 tokens/s, 2:10 left``."""
    total = f"{status.rows:,}" + ("+" if status.state == "open" else "")
    parts = [f"{status.ended:,} of {total} rows"]
    if status.failed:
        parts.append(f"{status.failed:,} failed")
    if status.cancelled:
        parts.append(f"{status.cancelled:,} cancelled")
    if rates.tokens_per_second:
        parts.append(f"{rates.tokens_per_second:,.0f} tokens/s")
    if rates.rows_per_second and status.waiting:
        parts.append(f"{duration(status.waiting / rates.rows_per_second)} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """``2:10`` or ``1:02:10``."""
    minutes, left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


class Display(Protocol):
    """What the command line tells of progress to."""

    def queueing(self, progress: Progress) -> None: ...
    def running(self, status: BatchStatus) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Lines:
    """For logs and pipes: a line at once, then every LINE_SECONDS, and one at the end if anything changed.

    That the producer waits for workers is said at once, too, the first time. Where nothing changes, a line
    says so every QUIET_SECONDS.
    """

    def __init__(self) -> None:
        self._rates = Rates()
        self._text = self._shown = ""
        self._changed_at = self._due = 0.0
        self._has_held = False

    def queueing(self, progress: Progress) -> None:
        if progress.holding and not self._has_held:
            self._has_held, self._due = True, 0.0
        self._show(describe_queueing(progress))

    def running(self, status: BatchStatus) -> None:
        self._rates.update(status, time.monotonic())
        self._show(describe_running(status, self._rates))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._text != self._shown:
            self._print(self._text)

    def _show(self, text: str) -> None:
        now, self._text = time.monotonic(), text
        if text != self._shown and now >= self._due:
            self._changed_at = now
            self._print(text)
        elif text == self._shown and now >= self._due - LINE_SECONDS + QUIET_SECONDS:
            self._print(f"{text}, and no row ended in the last {duration(now - self._changed_at)}")

    def _print(self, text: str) -> None:
        self._shown, self._due = self._text, time.monotonic() + LINE_SECONDS
        print(text, file=sys.stderr, flush=True)


def display(*, live: bool = True) -> Display:
    """A bar where a person watches and ``live`` allows it."""
    if not (live and sys.stderr.isatty()):
        return Lines()
    from producer.bar import Bar

    return Bar()
