"""Waiting for what Redis, the clock or another process does: they tell a test nothing, so it looks."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Look until it holds."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited too long"
        time.sleep(0.01)
