"""Rows into the queue, each exactly once, however often the same lines are submitted and by how many.

Owns the transaction that turns a chunk of rows into RQ jobs, accepted lines, custom ids and counts at once.
Must not know files or terminals.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, cast

from redis.client import Pipeline
from redis.exceptions import OutOfMemoryError, WatchError
from rq import Queue, Retry
from rq.queue import EnqueueData

from producer.batch import Progress, Record
from producer.connection import MEMORY_FULL, memory_used
from producer.errors import UsageError
from producer.jsonl import BadRow, duplicate_row
from producer.rules import clean
from producer.store import Serializer, Store, as_text, batch_key, counts_key, ids_key, lines_key
from producer.wire import FUNCTION, Request, Result

Row = Request | BadRow

CHUNK_ROWS = 500  # one MULTI: 20,000 rows would block every other client for 84 ms, 500 for about 2
CHUNK_BYTES = 8 << 20  # of prompts; a thousand 1 MB prompts must not become one transaction
HOLD_SECONDS = 1.0  # between looks at a full Redis
FOREVER = Retry(max=10**6)  # only we fail rows: a lease that ran out must never end one


def chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Cut a stream of rows into transactions: bounded in rows and in bytes, never across files."""
    for _, rows_of_file in groupby(rows, key=lambda row: row.file):
        chunk: list[Row] = []
        size = 0
        for row in rows_of_file:
            chunk.append(row)
            size += _weight(row)
            if len(chunk) >= CHUNK_ROWS or size >= CHUNK_BYTES:
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
    """Adds rows to one batch. ``on_hold`` is called about once a second while Redis is nearly full."""

    def __init__(self, store: Store, record: Record, on_hold: Callable[[], None]) -> None:
        self._store = store
        self._record = record
        self._on_hold = on_hold
        self._queue = Queue(record.queue, connection=store.connection, serializer=Serializer)

    def add(self, chunk: Sequence[Row]) -> Progress:
        """Add a chunk's rows (one file, lines ascending) that are not in the batch yet.

        Raises UsageError when the batch was cancelled meanwhile. Safe to repeat: after a lost connection the
        accepted lines tell whether the transaction had happened.
        """
        while memory_used(self._store.connection) > MEMORY_FULL:
            self._hold()
        while True:
            with self._store.connection.pipeline() as pipe:
                try:
                    return self._attempt(pipe, chunk)
                except WatchError:  # another producer of this batch, a cancel, or a lost connection
                    continue
                except OutOfMemoryError:
                    self._hold()

    def _hold(self) -> None:
        self._on_hold()
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
        new = [row for row in chunk if not _accept(accepted, row.line - 8 * base)]
        good, bad = self._split(pipe, new)
        pipe.multi()
        if new:
            pipe.setrange(lines, base, bytes(accepted))
            pipe.hincrby(counts_key(batch), "rows", len(new))
            self._queue_rows(pipe, good)
            self._store.log_failed(pipe, batch, bad)
        pipe.hset(counts_key(batch), "queued_at", repr(time.time()))
        pipe.execute()
        return Progress(len(good), len(chunk) - len(new), len(bad))

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
                bad.append(duplicate_row(request, first))
        return good, [row.result(int(time.time())) for row in bad]

    def _taken(self, pipe: Pipeline, names: Sequence[str]) -> dict[str, str]:
        """Which of these custom ids the batch has already, and whose (job ids) they are."""
        places = pipe.hmget(ids_key(self._record.id), names) if names else []
        found = zip(names, places, strict=True)
        return {name: f"{self._record.id}-{as_text(place)}" for name, place in found if place is not None}

    def _queue_rows(self, pipe: Pipeline, requests: Sequence[Request]) -> None:
        if not requests:
            return
        self._queue.enqueue_many([self._job(request) for request in requests], pipeline=pipe)
        places: dict[Any, Any] = {row.custom_id: f"{row.file}-{row.line}" for row in requests}
        pipe.hset(ids_key(self._record.id), mapping=places)

    def _job(self, request: Request) -> EnqueueData:
        return Queue.prepare_data(
            FUNCTION,
            args=(request.encode(),),
            kwargs={},
            timeout=-1,  # a row's deadline is the worker's to keep, per row; RQ's is one alarm a process
            result_ttl=self._record.keep_seconds,
            failure_ttl=self._record.keep_seconds,
            # A file's name need not be Unicode, what Redis is sent must be.
            description=f"{clean(self._record.files[request.file].path, 400)}:{request.line}",
            job_id=request.job_id,
            retry=FOREVER,
        )


def _accept(bitmap: bytearray, offset: int) -> bool:
    """Set a bit (counted as SETBIT counts, from a byte's high end); whether it was set before."""
    byte, mask = offset >> 3, 0x80 >> (offset & 7)
    was = bool(bitmap[byte] & mask)
    bitmap[byte] |= mask
    return was
