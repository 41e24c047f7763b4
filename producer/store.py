"""THE KEYSPACE: our own keys in Redis, all under one prefix, beside RQ's.

Owns key names, batch records and counts, the completion log, worker reports, the serializer of RQ jobs.
enqueue.py and sweep.py change several of RQ's keys and ours in one transaction, by the names drawn here.
Must not know files, terminals or how a row is run.

    livebatch:batches               zset    batch id -> created (unix seconds)
    livebatch:batch:{id}            hash    record (JSON), state open|closed|cancelled, files, keep_seconds,
                                            expires (unix seconds; where the batch does)
    livebatch:batch:{id}:counts     hash    rows, completed, failed, cancelled, prompt_tokens,
                                            completion_tokens; queued_at, started_at, completed_at:
                                            unix seconds, see BatchStatus
    livebatch:batch:{id}:ids        hash    custom_id -> "{file}-{line}"; the job id is "{id}-{file}-{line}"
    livebatch:batch:{id}:lines:{f}  bitmap  lines of file f that were accepted (bad lines too)
    livebatch:batch:{id}:ended:{f}  bitmap  lines of file f whose end stands in the log
    livebatch:batch:{id}:log        stream  one entry a row, in order of ending: j = job id;
                                            r = encoded Result, only where the RQ job has none to return
    livebatch:workers               set     worker names
    livebatch:worker:{name}         hash    what the worker last said, with a TTL
    livebatch:commands              pubsub  {"command": "cancel", "batch": id}, and nothing else

Counts stand apart from the batch's hash because a producer WATCHes the hash (it must see a cancel) while
workers count up all the time. A batch's keys start to age when its last row has ended.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from producer import scripts
from producer.batch import BatchStatus, Record, State, WorkerReport
from producer.errors import StoreError, UsageError
from producer.wire import dumps

if TYPE_CHECKING:
    from redis import Redis
    from redis.client import Pipeline

    from producer.wire import Result

Counts = Mapping[bytes | str, bytes | str]

PREFIX = "livebatch:"
BATCHES = PREFIX + "batches"
WORKERS = PREFIX + "workers"
COMMANDS = PREFIX + "commands"


def batch_key(batch_id: str) -> str:
    return f"{PREFIX}batch:{batch_id}"


def counts_key(batch_id: str) -> str:
    return f"{PREFIX}batch:{batch_id}:counts"


def ids_key(batch_id: str) -> str:
    return f"{PREFIX}batch:{batch_id}:ids"


def lines_key(batch_id: str, file: int) -> str:
    return f"{PREFIX}batch:{batch_id}:lines:{file}"


def log_key(batch_id: str) -> str:
    return f"{PREFIX}batch:{batch_id}:log"


def worker_key(name: str) -> str:
    return f"{PREFIX}worker:{name}"


def as_text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One row's end. ``cursor``: read on from here. ``inline``: the Result where the RQ job returns none."""

    cursor: str
    job_id: str
    inline: bytes | None


class Serializer:
    """RQ's serializer for everything of ours: compact JSON in UTF-8, never pickle.

    ``dumps`` raises ValueError on NaN, Infinity and lone surrogates.
    """

    @staticmethod
    def dumps(value: Any) -> bytes:
        return dumps(value).encode()

    @staticmethod
    def loads(data: bytes) -> Any:
        return json.loads(data)


