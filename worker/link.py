"""Whether Redis answers. Work that needs it runs inside ``with link:`` and is simply tried again later.

Owns the pace of trying and what is said about it: once that Redis is away, once that it is back. Must not
know what the work is.
"""

from __future__ import annotations

import logging
import time
from types import TracebackType

from redis.exceptions import RedisError

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between tries, doubling


class Link:
    """A context manager that swallows redis-py's errors. After one, ``is_due`` is False for a while."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pause = 0.0
        self._again = 0.0
        self._away_since: float | None = None

    @property
    def is_due(self) -> bool:
        """Whether Redis may be tried now."""
        return time.monotonic() >= self._again

    @property
    def is_away(self) -> bool:
        """Whether the last try failed."""
        return self._away_since is not None

    @property
    def again(self) -> float:
        """When to try next (monotonic seconds); long past while Redis answers."""
        return self._again

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, RedisError):
            self._failed(error)
            return True
        if error is None and self._away_since is not None:
            log.warning("%s: Redis is back after %.1f s", self._what, time.monotonic() - self._away_since)
            self._away_since, self._pause, self._again = None, 0.0, 0.0
        return False

    def _failed(self, error: RedisError) -> None:
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            log.warning("%s: Redis does not serve us (%s); trying again until it does", self._what, error)
        self._pause = min(max(2 * self._pause, FIRST_PAUSE), LONGEST_PAUSE)
        self._again = now + self._pause
