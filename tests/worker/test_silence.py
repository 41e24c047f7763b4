"""Silence: what counts of the time in which nothing was heard."""

from __future__ import annotations

import pytest

from worker import silence
from worker.silence import LONGEST_TURN, Silence


def test_a_parent_that_slept_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(silence.time, "monotonic", lambda: now)
    clock = Silence()
    for _ in range(3):
        now += 1.0
        heard = clock.grow()
    assert heard == 3.0
    now += 3600.0  # stopped and continued, engine and all
    assert clock.grow() == 3.0 + LONGEST_TURN
    clock.broken()
    now += 0.5
    assert clock.grow() == 0.5
