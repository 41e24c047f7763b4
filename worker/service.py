"""THE PARENT: one loop that claims rows, feeds the engine, and writes results. It never waits for the GPU.

Owns the order of things and their moments: what an event means, when leases are renewed, when to stop. Redis
is desk.py's, the rows in hand are hand.py's, text is rows.py's, the engine's process is engine_process.py's.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from rq.worker.base import WorkerStatus

from kernels.rows import Status
from producer.errors import LivebatchError, RowError, StoreError, UsageError
from producer.wire import Failure, Request, Result
from worker import claims
from worker.desk import Connect, Desk, batch_of
from worker.events import Cancel, Died, Event, Outputs, Post, Ready, Stop, Wake
from worker.finish import ending
from worker.hand import Hand, Held
from worker.leases import Claim
from worker.link import Link
from worker.listeners import BLOCK_SECONDS, Commands, Listener, Waiter
from worker.maintenance import Maintenance
from worker.meter import Meter
from worker.settings import Settings

if TYPE_CHECKING:
    from worker.rows import RowPreparer
    from worker.sequence import Output, Row

log = logging.getLogger(__name__)

FLUSH_SECONDS = 0.01  # results of so long go into one transaction: a row then costs 0.2 ms instead of 1
PREPARE_SECONDS = 0.05  # of tokenising, before leases, results and signals are looked at again
REPORT_SECONDS = 1.0
MAX_FAILED_STARTS = 3  # in a row, of an engine that had run before

CANCELLED = Failure.of("batch_cancelled", "the batch was cancelled before this row ended")
LOST = Failure.of("worker_lost", "the engine died whenever this row ran, and also when it ran alone")


class Engine(Protocol):
    """What the loop needs of the engine's process."""

    def start(self) -> None: ...
    def send(self, rows: Sequence[Row], cancels: Sequence[int]) -> None: ...
    def stop(self) -> None: ...


