"""The end of rows: results written once, many in one script, and only where the job is still ours.

Owns what ends in Redis when a row ends: RQ's job, result stream and registries, our completion log.
Must not know how a row ran.
"""

from __future__ import annotations

import logging
import zlib
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from redis.exceptions import RedisError, ResponseError, WatchError
from rq.defaults import RQ_KEY_PREFIX
from rq.job import JobStatus
from rq.results import Result as RqResult
from rq.utils import now as utc_now
from rq.utils import utcformat

from producer.batch import KEEP_SECONDS
from producer.store import Serializer, batch_key, outcome
from producer.wire import Failure, Result, Usage
from worker import scripts
from worker.claims import failed
from worker.leases import Claim, Lease
from worker.link import Link
from worker.rq_classes import SafeJob, safe_queue

if TYPE_CHECKING:
    from redis import Redis
    from redis.client import Pipeline

log = logging.getLogger(__name__)

MAX_ROWS = 256  # of one script: about 5 ms of Redis
NOT_OURS, ENDED, AWAITED = 0, 1, 2  # what scripts.END answers

Argument = str | bytes | int

# Of each outcome: the job's status, RQ's registry, the type of RQ result ("" for none).
ENDS: Mapping[str, tuple[JobStatus, str, int | str]] = {
    "completed": (JobStatus.FINISHED, "finished", RqResult.Type.SUCCESSFUL.value),
    "failed": (JobStatus.FAILED, "failed", RqResult.Type.FAILED.value),
    "cancelled": (JobStatus.CANCELED, "canceled", ""),
}


@dataclass(frozen=True, slots=True)
class Ending:
    """A row that ended: whose, how, and how long RQ keeps it."""

    lease: Lease
    result: Result
    encoded: bytes
    keep_seconds: int

    @property
    def outcome(self) -> str:
        return outcome(self.result)

    def rq_fields(self) -> list[Argument]:
        """What scripts.END tells RQ of the row."""
        lease, (status, registry, kind) = self.lease, ENDS[self.outcome]
        fields = [lease.queue, lease.job_id, lease.execution_id, status.value, registry, self.keep_seconds]
        if self.result.failure is None:
            return [*fields, "", kind, "return_value", b64encode(self.encoded)]
        # For people who look at the RQ job.
        reason = zlib.compress(f"{self.result.failure.code}: {self.result.failure.message}".encode())
        return [*fields, reason, kind, "exc_string", b64encode(reason)]

    def log_fields(self) -> list[Argument]:
        """What scripts.END logs of it: nothing of a job whose batch is unknown or never accepted it."""
        batch_id, usage = self.lease.batch_id, self.result.usage or Usage(0, 0)
        return [
            batch_key(batch_id) if batch_id else "",
            self.outcome,
            self.encoded if self.result.failure else "",
            usage.prompt_tokens,
            usage.completion_tokens,
            repr(self.lease.started_at),
        ]


def ending(claim: Claim, result: Result) -> Ending:
    """The end of a claimed row. A result that is no JSON (never a model's text) becomes an internal error."""
    try:
        encoded = Serializer.dumps(result.encode())
    except ValueError as error:
        failure = Failure.of("internal_error", f"the result cannot be written as JSON: {error}")
        result = failed(result.custom_id, result.job_id, failure)
        encoded = Serializer.dumps(result.encode())
    ttl = claim.failure_ttl if result.failure else claim.result_ttl
    keep_seconds = int(ttl) if ttl.isdigit() and 0 < int(ttl) < 2**31 else KEEP_SECONDS
    return Ending(claim.lease, result, encoded, keep_seconds)


class Written(NamedTuple):
    """What became of endings. ``ours``: how many were still ours; ``later``: to be written another time."""

    ours: int
    later: list[Ending]


class Finisher:
    """Writes endings. Raises redis-py's errors when Redis is away; writing them again then is harmless."""

    def __init__(self, connection: Redis, worker_name: str) -> None:
        self._connection = connection
        self._link = Link("rows that other jobs wait for")
        self._worker_name = worker_name
        self._end = connection.register_script(scripts.END)

    def write(self, endings: Sequence[Ending]) -> Written:
        """End these rows, at most MAX_ROWS. Those that were not ours any more stay as they are.

        A full Redis still ends rows, but has no room for the jobs that may run then: these rows come later.
        """
        states: list[int] = self._end(args=self._arguments("free", endings))
        ours = states.count(ENDED)
        later = [end for end, state in zip(endings, states, strict=True) if state == AWAITED]
        while later and self._link.is_due:
            with self._link:
                ours += self._release(later[0])
                later.pop(0)
        return Written(ours, later)

    def _release(self, end: Ending) -> int:
        """End a row that other RQ jobs depend on. Anybody may have written those: they hold up no row."""
        try:
            return self._release_dependents(end)
        except Exception as error:
            if isinstance(error, RedisError) and type(error) is not ResponseError:  # away, or full
                raise
            log.warning("what depends on row %s is no RQ job and stays: %s", end.lease.job_id, error)
            [state] = self._end(args=self._arguments("all", [end]))
            return int(state == ENDED)

    def _release_dependents(self, end: Ending) -> int:
        """Somebody may touch the row meanwhile: then look at it again."""
        while True:
            with self._connection.pipeline() as pipe:
                try:
                    return self._attempt(pipe, end)
                except WatchError:
                    self._connection.ping()  # raises where it was Redis: WATCH alone is never refused

    def _attempt(self, pipe: Pipeline, end: Ending) -> int:
        """RQ's own code releases the dependents, in the transaction that ends the row."""
        key = end.lease.job_key
        pipe.watch(key, f"{key}:dependents")  # type: ignore[no-untyped-call]
        [state] = pipe.eval(scripts.END, 0, *self._arguments("free", [end]))
        if state != AWAITED:
            return int(state == ENDED)
        job = SafeJob.fetch(end.lease.job_id, connection=self._connection, serializer=Serializer)
        job._status = ENDS[end.outcome][0]  # what the dependents shall see
        queue = safe_queue(end.lease.queue, self._connection)
        ready = queue.move_dependents_to_ready(job, pipeline=pipe, refresh_job_status=False)
        if not pipe.explicit_transaction:
            pipe.multi()
        pipe.eval(scripts.END, 0, *self._arguments("all", [end]))
        pipe.execute()
        queue.enqueue_ready_jobs_by_queue(ready)
        return 1

    def _arguments(self, which: Literal["free", "all"], endings: Iterable[Ending]) -> list[Argument]:
        now = utc_now()
        given: list[Argument] = [
            RQ_KEY_PREFIX,
            self._worker_name,
            repr(now.timestamp()),
            utcformat(now),
            which,
        ]
        for end in endings:
            given += end.rq_fields()
            given += end.log_fields()
        return given
