"""How fast and how full this worker is, in the words of `producer status`. Knows numbers only."""

from __future__ import annotations

import time
from collections import deque

from worker.engine import Load

WINDOW_SECONDS = 5.0


class Meter:
    """Sees the engine's counters pass by; a restarted engine's begin at zero again."""

    def __init__(self) -> None:
        self.load: Load | None = None
        self.tokens = 0  # sampled since this worker started
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def see(self, load: Load) -> None:
        """The engine's latest counters."""
        before = self.load.tokens_sampled if self.load else 0
        self.tokens += max(0, load.tokens_sampled - before)
        self.load = load

    def restart(self) -> None:
        """The engine is gone, and its counters with it."""
        self.load = None

    def tokens_per_second(self) -> float:
        """Over the last few seconds; call it about once a second."""
        now = time.monotonic()
        self._marks.append((now, self.tokens))
        while len(self._marks) > 2 and now - self._marks[0][0] > WINDOW_SECONDS:
            self._marks.popleft()
        since, tokens = self._marks[0]
        return (self.tokens - tokens) / max(now - since, 1e-3)