class Service:
    """One worker: ``run`` until ``stop``, or in burst until its queues are empty."""

    def __init__(
        self,
        settings: Settings,
        preparer: RowPreparer,
        connect: Connect,
        make_engine: Callable[[Post], Engine],
    ) -> None:
        queues = [queue.name for queue in settings.queues]
        self._settings = settings
        self._preparer = preparer
        self._inbox: SimpleQueue[Event] = SimpleQueue()
        self._engine = make_engine(self._inbox.put)
        self._desk = Desk(settings, connect)
        self._link = Link("worker")
        self._hand = Hand()
        self._taken: deque[Claim] = deque()  # claimed, not looked at yet
        self._meter = Meter()
        patient = 2 * BLOCK_SECONDS + 1
        self._waiters = [Waiter(queue, connect(patient), self._inbox.put) for queue in queues]
        self._threads: list[Listener | Maintenance] = [
            *self._waiters,
            Commands(settings.name, connect(patient), self._inbox.put),
            Maintenance(queues, connect(patient), settings.maintenance_seconds, settings.lease_seconds),
        ]
        self._is_open = False
        self._number = 0  # of the last row taken
        self._is_ready = False  # the engine takes rows
        self._failed_starts = 0
        self._is_dry = False  # all queues were empty when last asked
        self._is_suspended = False
        self._stop_at: float | None = None  # when the grace time is over (monotonic)
        self._cancels: list[int] = []  # rows the engine shall drop
        self._beat_at = self._report_at = self._flush_at = 0.0

    def stop(self, why: str) -> None:
        """Ask for the end; may be called from a signal handler. A second time: at once."""
        self._inbox.put(Stop(why))

    def run(self) -> None:
        """Work. Raises UsageError or LivebatchError when the engine cannot be built, StoreError when results
        could not be written before the end.
        """
        try:
            self._engine.start()
            if self._await_engine():
                self._open()
                while not self._is_done():
                    self._turn()
        finally:
            self._close()

    def _await_engine(self) -> bool:
        """Whether there is an engine to work with. False: somebody asked us to stop first."""
        log.info("worker %s builds its engine for %s", self._settings.name, self._settings.engine.model)
        while not self._is_ready:
            match self._inbox.get():
                case Ready(seconds):
                    log.info("engine ready after %.1f s", seconds)
                    self._is_ready = True
                case Died(how, error):
                    raise UsageError(error) if error else LivebatchError(f"the engine did not start: {how}")
                case Stop():
                    return False
        return True

    def _open(self) -> None:
        self._desk.open()
        self._is_open = True
        for thread in self._threads:
            thread.start()
        queues = ", ".join(f"{queue.name}={queue.weight}" for queue in self._settings.queues)
        log.info("worker %s takes up to %d rows from %s", self._settings.name, self._settings.room, queues)

    def _close(self) -> None:
        self._engine.stop()
        for thread in self._threads:
            thread.stop()
        if not self._is_open:
            return
        leases = [held.claim.lease for held in self._hand] + [claim.lease for claim in self._taken]
        endings = len(self._desk.endings)
        self._link = Link("worker")
        with self._link:
            returned = self._desk.close(leases)
            log.info("worker %s ends; %d rows are back in their queues", self._settings.name, returned)
        if self._link.is_away:
            raise StoreError(
                f"Redis is away: {endings} results could not be written and {len(leases)} rows not be handed "
                "back. They will run again elsewhere"
            )

    # -- one turn of the loop

    def _is_done(self) -> bool:
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            return True
        if self._hand or self._taken or self._desk.endings:
            return False
        return self._stop_at is not None or (self._settings.burst and self._is_dry)

    def _turn(self) -> None:
        for event in self._events():
            self._handle(event)
        for held in self._hand.late():
            self._evict(
                held, Failure.of("timeout", f"the row took longer than its {held.request.timeout_s:g} s")
            )
        self._prepare()
        self._feed()
        if self._link.is_due:
            with self._link:
                self._talk()

    def _events(self) -> Iterator[Event]:
        """What has happened; waits for it, but not past the next thing to do."""
        try:
            yield self._inbox.get(timeout=max(0.0, self._next_moment() - time.monotonic()))
            while True:
                yield self._inbox.get_nowait()
        except Empty:
            return

    def _next_moment(self) -> float:
        if self._taken:
            return 0.0
        moments = [self._beat_at, self._report_at, self._hand.next_deadline]
        if self._desk.endings:
            moments.append(self._flush_at)
        if self._may_claim():
            moments.append(0.0)
        moment = max(min(moments), self._link.again)
        return moment if self._stop_at is None else min(moment, self._stop_at)

    def _talk(self) -> None:
        """Everything this turn has to say to Redis."""
        now = time.monotonic()
        self._desk.note_deaths()
        if self._desk.endings and now >= self._flush_at:
            self._desk.flush()
            self._flush_at = now + FLUSH_SECONDS
        if now >= self._beat_at:
            self._beat()
        if now >= self._report_at:
            self._report()
        if self._may_claim():
            self._claim()

    # -- rows in

    @property
    def _room(self) -> int:
        return self._settings.room - len(self._hand) - len(self._taken) - len(self._desk.endings)

    def _may_claim(self) -> bool:
        """Several rows at a time: one by one, a claim would cost each row a millisecond."""
        if self._is_dry or self._is_suspended or not self._is_ready or self._stop_at is not None:
            return False
        return self._room >= max(1, self._settings.engine.max_batch // 4)

    def _claim(self) -> None:
        room = self._room
        claimed, cancelled = self._desk.claim(room)
        if len(claimed) < room:
            self._is_dry = True
            for waiter in self._waiters:
                waiter.arm()
        for claim in claimed:
            if not claim.is_started:
                continue
            if batch_of(claim.lease) in cancelled:
                self._end(claim, claims.failed(claim.lease.job_id, claim.lease.job_id, CANCELLED))
            else:
                self._taken.append(claim)

    def _prepare(self) -> None:
        """Check and tokenise what was claimed, for a moment."""
        until, arrived = time.monotonic() + PREPARE_SECONDS, []
        while self._taken and time.monotonic() < until:
            claim = self._taken.popleft()
            match claims.read(claim):
                case Request() as request:
                    if (held := self._tokenise(claim, request)) is not None:
                        arrived.append(held)
                case Result() as refused:
                    self._end(claim, refused)
        self._hand.take(arrived)

    def _tokenise(self, claim: Claim, request: Request) -> Held | None:
        self._number += 1
        try:
            prepared = self._preparer.prepare(request, self._number)
        except RowError as error:
            failure = Failure.from_error(error)
            self._end(claim, claims.failed(request.custom_id, request.job_id, failure))
            return None
        return Held(claim, request, prepared, deaths=int(claim.deaths) if claim.deaths.isdigit() else 0)

    def _feed(self) -> None:
        if self._is_ready:
            rows = [held.prepared.row for held in self._hand.to_engine()]
            self._engine.send(rows, self._cancels)
            self._cancels = []

    # -- rows out

    def _handle(self, event: Event) -> None:
        match event:
            case Outputs(outputs, load):
                self._meter.see(load)
                for output in outputs:
                    self._hear(output)
            case Wake():
                self._is_dry = False
            case Cancel(batch_id, job_id):
                self._cancel(batch_id, job_id)
            case Stop(why):
                self._stop(why)
            case Ready(seconds):
                log.info("engine ready again after %.1f s", seconds)
                self._is_ready, self._failed_starts = True, 0
            case Died():
                self._engine_died(event)

    def _hear(self, output: Output) -> None:
        held = self._hand.get(output.id)
        if held is None:
            return  # it ended before: cancelled, late, lost, or at a stop string
        if held.prepared.feed(output):
            self._cancels.append(output.id)
        elif output.status == Status.RUNNING:
            return
        self._hand.drop(held)
        self._end(held.claim, held.prepared.result(output.status))

    def _evict(self, held: Held, failure: Failure) -> None:
        """End a row that may be running."""
        self._forget(held)
        self._end(held.claim, claims.failed(held.request.custom_id, held.request.job_id, failure))

    def _forget(self, held: Held) -> None:
        self._hand.drop(held)
        if held.in_engine:
            self._cancels.append(held.number)

    def _end(self, claim: Claim, result: Result) -> None:
        self._desk.endings.append(ending(claim, result))

    def _cancel(self, batch_id: str, job_id: str | None) -> None:
        doomed = [
            held
            for held in self._hand
            if held.request.batch_id == batch_id and job_id in (None, held.request.job_id)
        ]
        for held in doomed:
            self._evict(held, CANCELLED)
        if doomed:
            log.info("batch %s cancelled: %d rows evicted", batch_id, len(doomed))

    # -- the passing of time

    def _beat(self) -> None:
        """Renew every lease; find out what we missed while Redis was away."""
        leases = [held.claim.lease for held in self._hand] + [claim.lease for claim in self._taken]
        lost = set(self._desk.renew(leases))
        self._beat_at = time.monotonic() + self._settings.beat_seconds
        if lost:
            log.warning("%d rows are no longer ours: cancelled, deleted or run elsewhere", len(lost))
            self._taken = deque(claim for claim in self._taken if claim.lease not in lost)
            for held in self._hand:
                if held.claim.lease in lost:
                    self._forget(held)
        for batch_id in self._desk.cancelled(self._hand.batches):
            self._cancel(batch_id, None)

    def _report(self) -> None:
        state = WorkerStatus.BUSY if self._hand else WorkerStatus.IDLE
        if self._is_suspended:
            state = WorkerStatus.SUSPENDED
        load = self._meter.load
        live = load.live if load and self._hand else 0
        fields = {
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "model": Path(self._settings.engine.model).name,
            "queues": ",".join(queue.name for queue in self._settings.queues),
            "live": f"{live}/{self._settings.engine.max_batch}",
            "waiting": str(max(0, len(self._hand) - live)),
            "tokens_per_second": f"{self._meter.tokens_per_second():.1f}",
        }
        self._is_suspended = self._desk.report(state, fields)
        self._report_at = time.monotonic() + REPORT_SECONDS

    def _stop(self, why: str) -> None:
        now = time.monotonic()
        if self._stop_at is not None:
            log.warning("%s again: handing %d rows back at once", why, len(self._hand))
            self._stop_at = now
            return
        grace = self._settings.grace_seconds
        log.info("%s: no more claims; %d rows get %g s to end", why, len(self._hand), grace)
        self._stop_at = now + grace

    def _engine_died(self, died: Died) -> None:
        if not self._is_ready:
            self._failed_starts += 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            raise LivebatchError(f"the engine does not start again: {died.error or died.how}")
        self._is_ready = False
        self._cancels = []
        self._meter.restart()
        were_in, guilty = self._hand.engine_died()
        log.error("the engine died (%s) with %d rows; they run again", died.error or died.how, len(were_in))
        for held in were_in:
            held.prepared = self._preparer.prepare(held.request, held.number)
            self._desk.deaths[held.claim.lease] = held.deaths
        if guilty is not None:
            log.error("row %s kills the engine and fails alone", guilty.request.job_id)
            self._evict(guilty, LOST)
        self._engine.start()
