"""The rows in a worker's hands: leased, checked, tokenised; in the engine or waiting for it.

Owns the table and its order. Must not know Redis or processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

from producer.wire import EXPIRED, Failure, Request
from worker.leases import Claim
from worker.quarantine import SUSPECT_DEATHS, Quarantine
from worker.rows import PreparedRow


@dataclass(slots=True, eq=False)
class Held:
    """One row. ``deaths``: engine deaths it was in, in this worker and before."""

    claim: Claim
    request: Request
    prepared: PreparedRow
    deaths: int
    expires: float = inf  # when its batch does (unix seconds)
    in_engine: bool = False

    @property
    def number(self) -> int:
        """The engine's id of the row: counted by the worker, so in the order rows were taken."""
        return self.prepared.row.id

    @property
    def deadline(self) -> float:
        """When the row must have ended (unix seconds)."""
        timeout = inf if self.request.timeout_s is None else self.request.timeout_s
        return min(self.claim.lease.started_at + timeout, self.expires)

    @property
    def lateness(self) -> Failure:
        """What the row fails with at its deadline."""
        if self.deadline == self.expires:
            return EXPIRED
        return Failure.of("timeout", f"the row took longer than its {self.request.timeout_s:g} s")


class Hand:
    """Rows by number, in the order they were taken."""

    def __init__(self) -> None:
        self._rows: dict[int, Held] = {}
        self._waiting: dict[int, Held] = {}  # those not in the engine
        self._deadlines: dict[int, float] = {}  # monotonic, of the rows that have one
        self._quarantine = Quarantine()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Held]:
        return iter(list(self._rows.values()))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def batches(self) -> set[str]:
        return {held.request.batch_id for held in self._rows.values()}

    @property
    def next_deadline(self) -> float:
        """When the next row runs out of time (monotonic seconds)."""
        return min(self._deadlines.values(), default=inf)

    def get(self, number: int) -> Held | None:
        return self._rows.get(number)

    def take(self, arrived: Iterable[Held]) -> None:
        """New rows. Those that bring a history of dead engines will run apart."""
        rows = {held.number: held for held in arrived}
        for number, held in rows.items():
            if held.deadline < inf:
                self._deadlines[number] = time.monotonic() + held.deadline - time.time()
        self._rows |= rows
        self._waiting |= rows
        self._quarantine.arrive(number for number, held in rows.items() if held.deaths >= SUSPECT_DEATHS)

    def drop(self, held: Held) -> None:
        """The row is not ours to run any more."""
        self._rows.pop(held.number, None)
        self._waiting.pop(held.number, None)
        self._deadlines.pop(held.number, None)
        self._quarantine.left(held.number)

    def late(self) -> list[Held]:
        """Rows whose time is over."""
        now = time.monotonic()
        return [self._rows[number] for number, deadline in self._deadlines.items() if deadline <= now]

    def to_engine(self) -> list[Held]:
        """Rows that may go to the engine now; they count as in it from here on."""
        if not self._waiting:
            return []
        running: list[int] = []
        if self._quarantine.is_active:
            running = [number for number, held in self._rows.items() if held.in_engine]
        chosen = [self._waiting.pop(number) for number in self._quarantine.choose(self._waiting, running)]
        for held in chosen:
            held.in_engine = True
        return chosen

    def engine_died(self) -> tuple[list[Held], Held | None]:
        """(rows that were in the engine, the one of them that is proved guilty). All of them wait again."""
        were_in = [held for held in self._rows.values() if held.in_engine]
        for held in were_in:
            held.prepared = held.prepared.again()
            held.in_engine = False
            held.deaths += 1
        guilty = self._quarantine.died([held.number for held in were_in], [held.deaths for held in were_in])
        self._waiting = dict(self._rows)
        return were_in, None if guilty is None else self._rows[guilty]