class Store:
    """Our side of one Redis. ``connection`` answers in bytes (redis-py's default, and RQ's need)."""

    def __init__(self, connection: Redis) -> None:
        self.connection = connection

    # Batches.

    def create(self, record: Record) -> Record:
        """Write the batch's record down, unless there is one: the record that stands is returned."""
        key = batch_key(record.id)
        with self.connection.pipeline() as pipe:
            pipe.hsetnx(key, "record", record.encode())
            pipe.hsetnx(key, "state", "open")
            pipe.hsetnx(key, "files", str(len(record.files)))
            pipe.hsetnx(key, "keep_seconds", str(record.keep_seconds))
            if record.expires is not None:
                pipe.hsetnx(key, "expires", repr(record.expires))
            pipe.zadd(BATCHES, {record.id: record.created}, nx=True)
            pipe.hget(key, "record")
            return Record.decode(pipe.execute()[-1])

    def record(self, batch_id: str) -> Record:
        """Raises UsageError when there is no such batch."""
        text = self.connection.hget(batch_key(batch_id), "record") if batch_id.isascii() else None
        if text is None:
            raise no_such_batch(batch_id)
        return Record.decode(text)

    def set_state(self, batch_id: str, state: State) -> None:
        """Close an open batch (all its rows are there), or cancel one. Another change is not made."""
        self.connection.eval(scripts.SET_STATE, 1, batch_key(batch_id), state)

    def batch_ids(self) -> list[str]:
        """Newest first. Those that have aged away are forgotten."""
        names = [as_text(cast(bytes, name)) for name in self.connection.zrevrange(BATCHES, 0, -1)]
        gone = [name for name, state in zip(names, self.states(names), strict=True) if state is None]
        if gone:
            self.connection.zrem(BATCHES, *gone)
        return [name for name in names if name not in set(gone)]

    def statuses(
        self, batch_ids: Sequence[str], on_damaged: Callable[[str], None] | None = None
    ) -> list[BatchStatus]:
        """Of those batches that exist. One round trip.

        A batch that cannot be read is a StoreError, or left out where ``on_damaged`` is there to be told.
        """
        batch_ids = [batch_id for batch_id in batch_ids if batch_id.isascii()]  # the others cannot exist
        with self.connection.pipeline(transaction=False) as pipe:
            for batch_id in batch_ids:
                pipe.hmget(batch_key(batch_id), ["record", "state"])
                pipe.hgetall(counts_key(batch_id))
            answers = _answers(pipe)
        found = []
        for batch_id, head, counts in zip(batch_ids, answers[::2], answers[1::2], strict=True):
            try:
                found += [] if head and head[0] is None else [_status(head, counts)]
            except StoreError as error:
                if on_damaged is None:
                    raise
                on_damaged(f"batch {batch_id} is left out: {error}")
        return found

    def status(self, batch_id: str) -> BatchStatus:
        """Raises UsageError when there is no such batch."""
        for status in self.statuses([batch_id]):
            return status
        raise no_such_batch(batch_id)

    def read_log(self, batch_id: str, cursor: str, count: int, block_ms: int | None = None) -> list[LogEntry]:
        """Up to ``count`` ends of rows after ``cursor`` ("0": start); ``block_ms``: wait for the first."""
        answer: Any = self.connection.xread({log_key(batch_id): cursor}, count=count, block=block_ms)
        streams = answer.values() if isinstance(answer, dict) else [entries for _, entries in answer or []]
        return [
            LogEntry(as_text(entry_id), fields.get(b"j", b"").decode(errors="replace"), fields.get(b"r"))
            for entries in streams
            for entry_id, fields in entries
        ]

    def publish(self, command: Mapping[str, str]) -> None:
        """To every live worker."""
        self.connection.publish(COMMANDS, dumps(command))

    # The first two join the caller's transaction or pipeline.

    def log_failed(self, pipe: Pipeline, batch_id: str, results: Iterable[Result]) -> None:
        """These rows failed, or were cancelled (code "batch_cancelled"). The Results are kept in the log.

        A row that ended before keeps its first end: this call changes nothing.
        """
        rows = [part for result in results for part in (result.job_id, outcome(result), encode(result))]
        pipe.eval(scripts.LOG, 1, batch_key(batch_id), *rows)

    def report_worker(self, pipe: Pipeline, name: str, fields: Mapping[str, str], ttl_seconds: int) -> None:
        """What `producer status` shows of a worker until ``ttl_seconds`` from now."""
        mapping: dict[Any, Any] = dict(fields)
        pipe.sadd(WORKERS, name)
        pipe.hset(worker_key(name), mapping=mapping)
        pipe.expire(worker_key(name), ttl_seconds)

    def forget_worker(self, name: str) -> None:
        """The worker has ended and need not be shown until its report ages."""
        self.connection.delete(worker_key(name))
        self.connection.srem(WORKERS, name)

    def is_cancelled(self, batch_ids: Iterable[str]) -> set[str]:
        """Those of the batches that were cancelled: their rows must not run. One round trip."""
        wanted = list(dict.fromkeys(batch_ids))
        return {
            batch for batch, state in zip(wanted, self.states(wanted), strict=True) if state == "cancelled"
        }

    def states(self, batch_ids: Sequence[str]) -> list[State | None]:
        """None: no such batch (or it aged away, or is none). One round trip."""
        with self.connection.pipeline(transaction=False) as pipe:
            for batch_id in batch_ids:
                pipe.hget(batch_key(batch_id), "state")
            return [cast("State", as_text(state)) if state else None for state in _answers(pipe)]

    def workers(self) -> list[WorkerReport]:
        """Workers that reported lately, by name. The names of those that fell silent are forgotten."""
        names = sorted(as_text(name) for name in self.connection.smembers(WORKERS))
        with self.connection.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(worker_key(name))
            reports = dict(zip(names, pipe.execute(), strict=True))
        if silent := [name for name, fields in reports.items() if not fields]:
            self.connection.srem(WORKERS, *silent)
        return [
            WorkerReport(name, {as_text(key): as_text(value) for key, value in fields.items()})
            for name, fields in reports.items()
            if fields
        ]


def _answers(pipe: Pipeline) -> list[Any]:
    """What a pipeline answers, None for keys that somebody made into something else."""
    from redis.exceptions import ResponseError

    answers = pipe.execute(raise_on_error=False)
    for answer in answers:
        if isinstance(answer, Exception) and type(answer) is not ResponseError:
            raise answer
    return [None if isinstance(answer, ResponseError) else answer for answer in answers]


def no_such_batch(batch_id: str) -> UsageError:
    return UsageError(f"there is no batch {batch_id}: `producer list` shows those there are")


def _status(head: list[bytes | None] | None, counts: Counts | None) -> BatchStatus:
    if head is None or counts is None:
        raise StoreError("one of its keys in Redis is no hash")
    record = Record.decode(head[0] or b"")
    numbers = _numbers(record.id, counts)
    names = ("rows", "completed", "failed", "cancelled", "prompt_tokens", "completion_tokens")
    return BatchStatus(
        id=record.id,
        queue=record.queue,
        state=cast("State", as_text(head[1] or b"open")),
        created=record.created,
        busy_seconds=max(0.0, numbers.get("completed_at", 0.0) - numbers.get("started_at", 0.0)),
        queued_at=numbers.get("queued_at", record.created),
        **{name: int(numbers.get(name, 0)) for name in names},
    )


def _numbers(batch_id: str, counts: Counts) -> dict[str, float]:
    try:
        numbers = {as_text(name): float(value) for name, value in counts.items()}
        if all(map(math.isfinite, numbers.values())):
            return numbers
    except ValueError:
        pass
    raise StoreError(f"the counts of batch {batch_id} in Redis are damaged")


def outcome(result: Result) -> str:
    """The count a result belongs to."""
    if result.failure is None:
        return "completed"
    return "cancelled" if result.failure.code == "batch_cancelled" else "failed"


def encode(result: Result) -> bytes:
    return Serializer.dumps(result.encode())
