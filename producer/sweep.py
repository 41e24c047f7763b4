"""Rows that will get no result from a worker are ended here, so that no batch hangs short of its end.

Owns cancelling what waits, ending it when the batch expires, and giving up what somebody else deleted, failed
or cancelled (a dashboard, `rq empty`). Walks the batch's ids page by page; Lua ends a row only if it still is
where it was seen. Must not know files or terminals.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

from rq.job import Job
from rq.registry import CanceledJobRegistry

from producer import scripts
from producer.batch import Record
from producer.store import Store, as_text, batch_key, encode, ids_key, outcome
from producer.wire import Failure, Result

PAGE_ROWS = 500
LOST = (
    "gone",
    "failed",
    "canceled",
    "stopped",
    "finished",
)  # ended in RQ, and not by our worker: it writes the log
WAITING = ("queued", "abandoned")


class Sweeper:
    """Walks one batch again and again, a page at a time: ``step`` costs about a millisecond."""

    def __init__(self, store: Store, record: Record) -> None:
        from rq.defaults import RQ_KEY_PREFIX

        self._connection = store.connection
        self._record = record
        self._prefixes = [Job.redis_job_namespace_prefix, f"{RQ_KEY_PREFIX}:executions:"]
        self._canceled = CanceledJobRegistry(record.queue, connection=store.connection).key
        self._cursor = 0

    def step(self, *, cancel: bool = False) -> int:
        """End what is lost on the next page, with ``cancel`` or past the batch's time also what waits.

        Returns the rows ended.
        """
        self._cursor, page = cast(
            "tuple[int, dict[bytes, bytes]]",
            self._connection.hscan(ids_key(self._record.id), self._cursor, count=PAGE_ROWS),
        )
        names = {f"{self._record.id}-{as_text(place)}": as_text(name) for name, place in page.items()}
        return self._end(self._doomed(names, cancel)) if names else 0

    def sweep(self, *, cancel: bool = False) -> int:
        """All pages once."""
        self._cursor = 0
        ended = self.step(cancel=cancel)
        while self._cursor:
            ended += self.step(cancel=cancel)
        return ended

    def _doomed(self, names: Mapping[str, str], cancel: bool) -> Iterator[tuple[str, Result]]:
        """(where its job is, its result) of each row of the page that nobody will finish."""
        expires = self._record.expires
        is_late = expires is not None and time.time() >= expires
        ended = CANCELLED if cancel else EXPIRED if is_late else None
        answer: Any = self._connection.eval(
            scripts.WHERE, 1, batch_key(self._record.id), *self._prefixes, *names
        )
        for (job_id, custom_id), where in zip(names.items(), map(as_text, answer), strict=True):
            if where in LOST:
                yield where, self._result(job_id, custom_id, _lost(where))
            elif ended and where in WAITING:
                yield where, self._result(job_id, custom_id, ended)

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


CANCELLED = Failure.of("batch_cancelled", "the batch was cancelled before this row ended")

EXPIRED = Failure.of("batch_expired", "the batch's time was over before this row ended")


def _lost(where: str) -> Failure:
    what = "was deleted from Redis" if where == "gone" else f'was set to "{where}" in RQ by something else'
    return Failure.of("worker_lost", f"the row's job {what}: submit the row again")
