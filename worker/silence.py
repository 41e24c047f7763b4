"""How long an engine has given no sign of life: one with rows tells of its steps every second.

Counts the parent's own waking time. A parent that was frozen itself, alone or with its engine, blames nobody.
"""

from __future__ import annotations

import time

LONGEST_TURN = 2.0  # seconds of one turn of the parent's loop that count; it wakes every second by itself


class Silence:
    """A clock that ``broken`` sets back and ``grow`` moves on."""

    def __init__(self) -> None:
        self.broken()

    def broken(self) -> None:
        """The engine was heard or seen at work, or has nothing to do."""
        self._seconds = 0.0
        self._at = time.monotonic()

    def grow(self) -> float:
        """To be called every turn. Returns the seconds of silence."""
        now = time.monotonic()
        self._seconds += min(now - self._at, LONGEST_TURN)
        self._at = now
        return self._seconds
