"""From claims to rows: checked, tokenised, a moment's work at a time so that the loop stays awake.

Owns what was claimed and not yet looked at, and the numbers rows get. Must not know Redis or the engine.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from math import inf

from producer.errors import RowError
from producer.wire import CANCELLED, EXPIRED, Failure, Request, Result
from worker import claims
from worker.hand import Held
from worker.leases import Claim, Lease
from worker.rows import RowPreparer
from worker.scripts import ALONE_LOSSES

log = logging.getLogger(__name__)

GUILTY_LOSSES = ALONE_LOSSES + 3  # the last ones alone, by the rules of a claim


@dataclass(slots=True)
class Sorted:
    """What became of some claims: rows to run, and rows that end without running."""

    rows: list[Held] = field(default_factory=list)
    ended: list[tuple[Claim, Result]] = field(default_factory=list)


class Intake:
    """Takes claims in order and gives them out sorted, in the same order."""

    def __init__(self, preparer: RowPreparer) -> None:
        self._preparer = preparer
        self._claims: deque[Claim] = deque()
        self._cancelled: set[str] = set()  # batches, since the oldest of the claims
        self._number = 0

    def __len__(self) -> int:
        return len(self._claims)

    @property
    def leases(self) -> list[Lease]:
        """Of what is not sorted yet."""
        return [claim.lease for claim in self._claims]

    def take(self, claimed: Iterable[Claim]) -> None:
        """Jobs just claimed. What is no job, or ended before, has no lease and is dropped."""
        self._claims.extend(claim for claim in claimed if claim.is_started)

    def cancel(self, batch_id: str) -> None:
        """The batch was cancelled after its rows were claimed."""
        self._cancelled.add(batch_id)

    def lose(self, lost: Set[Lease]) -> None:
        """These jobs are no longer ours."""
        self._claims = deque(claim for claim in self._claims if claim.lease not in lost)

    def sort(self, seconds: float) -> Sorted:
        """Look at claims for about so long."""
        until, found = time.monotonic() + seconds, Sorted()
        while self._claims and time.monotonic() < until:
            claim = self._claims.popleft()
            match self._look(claim):
                case Held() as row:
                    found.rows.append(row)
                case Result() as result:
                    found.ended.append((claim, result))
        if not self._claims:
            self._cancelled.clear()
        return found

    def _look(self, claim: Claim) -> Held | Result:
        try:
            return self._row(claim)
        except Exception as error:  # our bug, but it shall cost one row and not the worker
            log.exception("row %s cannot be read", claim.lease.job_id)
            failure = Failure.of("internal_error", f"{type(error).__name__}: {error}")
            return claims.failed(claim.lease.job_id, claim.lease.job_id, failure)

    def _row(self, claim: Claim) -> Held | Result:
        if claim.losses >= GUILTY_LOSSES:
            return lost(claim)
        request = claims.read(claim)
        if isinstance(request, Result):
            return request
        if claim.batch_state == b"cancelled" or request.batch_id in self._cancelled:
            return failed(request, CANCELLED)
        expires = moment(claim.batch_expires)
        if time.time() >= expires:
            return failed(request, EXPIRED)
        self._number += 1
        try:
            prepared = self._preparer.prepare(request, self._number)
        except RowError as error:
            return failed(request, Failure.from_error(error))
        deaths = int(claim.deaths) if claim.deaths.isdigit() else 0
        return Held(claim, request, prepared, deaths, expires)


def moment(text: bytes) -> float:
    """Unix seconds; infinity for what says nothing of the kind."""
    try:
        return min(float(text), inf)
    except ValueError:
        return inf


def lost(claim: Claim) -> Result:
    """The result of a row that ends its workers. It is not even read: that may be what does it."""
    alone = claim.losses - ALONE_LOSSES
    failure = Failure.of(
        "worker_lost",
        f"{claim.losses} workers vanished while they had this row, {alone} of them with no other row in hand "
        "(killed with their engines, perhaps for want of memory)",
    )
    log.error("row %s fails: %s", claim.lease.job_id, failure.message)
    return claims.failed(claim.lease.job_id, claim.lease.job_id, failure)


def failed(request: Request, failure: Failure) -> Result:
    """The result of a row that is ours and has no answer."""
    return claims.failed(request.custom_id, request.job_id, failure)
