"""Rows into the queue, each exactly once, however often the same lines are submitted and by how many.

Owns the transaction that turns a chunk of rows into RQ jobs, accepted lines, custom ids and counts at once.
Must not know files or terminals.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, cast

from redis.client import Pipeline
from redis.exceptions import OutOfMemoryError, WatchError
from rq import Queue, Retry
from rq.job import Job

from producer.backlog import ROW_BYTES, Backlog
from producer.batch import Progress, Record
from producer.connection import MEMORY_FULL, memory_used
from producer.errors import RowError, UsageError
from producer.jsonl import BadRow, duplicate_row, file_names, refused_row
from producer.sizes import show_bytes
from producer.store import Serializer, Store, as_text, batch_key, counts_key, ids_key, lines_key
from producer.wire import FUNCTION, Request, Result

Row = Request | BadRow

CHUNK_ROWS = 500  # one MULTI: 20,000 rows would block every other client for 84 ms, 500 for about 2
CHUNK_BYTES = 8 << 20  # of prompts; a thousand 1 MB prompts must not become one transaction
HOLD_SECONDS = 0.2  # between looks at a full Redis
ROOMY = 0.5  # of maxmemory; a row that is refused with less in use, so many times in a row, is too large
REFUSALS = 3
LARGE_BYTES = 1 << 20  # a smaller row always waits: others filled Redis, and their transactions are gone
NEARLY_FULL = "Redis is nearly full: waiting for room, which results collected with --release make"
FOREVER = Retry(max=10**6)  # only we fail rows: a lease that ran out must never end one


def chunks(rows: Iterable[Row], max_queued_bytes: int | None = None) -> Iterator[list[Row]]:
    """Cut a stream of rows into transactions: bounded in rows and in bytes, never across files.

    Under a bound for what may wait, a transaction is at most a quarter of it: else rows come in gulps.
    """
    most_rows, most_bytes = CHUNK_ROWS, CHUNK_BYTES
    if max_queued_bytes is not None:
        most_rows = max(1, min(CHUNK_ROWS, max_queued_bytes // (4 * ROW_BYTES)))
        most_bytes = min(CHUNK_BYTES, max_queued_bytes // 4)
    for _, rows_of_file in groupby(rows, key=lambda row: row.file):
        chunk: list[Row] = []
        size = 0
        for row in rows_of_file:
            chunk.append(row)
            size += _weight(row)
            if len(chunk) >= most_rows or size >= most_bytes:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk


def _weight(row: Row) -> int:
    """About the row's bytes: what a prompt costs, without encoding it twice."""
    if isinstance(row, BadRow):
        return 0
    return len(row.prompt) if row.prompt is not None else len(repr(row.messages or row.prompt_token_ids))


