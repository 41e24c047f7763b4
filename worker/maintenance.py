"""Upkeep of the queues, in its own thread: rows of dead workers go back, old entries leave RQ's registries.

Every worker does it; each change is one script or one command, so it does not matter how many do it at once,
and there is no lock for a dead worker to keep. Anybody may have written what it finds: one odd entry costs
the others nothing. Must not touch this worker's rows.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from redis.exceptions import RedisError, ResponseError
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
            with apart(f"the rows of dead workers in queue {queue.name}"):
                if back := recover(self._connection, queue.name):
                    log.warning("%d rows of a dead worker are back in queue %s", len(back), queue.name)
        if time.monotonic() >= self._registries_at:
            self._registries_at = time.monotonic() + REGISTRY_SECONDS
            for queue in self._queues:
                clean(queue)


@contextmanager
def apart(what: str) -> Iterator[None]:
    """What goes wrong with ``what`` is logged, and the work goes on; an outage of Redis is raised."""
    try:
        yield
    except Exception as error:
        if isinstance(error, RedisError) and type(error) is not ResponseError:
            raise
        log.exception("upkeep leaves %s", what)


def clean(queue: Queue) -> None:
    """Drop registry entries whose time is over and names of workers that are gone; free dependents in limbo.

    RQ's own cleanup also looks for abandoned jobs, one by one and under a lock: ``recover`` has done that.
    """
    with apart(f"queue {queue.name}, whose key {queue.key} is no list: nobody can take what waits there"):
        queue.connection.llen(queue.key)
    for kind in (FinishedJobRegistry, FailedJobRegistry):
        registry = kind(queue=queue, job_class=queue.job_class)
        with apart(f"old entries of {registry.key}"):
            registry.cleanup()
    with apart(f"dependents in limbo in queue {queue.name}"):
        free_dependents(queue)
    # RQ never drops a cancelled job from its registry; the score is when it was cancelled.
    canceled = f"{RQ_KEY_PREFIX}:canceled:{queue.name}"
    with apart(f"old entries of {canceled}"):
        queue.connection.zremrangebyscore(canceled, 0, time.time() - KEEP_SECONDS)
    with apart(f"names of workers that are gone from queue {queue.name}"):
        clean_worker_registry(queue)


def free_dependents(queue: Queue) -> None:
    """Queue jobs that wait for nothing any more, each by itself: RQ reads all before it queues one."""
    registry = ReadyJobRegistry(queue=queue, job_class=queue.job_class)
    for entry in cast("list[bytes]", queue.connection.zrange(registry.key, 0, -1)):
        with apart(f"the entry {entry!r:.200} of {registry.key}"):
            registry.enqueue_jobs([entry.decode()])
