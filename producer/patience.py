"""How long an outage of Redis is waited out, and who is told of it.

Owns the waits between attempts. Must not know which command failed.
"""

from __future__ import annotations

from collections.abc import Callable

from redis.backoff import ExponentialBackoff

LONGEST_SECONDS = 1.0
FIRST_SECONDS = 0.05
FEW = 1  # failures that are nothing to tell of: a connection may have aged


class Patience(ExponentialBackoff):
    """Calls ``on_outage`` at each attempt in vain; whoever listens says it once."""

    def __init__(self, on_outage: Callable[[], None]) -> None:
        super().__init__(cap=LONGEST_SECONDS, base=FIRST_SECONDS)
        self._on_outage = on_outage

    def compute(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row."""
        if failures > FEW:
            self._on_outage()
        return super().compute(failures)

    def __deepcopy__(self, memo: object) -> Patience:
        """redis-py copies it for each connection: whom it tells stays the same."""
        return self