class Enqueuer:
    """Adds rows to one batch. ``on_hold`` is told a few times a second why no more can be added yet.

    ``max_queued_bytes`` bounds what waits of the batch. A transaction that is larger goes in alone.
    """

    def __init__(
        self,
        store: Store,
        record: Record,
        on_hold: Callable[[str], None],
        max_queued_bytes: int | None = None,
    ) -> None:
        self._store = store
        self._record = record
        self._on_hold = on_hold
        self._max_queued_bytes = max_queued_bytes
        self._backlog = Backlog()
        self._queue = Queue(record.queue, connection=store.connection, serializer=Serializer)

    def add(self, chunk: Sequence[Row]) -> Progress:
        """Add a chunk's rows (one file, lines ascending) that are not in the batch yet.

        Raises UsageError when the batch was cancelled meanwhile. Safe to repeat: after a lost connection the
        accepted lines tell whether the transaction had happened.
        """
        refusals = 0
        while True:
            while why := self._why_hold(chunk):
                self._hold(why)
                refusals = 0
            try:
                return self._transact(chunk)
            except OutOfMemoryError:  # though there was room a moment ago
                if len(chunk) > 1:
                    return self._halves(chunk)
            refusals = refusals + 1 if memory_used(self._store.connection) < ROOMY else 0
            if refusals >= REFUSALS:
                chunk = [self._too_large(row) for row in chunk]
            self._hold(NEARLY_FULL)

    def _transact(self, chunk: Sequence[Row]) -> Progress:
        while True:
            with self._store.connection.pipeline() as pipe:
                try:
                    return self._attempt(pipe, chunk)
                except WatchError:  # another producer of this batch, a cancel, or a lost connection
                    self._store.connection.ping()  # waits where it was that: WATCH alone is never refused

    def _halves(self, chunk: Sequence[Row]) -> Progress:
        """In two transactions, of which one may fit where both together did not."""
        middle = len(chunk) // 2
        done = self.add(chunk[:middle])
        done.add(self.add(chunk[middle:]))
        return done

    def _too_large(self, row: Row) -> Row:
        """A large row for which a Redis with room has none is a bad row: others behind it do not wait."""
        if isinstance(row, BadRow) or _weight(row) < LARGE_BYTES:
            return row
        text = f"Redis has no room for a row of this size ({show_bytes(_weight(row))}) in its maxmemory"
        return refused_row(row, RowError("line_too_long", text), self._titles)

    def _why_hold(self, chunk: Sequence[Row]) -> str:
        """What to wait for before the chunk is added; "" for nothing."""
        if memory_used(self._store.connection) > MEMORY_FULL:
            return NEARLY_FULL
        if self._max_queued_bytes is None:
            return ""
        waiting = self._store.status(self._record.id).waiting
        queued, more = self._backlog.bytes(waiting), sum(map(_weight, chunk)) + ROW_BYTES * len(chunk)
        if not queued or queued + more <= self._max_queued_bytes:
            return ""
        return (
            f"{waiting:,} rows wait in Redis, which is what --max-queued-bytes allows: going on as they end"
        )

    def _hold(self, why: str) -> None:
        self._on_hold(why)
        time.sleep(HOLD_SECONDS)  # Redis tells nobody when memory is free again

    def _attempt(self, pipe: Pipeline, chunk: Sequence[Row]) -> Progress:
        batch, lines = self._record.id, lines_key(self._record.id, chunk[0].file)
        pipe.watch(batch_key(batch), ids_key(batch), lines)  # type: ignore[no-untyped-call]
        self._refuse_if_cancelled(pipe.hget(batch_key(batch), "state"))
        base, last = (
            chunk[0].line // 8,
            chunk[-1].line // 8,
        )  # bytes of the bitmap; WATCHed, so read-modify-write
        accepted = bytearray(cast(bytes, pipe.getrange(lines, base, last)))
        accepted.extend(bytes(last - base + 1 - len(accepted)))
        new, before = list[Row](), list[Row]()
        for row in chunk:
            (before if _accept(accepted, row.line - 8 * base) else new).append(row)
        (good, bad), sound = self._split(pipe, new), self._sound(pipe, before)
        pipe.multi()
        size = sum(map(_weight, before))
        if new:
            pipe.setrange(lines, base, bytes(accepted))
            pipe.hincrby(counts_key(batch), "rows", len(new))
            size += self._queue_rows(pipe, good)
            self._store.log_failed(pipe, batch, bad)
        pipe.hset(counts_key(batch), "queued_at", repr(time.time()))
        pipe.execute()
        self._backlog.add(len(chunk) - len(bad), size)
        return Progress(len(good), sound, len(chunk) - len(good) - sound)

    def _refuse_if_cancelled(self, state: bytes | str | None) -> None:
        if state is None or as_text(state) == "cancelled":
            what = "has vanished from Redis" if state is None else "was cancelled"
            raise UsageError(f"batch {self._record.id} {what}: submit under a new batch id")

    def _split(self, pipe: Pipeline, rows: Sequence[Row]) -> tuple[list[Request], list[Result]]:
        """Rows to queue, and the results of rows that cannot be: bad lines, and custom ids already taken."""
        requests = [row for row in rows if isinstance(row, Request)]
        bad = [row for row in rows if isinstance(row, BadRow)]
        first_of = self._taken(pipe, [request.custom_id for request in requests])
        good = []
        for request in requests:
            first = first_of.setdefault(request.custom_id, request.job_id)
            if first == request.job_id:
                good.append(request)
            else:
                bad.append(duplicate_row(request, first, self._titles))
        return good, [row.result(int(time.time())) for row in bad]

    def _sound(self, pipe: Pipeline, rows: Sequence[Row]) -> int:
        """How many of these accepted rows were queued then: no bad lines, and their custom ids are theirs."""
        requests = [row for row in rows if isinstance(row, Request)]
        owners = self._taken(pipe, [request.custom_id for request in requests])
        return sum(owners.get(request.custom_id) == request.job_id for request in requests)

    def _taken(self, pipe: Pipeline, names: Sequence[str]) -> dict[str, str]:
        """Which of these custom ids the batch has already, and whose (job ids) they are."""
        places = pipe.hmget(ids_key(self._record.id), names) if names else []
        found = zip(names, places, strict=True)
        return {name: f"{self._record.id}-{as_text(place)}" for name, place in found if place is not None}

    def _queue_rows(self, pipe: Pipeline, requests: Sequence[Request]) -> int:
        """What RQ's ``enqueue_many`` does, at a third of its cost: rows of a batch differ in three fields.

        Returns the bytes of their payloads, packed.
        """
        if not requests:
            return 0
        job, size = self._blank(), 0
        common = job.to_dict()
        for request in requests:
            job.args = (request.encode(),)
            data = zlib.compress(job.data)
            size += len(data)
            own = {"data": data, "description": self._description(request)}
            pipe.hset(Job.key_for(request.job_id), mapping=common | own)
        pipe.sadd(Queue.redis_queues_keys, self._queue.key)
        pipe.rpush(self._queue.key, *[request.job_id for request in requests])
        places: dict[Any, Any] = {row.custom_id: f"{row.file}-{row.line}" for row in requests}
        pipe.hset(ids_key(self._record.id), mapping=places)
        return size

    def _blank(self) -> Job:
        """A job queued now, without what its row adds."""
        job = self._queue.create_job(
            FUNCTION,
            timeout=-1,  # a row's deadline is the worker's to keep, per row; RQ's is one alarm a process
            result_ttl=self._record.keep_seconds,
            failure_ttl=self._record.keep_seconds,
            retry=FOREVER,
        )
        job.enqueued_at = job.created_at
        return job

    def _description(self, request: Request) -> str:
        return f"{self._titles[request.file]}:{request.line}"

    @cached_property
    def _titles(self) -> list[str]:
        return file_names([file.path for file in self._record.files])


def _accept(bitmap: bytearray, offset: int) -> bool:
    """Set a bit (counted as SETBIT counts, from a byte's high end); whether it was set before."""
    byte, mask = offset >> 3, 0x80 >> (offset & 7)
    was = bool(bitmap[byte] & mask)
    bitmap[byte] |= mask
    return was
