"""Rows that no worker will come to are ended here or queued again, so that no batch hangs short of its end.

Owns cancelling what waits, ending it when the batch expires, giving up what somebody else deleted, failed or
cancelled (a dashboard, `rq empty`), and queueing what waits and is in no list (whose list was deleted). Walks
the batch's ids page by page; Lua touches a row only if it still is where it was seen. Must not know files or
terminals.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

from redis.exceptions import ResponseError
from rq.job import Job
from rq.registry import CanceledJobRegistry

from producer import scripts
from producer.batch import Record
from producer.errors import StoreError
from producer.store import Store, as_text, batch_key, encode, ids_key, outcome
from producer.wire import CANCELLED, EXPIRED, Failure, Result

log = logging.getLogger(__name__)

PAGE_ROWS = 500
MANY_PAGES = 20  # looked at by one step at most: so many rows at a time are put back
STEP_SECONDS = 0.05  # where nothing is put back: a twentieth of a follower's idle second
WAITING = ("queued", "abandoned")
# Other rows are lost: ended in RQ, and not by our worker, which writes the log; or what none of ours can be.
SOUND = ("", "started", *WAITING)
# So long workers have time to come back to abandoned rows, after an outage of Redis too, or to put them back.
PATIENCE_SECONDS = 60.0
LOOKS = 200_000  # entries of the queue's list that one step may look at: about 7 ms of Redis


class Sweeper:
    """Walks one batch again and again, some pages at a time: ``step`` costs about STEP_SECONDS."""

    def __init__(self, store: Store, record: Record) -> None:
        from rq import Queue
        from rq.defaults import RQ_KEY_PREFIX

        self._connection = store.connection
        self._record = record
        self._prefixes = [Job.redis_job_namespace_prefix, f"{RQ_KEY_PREFIX}:executions:"]
        self._canceled = CanceledJobRegistry(record.queue, connection=store.connection).key
        self._queue = f"{Queue.redis_queue_namespace_prefix}{record.queue}"
        self._abandoned: dict[str, float] = {}  # rows so seen, and since when (monotonic)
        self._has_said = False
        self._cursor = 0

    def step(self, *, cancel: bool = False) -> int:
        """End what is lost on the next pages, with ``cancel`` or past the batch's time also what waits.

        What waits and is nowhere to be taken from is queued again; then the pages after it are looked at,
        too, however long that takes. Returns the rows ended. Raises StoreError where rows cannot be queued.
        """
        ended, till = 0, time.monotonic() + STEP_SECONDS
        for _ in range(MANY_PAGES):
            more, back = self._page(cancel)
            ended += more
            if not self._cursor or (not back and time.monotonic() > till):
                break
        return ended

    def sweep(self, *, cancel: bool = False) -> int:
        """All pages once."""
        self._cursor = 0
        ended = self.step(cancel=cancel)
        while self._cursor:
            ended += self.step(cancel=cancel)
        return ended

    def _page(self, cancel: bool) -> tuple[int, int]:
        """Look at the next page. Returns the rows ended and the rows queued again."""
        self._cursor, page = cast(
            "tuple[int, dict[bytes, bytes]]",
            self._connection.hscan(ids_key(self._record.id), self._cursor, count=PAGE_ROWS),
        )
        names = {
            f"{self._record.id}-{place.decode()}": name.decode(errors="replace")
            for name, place in page.items()
            if _is_place(place)
        }
        if not names:
            return 0, 0
        answer: Any = self._connection.eval(
            scripts.WHERE, 1, batch_key(self._record.id), *self._prefixes, *names
        )
        where = dict(zip(names, map(as_text, answer), strict=True))
        ending = self._ending(cancel)
        ended = self._end(self._doomed(names, where, ending))
        return ended, self._put_back(where) if ending is None else 0

    def _ending(self, cancel: bool) -> Failure | None:
        """What becomes of rows that wait; None: they shall run."""
        expires = self._record.expires
        is_late = expires is not None and time.time() >= expires
        return CANCELLED if cancel else EXPIRED if is_late else None

    def _doomed(
        self, names: Mapping[str, str], where: Mapping[str, str], ending: Failure | None
    ) -> Iterator[tuple[str, Result]]:
        """(where its job is, its result) of each row of the page that nobody will finish."""
        for job_id, place in where.items():
            if place not in SOUND:
                yield place, self._result(job_id, names[job_id], _lost(place))
            elif ending and place in WAITING:
                yield place, self._result(job_id, names[job_id], ending)

    def _put_back(self, where: Mapping[str, str]) -> int:
        """Queue the waiting rows of the page that are in no list; where that is long, some are looked up."""
        rows = [row for row in where.items() if row[1] == "queued" or self._is_long_abandoned(*row)]
        if not rows:
            return 0
        given = [part for row in random.sample(rows, len(rows)) for part in row]
        keys = [batch_key(self._record.id), self._queue]
        try:
            answer: Any = self._connection.eval(
                scripts.PUT_BACK, len(keys), *keys, *self._prefixes, LOOKS, *given
            )
        except ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                raise StoreError(NO_LIST.format(key=self._queue)) from error
            raise
        if answer and not self._has_said:
            self._has_said = True
            log.warning("rows of batch %s waited in no queue and are put back into it", self._record.id)
        return int(answer)

    def _is_long_abandoned(self, job_id: str, place: str) -> bool:
        if place != "abandoned":
            self._abandoned.pop(job_id, None)
            return False
        now = time.monotonic()
        return now - self._abandoned.setdefault(job_id, now) >= PATIENCE_SECONDS

    def _result(self, job_id: str, custom_id: str, failure: Failure) -> Result:
        return Result(custom_id=custom_id, job_id=job_id, created=int(time.time()), failure=failure)

    def _end(self, doomed: Iterator[tuple[str, Result]]) -> int:
        rows = [
            part
            for where, result in doomed
            for part in (result.job_id, where, outcome(result), encode(result))
        ]
        if not rows:
            return 0
        keys = [batch_key(self._record.id), self._canceled]
        return int(
            self._connection.eval(
                scripts.END, len(keys), *keys, *self._prefixes, self._record.keep_seconds, *rows
            )
        )


def _is_place(text: bytes) -> bool:
    """Whether a row can stand there; whoever may queue rows may also write something else among the ids."""
    found = re.fullmatch(rb"\d{1,9}-(\d{1,10})", text)
    return found is not None and int(found[1]) < 2**32  # of a bitmap's bit


NO_LIST = (
    "{key} in Redis is no list, so nobody can take what waits there. "
    "Delete it (redis-cli DEL {key}) and follow the batch again, which queues its rows again"
)


def _lost(where: str) -> Failure:
    what = "was deleted from Redis" if where == "gone" else f'was set to "{where}" in RQ by something else'
    return Failure.of("worker_lost", f"the row's job {what}: submit the row again")
