"""Ends of rows, read from a batch's log exactly once and in order, each with its result.

Owns cursors, waiting for the next end, input order, fetching results from RQ and deleting them there. Must
not know files.
"""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from redis.exceptions import RedisError, ResponseError
from rq.job import Job
from rq.registry import CanceledJobRegistry, FailedJobRegistry, FinishedJobRegistry
from rq.results import Result as JobResult

from producer.batch import BatchStatus, Record
from producer.cursor import START
from producer.errors import WireError
from producer.rules import show
from producer.store import LogEntry, Serializer, Store, as_text, ids_key, lines_key
from producer.sweep import Sweeper
from producer.wire import Failure, Result, parse_job_id

PAGE_ROWS = 500
BLOCK_MS = 1000  # how long to wait for an end before looking whether any row was lost
MANY_PAGES = 4  # of rows without a name, then the names of all rows are kept: about 135 bytes a row
MANY_WALKS = 32  # then, too: with ten million rows each takes 16 s
PAUSE_SECONDS = 0.1  # after a page that was not full and may not be the last: 3 ms go into any page

Place = tuple[int, int]  # file, line
NEVER: Place = (-1, -1)  # no row stands there


@dataclass(frozen=True, slots=True)
class Page:
    """Some rows' results, possibly none. ``cursor``: where to read on; ``status``: the batch just before."""

    results: list[Result]
    cursor: str
    status: BatchStatus


def pages(store: Store, record: Record, cursor: str, *, follow: bool) -> Iterator[Page]:
    """Results in order of ending from ``cursor`` (START, or an earlier page's) to the log's end.

    ``follow``: until the batch is over; about once a second a page may be empty, with a fresh status.
    """
    names = Names(store, record)
    for entries, status in _log(store, record, cursor, follow):
        cursor = entries[-1].cursor if entries else cursor
        yield Page(fetch(store, names, entries), cursor, status)


def ordered_pages(store: Store, record: Record, cursor: str, *, follow: bool) -> Iterator[Page]:
    """Results in input order. The cursor is the place of the last row given ("{file}-{line}"), or START."""
    order, names = InputOrder(store, record, _place(cursor)), Names(store, record)
    for entries, status in _log(store, record, START, follow):
        ready = order.arrange(entries)
        for start in range(0, max(1, len(ready)), PAGE_ROWS):
            part = ready[start : start + PAGE_ROWS]
            cursor = "{}-{}".format(*_place_of(part[-1])) if part else cursor
            yield Page(fetch(store, names, part), cursor, status)


def _log(
    store: Store, record: Record, cursor: str, follow: bool
) -> Iterator[tuple[list[LogEntry], BatchStatus]]:
    sweeper = Sweeper(store, record)
    while True:
        status = store.status(record.id)  # before the log: if it says "over", the log is complete
        wait = follow and not status.is_over
        entries = store.read_log(record.id, cursor, PAGE_ROWS, BLOCK_MS if wait else None)
        yield [entry for entry in entries if _is_row(entry, record)], status
        if entries:
            cursor = entries[-1].cursor
            if wait and len(entries) < min(PAGE_ROWS, status.waiting):
                time.sleep(PAUSE_SECONDS)
        elif not wait:
            return
        else:
            sweeper.step(cancel=status.state == "cancelled")


def _is_row(entry: LogEntry, record: Record) -> bool:
    """Whether it tells of a row of the batch; whoever may queue rows may also write something else there."""
    try:
        batch_id, file, _ = parse_job_id(entry.job_id)
    except WireError:
        return False
    return batch_id == record.id and file < len(record.files)


def failed(store: Store, record: Record) -> dict[Place, str]:
    """Where the rows stand that ended without an answer, and why: the error codes in the log itself."""
    cursor, found = START, dict[Place, str]()
    while entries := store.read_log(record.id, cursor, PAGE_ROWS):
        rows = (entry for entry in entries if entry.inline is not None and _is_row(entry, record))
        failures = ((_place_of(entry), _decode(entry, None).failure) for entry in rows)
        found.update((place, failure.code) for place, failure in failures if failure)
        cursor = entries[-1].cursor
    return found


def fetch(store: Store, names: Names, entries: Sequence[LogEntry]) -> list[Result]:
    """The results of these log entries, in their order. One round trip for all that lie in RQ."""
    distant = [entry.job_id for entry in entries if entry.inline is None]
    with store.connection.pipeline(transaction=False) as pipe:
        for job_id in distant:
            pipe.xrevrange(JobResult.get_key(job_id), count=1)  # type: ignore[no-untyped-call]
        answers = pipe.execute(raise_on_error=False) if distant else []
    if away := [answer for answer in answers if isinstance(answer, RedisError) and not _is_refusal(answer)]:
        raise away[0]
    streams = dict(zip(distant, answers, strict=True))
    found = [_decode(entry, streams.get(entry.job_id)) for entry in entries]
    names.learn({what.job_id for what in found if what.custom_id == what.job_id})
    return [
        replace(what, custom_id=names.of(what.job_id)) if what.custom_id == what.job_id else what
        for what in found
    ]


