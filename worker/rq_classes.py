"""The only file that subclasses RQ: our entry among its workers, and jobs that cannot run anything.

Owns what `rq info` and a dashboard see of a worker. Must not know rows.
"""

from __future__ import annotations

from typing import Any

from redis import Redis
from redis.client import Pipeline
from rq import Queue
from rq.job import Job
from rq.utils import now as utc_now
from rq.worker.base import BaseWorker, WorkerStatus

from producer.store import Serializer

WORKER_TTL_SECONDS = 60  # a worker that died without a word leaves `rq info` after this long


class SafeJob(Job):
    """A job whose callbacks, webhooks and function are out of reach: maintenance reads jobs of anybody."""

    success_callback = None
    failure_callback = None
    stopped_callback = None
    func = None

    def send_webhooks(self, status: Any, *, exc_string: str | None = None) -> None:
        """Never: the address was written by whoever can write to Redis."""

    def restore(self, raw_data: Any) -> Any:
        """As RQ's, but what is packed stays packed: nobody here needs it, and unpacked it may be anything."""
        super().restore({**raw_data, b"data": b"", b"exc_info": b"", b"result": b"", b"webhooks": b""})
        self._packed: bytes = raw_data.get(b"data", b"")

    def to_dict(self, include_meta: bool = True, include_result: bool = True) -> dict[str, Any]:
        """For saving: the payload as it was read."""
        fields: dict[str, Any] = super().to_dict(include_meta, include_result)
        return {**fields, "data": self._packed}


def safe_queue(name: str, connection: Redis) -> Queue:
    """A queue of safe jobs, read with our serializer."""
    return Queue(name, connection=connection, serializer=Serializer, job_class=SafeJob)


class Entry(BaseWorker):
    """This worker's entry in RQ's list of workers. It takes no jobs: leases.py does."""

    job_class = SafeJob

    def __init__(self, name: str, queues: list[str], connection: Redis) -> None:
        super().__init__(
            [safe_queue(queue, connection) for queue in queues],
            name=name,
            connection=connection,
            serializer=Serializer,
            worker_ttl=WORKER_TTL_SECONDS,
        )
        self.birth_date = utc_now()

    def _set_connection(self, connection: Redis) -> Redis:
        """RQ would lengthen our timeouts to minutes for a blocking pop that this class never does."""
        return connection

    def beat(self, pipe: Pipeline, state: WorkerStatus) -> None:
        """Alive for another WORKER_TTL_SECONDS; written whole, for the case that Redis forgot us."""
        self.last_heartbeat = utc_now()
        pipe.hset(self.key, mapping={**self.serialize(), "state": str(state.value)})
        pipe.expire(self.key, WORKER_TTL_SECONDS)
        pipe.sadd(self.redis_workers_keys, self.key)
        for queue in self.queue_names():
            pipe.sadd(f"{self.redis_workers_keys}:{queue}", self.key)
