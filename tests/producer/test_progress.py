"""Progress in words: counts, rates of the last while, time left; a line now and then where nobody watches."""

from __future__ import annotations

import io
import re
import sys

import pytest
from rich.console import Console

from producer import progress
from producer.bar import Bar
from producer.batch import BatchStatus, Progress
from producer.progress import Lines, Rates, describe_queueing, describe_running, display, duration


def status(completed: int = 0, failed: int = 0, *, rows: int = 100, state: str = "closed") -> BatchStatus:
    return BatchStatus(
        id="m",
        queue="q",
        state=state,  # type: ignore[arg-type]
        created=0.0,
        rows=rows,
        completed=completed,
        failed=failed,
        cancelled=0,
        prompt_tokens=0,
        completion_tokens=20 * completed,
        busy_seconds=0.0,
        queued_at=0.0,
    )


def rates_after(*seen: tuple[float, int]) -> Rates:
    """Rates that saw so many rows ended (second element) at these moments."""
    rates = Rates()
    for now, ended in seen:
        rates.update(status(ended), now)
    return rates


def test_the_clock_of_rates_starts_when_the_first_row_ends() -> None:
    """A worker that loads its model for two minutes is not the batch's speed."""
    rates = rates_after((0.0, 3), (60.0, 3), (120.0, 4), (122.0, 8), (124.0, 12))
    assert (rates.rows_per_second, rates.tokens_per_second) == (2.0, 40.0)


@pytest.mark.parametrize(
    "seen",
    [
        [],
        [(0.0, 0)],
        [(0.0, 0), (60.0, 0)],
        [(0.0, 0), (60.0, 9)],  # the first end: nothing to measure from yet
        [(0.0, 0), (60.0, 9), (61.0, 20)],  # too soon
        [(0.0, 0), (60.0, 9), (80.0, 13)],  # too few
    ],
)
def test_a_rate_needs_some_rows_and_some_time(seen: list[tuple[float, int]]) -> None:
    rates = rates_after(*seen)
    assert (rates.rows_per_second, rates.tokens_per_second) == (0.0, 0.0)
    assert "left" not in describe_running(status(20), rates)
    assert "tokens/s" not in describe_running(status(20), rates)


def test_rates_are_of_the_last_while() -> None:
    assert rates_after((0, 0), (1, 10), (20, 29), (40, 69)).rows_per_second == pytest.approx(2.0)


def test_the_last_while_is_longer_where_few_rows_end() -> None:
    rates = rates_after((0, 0), *((20 * index, index) for index in range(1, 10)))
    assert rates.rows_per_second == pytest.approx(1 / 20)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0:00"), (59.6, "1:00"), (130, "2:10"), (3730, "1:02:10"), (360000, "100:00:00")],
)
def test_duration(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_queueing_in_words() -> None:
    assert describe_queueing(Progress(queued=1200)) == "queueing: 1,200 rows"
    text = describe_queueing(Progress(queued=1, already=2, failed=3, holding="waiting for workers"))
    assert text == "queueing: 6 rows, 2 there already, 3 bad, waiting for workers"


def test_running_in_words() -> None:
    rates = Rates()
    for now, completed, failed in ((0.0, 0, 0), (5.0, 1, 0), (15.0, 41, 10)):
        rates.update(status(completed, failed), now)
    assert describe_running(status(41, 10), rates) == "51 of 100 rows, 10 failed, 80 tokens/s, 0:10 left"
    assert describe_running(status(0, rows=5, state="open"), Rates()) == "0 of 5+ rows"


QUIET = "2 of 100 rows, and no row ended in the last"


@pytest.mark.parametrize(
    ("ended", "shown"),
    [
        ([0, 1, 1, 1, 1, 2, 2, 2, 2, 3], [f"{number} of 100 rows" for number in (0, 2, 3)]),
        ([2] * 150 + [3], ["2 of 100 rows", f"{QUIET} 1:00", f"{QUIET} 2:00", "3 of 100 rows"]),
    ],
    ids=["some", "none"],
)
def test_lines_come_now_and_then_and_at_the_end(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ended: list[int],
    shown: list[str],
) -> None:
    """One second after the other: where rows end every few seconds, where none does once a minute."""
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Lines() as lines:
        for rows in ended:
            lines.running(status(rows))
            clock[0] += 1
    assert capsys.readouterr().err.splitlines() == shown


def test_a_producer_that_waits_says_so_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0)
    lines = Lines()
    for queued, holding in ((1, ""), (2, ""), (2, "full"), (3, ""), (3, "full again")):
        lines.queueing(Progress(queued=queued, holding=holding))
    assert capsys.readouterr().err.splitlines() == ["queueing: 1 rows", "queueing: 2 rows, full"]


def test_a_pipe_gets_lines_a_terminal_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(display(), Lines)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(display(live=False), Lines)
    with display() as bar:
        assert isinstance(bar, Bar)
        bar.queueing(Progress(queued=7, fraction=0.5))
        bar.running(status(30, 5))
    assert "35 of 100 rows, 5 failed" in re.sub(r"\x1b\[[0-9;?]*\w", "", terminal.getvalue())


def test_the_bars_clock_ticks_after_queueing_filled_it() -> None:
    """rich's own stops when a task is full: it stood at 0:00:00 for the whole of `submit --wait`."""
    now = [0.0]
    bar = Bar(clock=lambda: now[0])
    bar.queueing(Progress(queued=7, fraction=1.0))
    shown = []
    for now[0] in (0.0, 5.0, 65.0):
        bar.running(status(0))
        console = Console(file=io.StringIO(), width=100)
        console.print(bar.renderable)
        shown.append(console.file.getvalue().split()[-1])  # type: ignore[attr-defined]
    assert shown == ["0:00", "0:05", "1:05"]