def release(store: Store, record: Record, job_ids: Sequence[str]) -> None:
    """Delete the RQ jobs of ended rows and their results. Failed rows' results stand in the log, and stay."""
    if not job_ids:
        return
    keys = [key for job_id in job_ids for key in (Job.key_for(job_id), JobResult.get_key(job_id))]  # type: ignore[no-untyped-call]
    with store.connection.pipeline(transaction=False) as pipe:
        for registry in (FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry):
            pipe.zrem(registry(record.queue, connection=store.connection).key, *job_ids)
        pipe.unlink(*keys)
        pipe.execute()


def _is_refusal(error: RedisError) -> bool:
    """Of one command on one key that somebody made into something else."""
    return type(error) is ResponseError


def _decode(entry: LogEntry, stream: Any) -> Result:
    """The row's result, or why there is none to be read; where a row's name could not be read, its job id."""
    if entry.inline is None and not stream:
        return _failed(
            entry.job_id, "batch_expired", "the row completed, but its result is no longer in Redis"
        )
    try:
        # RQ's Result.restore would do, but spends more time on the type of our serializer than on the result.
        encoded = b64decode(stream[0][1][b"return_value"]) if entry.inline is None else entry.inline
        result = Result.decode(Serializer.loads(encoded))
        if result.job_id != entry.job_id:
            raise WireError(f"it belongs to row {show(result.job_id)}")
        return result
    except (WireError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = stream if isinstance(stream, RedisError) else error
        return _failed(entry.job_id, "internal_error", f"the row's result in Redis cannot be read: {why}")


def _failed(job_id: str, code: str, message: str) -> Result:
    return Result(
        custom_id=job_id, job_id=job_id, created=int(time.time()), failure=Failure.of(code, message)
    )


class Names:
    """Custom ids of rows whose results do not say them, for one reader of the batch."""

    def __init__(self, store: Store, record: Record) -> None:
        self._store = store
        self._record = record
        self._known: dict[bytes, bytes] = {}  # by place, as Redis has it; b"": nobody knows it
        self._sought = 0
        self._walks = 0

    def of(self, job_id: str) -> str:
        """The row's custom id; its job id where nobody knows it."""
        return as_text(self._known.get(self._place(job_id), b"")) or job_id

    def learn(self, job_ids: Set[str]) -> None:
        """Walk over the batch's ids for those not known yet.

        Once many were, a walk keeps all it sees: the batch is read after its release, and every row is such.
        """
        wanted = set(map(self._place, job_ids)) - self._known.keys()
        if not wanted:
            return
        self._sought += len(wanted)
        self._walks += 1
        keeps_all = self._sought > MANY_PAGES * PAGE_ROWS or self._walks > MANY_WALKS
        self._known.update(dict.fromkeys(wanted, b""))  # whom nobody knows is not sought again
        pairs: Any = self._store.connection.hscan_iter(ids_key(self._record.id), count=PAGE_ROWS)
        for name, place in pairs:
            if keeps_all or place in wanted:
                self._known[place] = name

    def _place(self, job_id: str) -> bytes:
        return job_id.removeprefix(f"{self._record.id}-").encode()


class InputOrder:
    """Holds back log entries (not results) of rows whose predecessors have not ended yet."""

    def __init__(self, store: Store, record: Record, after: Place) -> None:
        self._store = store
        self._record = record
        self._after = after  # the last row given
        self._ahead: dict[Place, LogEntry] = {}
        self._expected: Iterator[Place] = iter(())
        self._next: Place | None = None

    def arrange(self, entries: Sequence[LogEntry]) -> list[LogEntry]:
        """Take what came; give what is due, in input order."""
        arrived = ((_place_of(entry), entry) for entry in entries)
        self._ahead.update((place, entry) for place, entry in arrived if place > self._after)
        ready = []
        while self._ahead and (place := self._due()) in self._ahead:
            ready.append(self._ahead.pop(place))
            self._after, self._next = place, None
        return ready

    def _due(self) -> Place:
        """The accepted row after the last one given; NEVER: what is ahead was not accepted, but forged."""
        if self._next is None:
            self._next = next(self._expected, None)
        if self._next is None:
            self._expected = self._accepted_after(*self._after)
            self._next = next(self._expected, None)
        return self._next or NEVER

    def _accepted_after(self, file: int, line: int) -> Iterator[Place]:
        """Accepted rows as Redis knows them now: one snapshot of all files, for lines are accepted in order.

        Read file by file, a second file begun meanwhile would hide the rest of the first.
        """
        bases = {file: (line + 1) // 8} | dict.fromkeys(range(file + 1, len(self._record.files)), 0)
        with self._store.connection.pipeline() as pipe:
            for number, base in bases.items():
                pipe.getrange(lines_key(self._record.id, number), base, -1)
            snapshot: list[bytes] = pipe.execute()
        for (number, base), bitmap in zip(bases.items(), snapshot, strict=True):
            for place in ((number, 8 * base + offset) for offset in _set_bits(bitmap)):
                if place > (file, line):
                    yield place


def _set_bits(bitmap: bytes) -> Iterator[int]:
    """Offsets of the bits that are set, counted as SETBIT counts: from a byte's high end."""
    for index, byte in enumerate(bitmap):
        if byte:
            yield from (8 * index + bit for bit in range(8) if byte & (0x80 >> bit))


def _place_of(entry: LogEntry) -> Place:
    _, file, line = parse_job_id(entry.job_id)
    return file, line


def _place(cursor: str) -> Place:
    file, _, line = cursor.partition("-")
    return int(file), int(line or 0)
