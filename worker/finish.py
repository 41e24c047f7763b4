"""The end of rows: results written once, many in one transaction, and only where the job is still ours.

Owns what ends in Redis when a row ends: RQ's job, result stream and registries, our completion log.
Must not know how a row ran.
"""

from __future__ import annotations

import zlib
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from redis.exceptions import WatchError
from rq.defaults import RQ_KEY_PREFIX
from rq.job import JobStatus
from rq.results import Result as RqResult
from rq.utils import now as utc_now
from rq.utils import utcformat

from producer.batch import KEEP_SECONDS
from producer.errors import WireError
from producer.store import Serializer, Store, outcome
from producer.wire import Failure, Result, parse_job_id
from worker import scripts
from worker.claims import failed
from worker.leases import Claim, Lease, names
from worker.rq_classes import Entry, SafeJob, safe_queue

if TYPE_CHECKING:
    from redis import Redis
    from redis.client import Pipeline

MAX_ROWS = 256  # of one transaction: about 5 ms of Redis
NOT_OURS, OURS, AWAITED = 0, 1, 2  # what scripts.OWNED answers

Given = TypeVar("Given")
Made = TypeVar("Made")

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

    def fields(self) -> list[str | bytes | int]:
        """What scripts.END wants of a row."""
        lease, (status, registry, kind) = self.lease, ENDS[self.outcome]
        fields = [lease.queue, lease.job_id, lease.execution_id, status.value, registry, self.keep_seconds]
        if self.result.failure is None:
            return [*fields, "", kind, "return_value", b64encode(self.encoded)]
        # For people who look at the RQ job.
        reason = zlib.compress(f"{self.result.failure.code}: {self.result.failure.message}".encode())
        return [*fields, reason, kind, "exc_string", b64encode(reason)]


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


class Finisher:
    """Writes endings. Raises redis-py's errors when Redis is away; writing them again then is harmless."""

    def __init__(self, connection: Redis, store: Store, entry: Entry) -> None:
        self._connection = connection
        self._store = store
        self._entry = entry

    def write(self, endings: Sequence[Ending]) -> int:
        """End these rows, at most MAX_ROWS. Returns how many were still ours; the others stay as they are."""
        written, awaited = self._retried(self._attempt, endings)
        return written + sum(self._retried(self._attempt_awaited, end) for end in awaited)

    def _retried(self, attempt: Callable[[Pipeline, Given], Made], given: Given) -> Made:
        """Somebody may touch a job between our look and our write: then look again at what is ours."""
        while True:
            with self._connection.pipeline() as pipe:
                try:
                    return attempt(pipe, given)
                except WatchError:
                    continue

    def _attempt(self, pipe: Pipeline, endings: Sequence[Ending]) -> tuple[int, list[Ending]]:
        """(rows written, rows that other jobs depend on and that are still to be written)."""
        by_state: dict[int, list[Ending]] = {NOT_OURS: [], OURS: [], AWAITED: []}
        for end, state in zip(endings, self._look(pipe, endings), strict=True):
            by_state[state].append(end)
        pipe.multi()
        self._record(pipe, by_state[OURS])
        if by_state[NOT_OURS]:
            pipe.eval(scripts.FORGET, 0, *self._arguments(by_state[NOT_OURS]))
        pipe.execute()
        return len(by_state[OURS]), by_state[AWAITED]

    def _attempt_awaited(self, pipe: Pipeline, end: Ending) -> int:
        """A row that other RQ jobs depend on: RQ's own code releases them in the transaction that ends it."""
        if self._look(pipe, [end]) == [NOT_OURS]:
            return 0
        job = SafeJob.fetch(end.lease.job_id, connection=self._connection, serializer=Serializer)
        job._status = ENDS[end.outcome][0]  # what the dependents shall see
        queue = safe_queue(end.lease.queue, self._connection)
        ready = queue.move_dependents_to_ready(job, pipeline=pipe, refresh_job_status=False)
        if not pipe.explicit_transaction:
            pipe.multi()
        self._record(pipe, [end])
        pipe.execute()
        queue.enqueue_ready_jobs_by_queue(ready)
        return 1

    def _look(self, pipe: Pipeline, endings: Sequence[Ending]) -> list[int]:
        """Whose each row is, and WATCH that it stays so."""
        keys = [key for end in endings for key in (end.lease.job_key, f"{end.lease.job_key}:dependents")]
        pipe.watch(*keys)  # type: ignore[no-untyped-call]
        owned: list[int] = pipe.eval(scripts.OWNED, 0, *self._arguments(endings))
        return owned

    def _record(self, pipe: Pipeline, endings: Sequence[Ending]) -> None:
        if not endings:
            return
        now = utc_now()
        given: list[str | bytes | int] = [
            RQ_KEY_PREFIX,
            self._entry.name,
            repr(now.timestamp()),
            utcformat(now),
        ]
        for end in endings:
            given += end.fields()
        pipe.eval(scripts.END, 0, *given)
        self._log(pipe, endings)
        completed = sum(end.result.failure is None for end in endings)
        seconds = sum(max(0.0, now.timestamp() - end.lease.started_at) for end in endings)
        self._entry.tally(pipe, completed, len(endings) - completed, seconds)

    def _log(self, pipe: Pipeline, endings: Sequence[Ending]) -> None:
        for batch_id, ends in _by_batch(endings).items():
            rows = [end.result for end in ends]
            completed = [row for row in rows if row.failure is None]
            if completed:
                self._store.log_completed(
                    pipe,
                    batch_id,
                    [row.job_id for row in completed],
                    prompt_tokens=sum(row.usage.prompt_tokens for row in completed if row.usage),
                    completion_tokens=sum(row.usage.completion_tokens for row in completed if row.usage),
                    started_at=min(end.lease.started_at for end in ends),
                )
            if len(completed) < len(rows):
                self._store.log_failed(pipe, batch_id, [row for row in rows if row.failure is not None])

    def _arguments(self, endings: Iterable[Ending]) -> list[str]:
        return [RQ_KEY_PREFIX, self._entry.name, *names(end.lease for end in endings)]


def _by_batch(endings: Sequence[Ending]) -> dict[str, list[Ending]]:
    """Endings by batch; a foreign job's belongs to none. The log takes only rows the batch accepted."""
    batches: dict[str, list[Ending]] = defaultdict(list)
    for end in endings:
        try:
            batches[parse_job_id(end.lease.job_id)[0]].append(end)
        except WireError:
            continue
    return batches
