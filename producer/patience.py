"""How long an outage of Redis is waited out, and who is told of it.

Owns the waits between attempts, and their end. Must not know which command failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from redis.backoff import ExponentialBackoff
from redis.exceptions import BusyLoadingError
from redis.retry import Retry

SILENCE_SECONDS = 30.0  # from when somebody is told; an attempt that hangs may end some seconds later
LONGEST_SECONDS = 1.0
FIRST_SECONDS = 0.05
FEW = 1  # failures that are nothing to tell of: a connection may have aged

T = TypeVar("T")


class Patience(Retry):
    """Calls ``on_outage`` at each attempt in vain; whoever listens says it once.

    Attempts are not counted: a refused one is over at once, one that nobody answers takes seconds.
    """

    def __init__(self, on_outage: Callable[[], None]) -> None:
        super().__init__(ExponentialBackoff(cap=LONGEST_SECONDS, base=FIRST_SECONDS), retries=-1)
        self._on_outage = on_outage
        self._depth = 0  # a command's attempts hold those of its connection
        self._failures = 0  # in a row, of them all
        self._silent_since = 0.0  # monotonic

    def call_with_retry(
        self,
        do: Callable[[], T],
        fail: Callable[..., Any],
        is_retryable: Callable[[Exception], bool] | None = None,
        with_failure_count: bool = False,
    ) -> T:
        """What ``do`` returns, in the end. Raises what it raises once patience is over."""

        def failed(error: Exception, *count: int) -> None:
            fail(error, *count)
            if self._is_over(error):
                raise error

        self._depth += 1
        try:
            return super().call_with_retry(do, failed, is_retryable, with_failure_count)
        finally:
            self._depth -= 1
            if not self._depth:
                self._failures = 0

    def _is_over(self, error: Exception) -> bool:
        """Count one more failure; whether it was the last to be borne."""
        self._failures += 1
        now = time.monotonic()
        if self._failures <= FEW + 1 or isinstance(error, BusyLoadingError):  # that one answers
            self._silent_since = now
        if now >= self._silent_since + SILENCE_SECONDS:
            return True
        if self._failures > FEW:
            self._on_outage()
        return False

    def __deepcopy__(self, memo: object) -> Patience:
        """redis-py copies it for each connection: whom it tells stays the same."""
        return Patience(self._on_outage)
