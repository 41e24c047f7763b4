"""Progress in words: counts, rates of the last while, time left; a line now and then where nobody watches."""

from __future__ import annotations

import io
import re
import sys

import pytest

from producer import progress
from producer.batch import BatchStatus, Progress
from producer.progress import Bar, Lines, Rates, describe_queueing, describe_running, display, duration


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


def test_rates_are_of_the_last_while() -> None:
    rates = Rates()
    assert (rates.rows_per_second, rates.tokens_per_second) == (0.0, 0.0)
    rates.update(status(0), 0.0)
    assert rates.rows_per_second == 0.0
    rates.update(status(10), 5.0)
    assert (rates.rows_per_second, rates.tokens_per_second) == (2.0, 40.0)
    rates.update(status(11), 100.0)
    rates.update(status(21), 105.0)
    assert rates.rows_per_second == pytest.approx(11 / 100)
    rates.update(status(31), 116.0)
    assert rates.rows_per_second == pytest.approx(20 / 16)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.4, "0:00"), (59.6, "1:00"), (130, "2:10"), (3730, "1:02:10"), (360000, "100:00:00")],
)
def test_duration(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_queueing_in_words() -> None:
    assert describe_queueing(Progress(queued=1200)) == "queueing: 1,200 rows"
    text = describe_queueing(Progress(queued=1, already=2, failed=3, holding=True))
    assert text.startswith("queueing: 6 rows, 2 there already, 3 bad, Redis is nearly full")


def test_running_in_words() -> None:
    rates = Rates()
    rates.update(status(0), 0.0)
    rates.update(status(40, 10), 10.0)
    assert describe_running(status(40, 10), rates) == "50 of 100 rows, 10 failed, 80 tokens/s, 0:10 left"
    assert describe_running(status(0, rows=5, state="open"), Rates()) == "0 of 5+ rows"


def test_lines_come_now_and_then_and_at_the_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    with Lines() as lines:
        for second in range(12):
            clock[0] = 100.0 + second
            lines.running(status(second))
    shown = [int(text.split()[0]) for text in capsys.readouterr().err.splitlines()]
    assert shown == [0, 5, 10, 11]


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
