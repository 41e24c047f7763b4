"""How fast and how full this worker is, in the words of `producer status`. Knows numbers only."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from worker.engine import Load
from worker.settings import Settings

WINDOW_SECONDS = 5.0


class Meter:
    """Sees the engine's counters pass by; a restarted engine's begin at zero again."""

    def __init__(self, settings: Settings) -> None:
        self._constant = {
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "model": Path(settings.engine.model).name,
            "queues": ",".join(queue.name for queue in settings.queues),
        }
        self._max_batch = settings.engine.max_batch
        self._load: Load | None = None
        self._tokens = 0  # sampled since this worker started
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def see(self, load: Load) -> None:
        """The engine's latest counters."""
        before = self._load.tokens_sampled if self._load else 0
        self._tokens += max(0, load.tokens_sampled - before)
        self._load = load

    def restart(self) -> None:
        """The engine is gone, and its counters with it."""
        self._load = None

    def fields(self, num_rows: int) -> Mapping[str, str]:
        """A report, with ``num_rows`` in hand; call it about once a second."""
        live = min(self._load.live, num_rows) if self._load else 0
        return {
            **self._constant,
            "live": f"{live}/{self._max_batch}",
            "waiting": str(num_rows - live),
            "tokens_per_second": f"{self._tokens_per_second():.1f}",
        }

    def _tokens_per_second(self) -> float:
        now = time.monotonic()
        self._marks.append((now, self._tokens))
        while len(self._marks) > 2 and now - self._marks[0][0] > WINDOW_SECONDS:
            self._marks.popleft()
        since, tokens = self._marks[0]
        return (self._tokens - tokens) / max(now - since, 1e-3)
