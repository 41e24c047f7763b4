"""Upkeep of the queues, in its own thread: rows of dead workers go back, old entries leave RQ's registries.

Every worker does it; each change is one script or one command, so it does not matter how many do it at once,
and there is no lock for a dead worker to keep. Must not touch this worker's rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rq import Queue
from rq.defaults import RQ_KEY_PREFIX
from rq.registry import FailedJobRegistry, FinishedJobRegistry, ReadyJobRegistry
from rq.worker_registration import clean_worker_registry

from producer.batch import KEEP_SECONDS
from worker.leases import recover
from worker.link import Link
from worker.rq_classes import safe_queue

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

REGISTRY_SECONDS = 60.0


class Maintenance(threading.Thread):
    """A daemon thread. ``patience_seconds``: after an outage, how long owners have to renew their leases."""

    def __init__(
        self, queues: Sequence[str], connection: Redis, every_seconds: float, patience_seconds: float
    ) -> None:
        super().__init__(name="maintenance", daemon=True)
        self._queues = [safe_queue(name, connection) for name in queues]
        self._connection = connection
        self._every_seconds = every_seconds
        self._patience_seconds = patience_seconds
        self._stopped = threading.Event()
        self._registries_at = 0.0
        self._link = Link("maintenance")

    def stop(self) -> None:
        """It ends within a moment."""
        self._stopped.set()

    def run(self) -> None:
        pause = 0.0
        while not self._stopped.wait(pause):
            was_away = self._link.is_away
            with self._link:
                self._connection.ping()
                if not was_away:
                    self._look_after()
            pause = self._patience_seconds if was_away and not self._link.is_away else self._every_seconds

    def _look_after(self) -> None:
        for queue in self._queues:
            if back := recover(self._connection, queue.name):
                log.warning("%d rows of a worker that is gone are back in queue %s", len(back), queue.name)
        if time.monotonic() >= self._registries_at:
            self._registries_at = time.monotonic() + REGISTRY_SECONDS
            for queue in self._queues:
                clean(queue)


def clean(queue: Queue) -> None:
    """Drop registry entries whose time is over and names of workers that are gone; free dependents in limbo.

    RQ's own cleanup also looks for abandoned jobs, one by one and under a lock: ``recover`` has done that.
    """
    for registry in (FinishedJobRegistry, FailedJobRegistry, ReadyJobRegistry):
        registry(queue=queue, job_class=queue.job_class).cleanup()
    # RQ never drops a cancelled job from its registry; the score is when it was cancelled.
    canceled = f"{RQ_KEY_PREFIX}:canceled:{queue.name}"
    queue.connection.zremrangebyscore(canceled, 0, time.time() - KEEP_SECONDS)
    clean_worker_registry(queue)
