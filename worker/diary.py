"""Which batches passed through this worker, for its log: a line when one arrives, one when it has gone.

Owns the counts behind those lines. Must not know Redis or the engine. Never a line a row: the second one
comes when nothing of the batch has been here for a minute.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from producer.errors import WireError
from producer.wire import Result, parse_job_id
from worker.logs import named

log = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
MAX_BATCHES = 1000  # open at once; a batch more than that goes unmentioned


@dataclass(slots=True)
class Visit:
    """One batch. ``ends``: rows that ended here, by error code or "completed"."""

    begun: float
    seen: float
    ends: Counter[str] = field(default_factory=Counter)


class Diary:
    """Told of rows, looked at every few seconds."""

    def __init__(self) -> None:
        self._visits: dict[str, Visit] = {}

    def ended(self, result: Result) -> None:
        """A row of it has its result."""
        try:
            batch_id = parse_job_id(result.job_id)[0]
        except WireError:
            return  # a job that is not ours: refused, and no batch's
        if (visit := self._visit(batch_id)) is not None:
            visit.ends[result.failure.code if result.failure else "completed"] += 1

    def holds(self, batch_ids: Iterable[str]) -> None:
        """Batches with rows in hand now. Ends the visits of those that have been quiet."""
        for batch_id in batch_ids:
            self._visit(batch_id)
        before = time.monotonic() - QUIET_SECONDS
        for batch_id in [name for name, visit in self._visits.items() if visit.seen < before]:
            self._leave(batch_id)

    def close(self) -> None:
        """The worker ends: say what is left to say."""
        for batch_id in list(self._visits):
            self._leave(batch_id)

    def _visit(self, batch_id: str) -> Visit | None:
        now = time.monotonic()
        visit = self._visits.get(batch_id)
        if visit is None and len(self._visits) < MAX_BATCHES:
            visit = self._visits[batch_id] = Visit(now, now)
            log.info("batch %s: its first rows are here", batch_id, extra=named("batch_seen", batch=batch_id))
        if visit is not None:
            visit.seen = now
        return visit

    def _leave(self, batch_id: str) -> None:
        visit = self._visits.pop(batch_id)
        seconds = visit.seen - visit.begun
        ends = ", ".join(f"{count} {end}" for end, count in visit.ends.most_common()) or "none"
        log.info(
            "batch %s: rows that ended here in %.1f s: %s",
            batch_id,
            seconds,
            ends,
            extra=named("batch_left", batch=batch_id, seconds=round(seconds, 3), **visit.ends),
        )
