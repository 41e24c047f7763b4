"""The worker's side of Redis: claims in, endings out, leases kept alive. All calls raise when Redis is away.

Owns what waits to be written, and the connection. Must not know the engine or text.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from redis.exceptions import OutOfMemoryError
from rq.defaults import RQ_KEY_PREFIX
from rq.worker.base import WorkerStatus

from producer.store import Store
from worker import scripts
from worker.claims import MAX_BYTES
from worker.finish import MAX_ROWS, Ending, Finisher
from worker.leases import Claim, Lease, Leases, names
from worker.rq_classes import Entry
from worker.settings import Settings
from worker.shares import Shares

if TYPE_CHECKING:
    from redis import Redis
    from redis.client import Pipeline

log = logging.getLogger(__name__)

Connect = Callable[[float], "Redis"]  # a connection whose answers may take so many seconds

ANSWER_SECONDS = 5.0
REPORT_TTL_SECONDS = 10
SUSPENDED = f"{RQ_KEY_PREFIX}:suspended"


class Desk:
    """``endings`` is what the loop puts there and ``flush`` writes; it outlives any outage."""

    def __init__(self, settings: Settings, connect: Connect) -> None:
        self._settings = settings
        self._connection = connect(ANSWER_SECONDS)
        self._store = Store(self._connection)
        self._entry = Entry(settings.name, [queue.name for queue in settings.queues], self._connection)
        self._leases = Leases(self._connection, settings.name, settings.lease_seconds, MAX_BYTES)
        self._finisher = Finisher(self._connection, settings.name)
        self._shares = Shares(settings.queues)
        self.endings: list[Ending] = []
        self.deaths: dict[Lease, int] = {}  # engine deaths to note in the jobs

    def close(self, held: Sequence[Lease]) -> int:
        """Write what waits, give back the other rows, leave RQ's workers. Returns the rows given back."""
        self.flush()
        self.note_deaths()
        returned = self._leases.hand_back([*(end.lease for end in self.endings), *held])
        with suppress(OutOfMemoryError):
            self._entry.register_death()  # type: ignore[no-untyped-call]
        self._store.forget_worker(self._settings.name)
        return returned

    @property
    def is_dry(self) -> bool:
        """Whether the last claim left all queues empty; one of fewer jobs than asked for need not have."""
        return self._leases.is_dry

    @property
    def is_apart(self) -> bool:
        """Whether the last claim came upon rows that may not run beside others."""
        return self._leases.is_apart

    def claim(self, room: int, is_free: bool) -> list[Claim]:
        """Up to ``room`` jobs, now ours. ``is_free``: we have none, and no end of one to write."""
        claims = self._leases.claim(room, self._shares.split(room), is_free)
        self._shares.took(Counter(claim.lease.queue for claim in claims))
        return claims

    def cancelled(self, batches: Iterable[str]) -> set[str]:
        """Those of the batches whose rows must not run."""
        known = set(batches)
        return self._store.is_cancelled(known) if known else set()

    def flush(self) -> None:
        """Write all endings and forget them. What Redis has no room for stays; on an error, the rest too."""
        kept = 0
        while chunk := self.endings[kept : kept + MAX_ROWS]:
            ours, later = self._finisher.write(chunk)
            self.endings[kept : kept + len(chunk)] = later
            kept += len(later)
            if dropped := len(chunk) - ours - len(later):
                log.warning("%d results dropped: others had ended or taken their rows", dropped)

    def renew(self, held: Sequence[Lease]) -> list[Lease]:
        """Prolong the leases of rows in hand and of unwritten endings. Returns the lost ones."""
        return self._leases.renew([*held, *(end.lease for end in self.endings)])

    def report(self, state: WorkerStatus, fields: Mapping[str, str]) -> bool:
        """Say how we are, to RQ and to `producer status`. Returns whether `rq suspend` is in force."""
        with self._connection.pipeline() as pipe:
            pipe.exists(SUSPENDED)
            self._entry.beat(pipe, state)
            self._store.report_worker(pipe, self._settings.name, fields, REPORT_TTL_SECONDS)
            is_suspended, *_ = self._run(pipe)
        return bool(is_suspended)

    def note_deaths(self) -> None:
        """Into the jobs, for the worker that gets them if we die too."""
        if not self.deaths:
            return
        given = [part for lease, count in self.deaths.items() for part in (*names([lease]), str(count))]
        self._connection.eval(scripts.NOTE_DEATHS, 0, RQ_KEY_PREFIX, self._settings.name, *given)
        self.deaths.clear()

    def _run(self, pipe: Pipeline) -> list[Any]:
        """The pipe's commands as a script: a Redis that is full takes those too."""
        words = [part for command, _ in pipe.command_stack for part in (len(command), *command)]
        answers: list[Any] = self._connection.eval(scripts.COMMANDS, 0, RQ_KEY_PREFIX, *words)
        return answers
