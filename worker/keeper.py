"""Keeps the leases of a worker whose main loop is busy: one row may take it longer than a lease lasts.

A row of megabytes is read and tokenised in one piece. Were its lease and its neighbours' to run out
meanwhile, they would all run again, here or elsewhere, and come to the same row. Must not know rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from redis.exceptions import RedisError

from worker.leases import Lease, Leases

log = logging.getLogger(__name__)

LATE = 1.5  # beats after which the loop is not merely late
LONGEST_SECONDS = 600.0  # a loop that takes longer hangs: its rows shall run elsewhere


class Keeper(threading.Thread):
    """A daemon thread. The loop renews its leases itself, every beat, and says so; this steps in."""

    def __init__(self, leases: Leases, beat_seconds: float) -> None:
        super().__init__(name="keeper", daemon=True)
        self._leases = leases
        self._beat_seconds = beat_seconds
        self._held: list[Lease] = []
        self._renewed_at = time.monotonic()
        self._is_late = False
        self._stopped = threading.Event()

    def renewed(self, held: Iterable[Lease]) -> None:
        """The loop holds these, and has just renewed them."""
        self._held, self._renewed_at = list(held), time.monotonic()

    def took(self, claimed: Iterable[Lease]) -> None:
        """And these as well, from now on."""
        self._held.extend(claimed)

    def stop(self) -> None:
        """It ends within a moment."""
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.wait(self._beat_seconds):
            try:
                self._keep()
            except RedisError as error:
                log.debug("%s: %s", self.name, error)  # the main loop says that Redis is away

    def _keep(self) -> None:
        busy = time.monotonic() - self._renewed_at
        was_late, self._is_late = self._is_late, bool(self._held) and busy > LATE * self._beat_seconds
        if not self._is_late or busy > LONGEST_SECONDS:
            return
        self._leases.renew(list(self._held))  # what has ended since is not ours, and stays as it is
        if not was_late:
            log.warning("the worker is busy with one thing for %.0f s; it keeps its rows meanwhile", busy)
