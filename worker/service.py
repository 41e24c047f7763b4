"""THE PARENT: one loop that claims rows, feeds the engine, and writes results. It never waits for the GPU.

Owns the order of things and their moments: what an event means, when leases are renewed, when to stop. Redis
is desk.py's, the rows in hand are hand.py's, text is rows.py's, the engine's process is engine_process.py's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rq.worker.base import WorkerStatus

from kernels.rows import Status
from producer.errors import StoreError
from producer.wire import CANCELLED, Failure, Result
from worker.claims import MAX_BYTES
from worker.desk import Connect, Desk
from worker.diary import Diary
from worker.events import Cancel, Died, Event, Outputs, Post, Ready, Stop, Wake
from worker.finish import ending
from worker.hand import Hand, Held
from worker.inbox import Inbox
from worker.intake import Intake, failed
from worker.keeper import Keeper
from worker.leases import Claim, Lease, Leases
from worker.link import Link
from worker.listeners import BLOCK_SECONDS, Commands, Listener, Waiter
from worker.logs import named
from worker.maintenance import Maintenance
from worker.meter import Meter
from worker.metrics import Metrics, Unmeasured
from worker.rows import RowPreparer
from worker.scripts import SUSPECT_LOSSES
from worker.settings import Settings
from worker.warden import EngineHandle, Warden

if TYPE_CHECKING:
    from worker.sequence import Output

log = logging.getLogger(__name__)

# Results of so long are written together. Less than the engine's own patience, so that what comes in one of
# its messages is written in the turn that hears of it.
FLUSH_SECONDS = 0.04
SORT_SECONDS = 0.05  # of checking and tokenising, before leases, results and signals are looked at again
HEAR_SECONDS = 0.05  # of hearing the engine, likewise
REPORT_SECONDS = 1.0
LOOK_SECONDS = 1.0  # between two looks at an engine that is being built

LOST = Failure.of("worker_lost", "the engine died whenever this row ran, and also when it ran alone")


class Service:
    """One worker: ``run`` until ``stop``, or in burst until its queues are empty."""

    def __init__(
        self,
        settings: Settings,
        preparer: RowPreparer,
        connect: Connect,
        make_engine: Callable[[Post], EngineHandle],
        metrics: Metrics | None = None,
    ) -> None:
        queues = [queue.name for queue in settings.queues]
        self._settings = settings
        self._inbox = Inbox()
        self._warden = Warden(make_engine(self._inbox.put), settings.engine_timeout_seconds)
        self._desk = Desk(settings, connect)
        self._link = Link("worker")
        self._hand = Hand()
        self._intake = Intake(preparer)
        self._meter = Meter(settings)
        self._diary = Diary()
        self._metrics = metrics or Unmeasured()
        self._metrics.watch(
            rows_held=lambda: len(self._hand) + len(self._intake),
            results_unwritten=lambda: len(self._desk.endings),
        )
        patient = 2 * BLOCK_SECONDS + 1
        self._waiters = [Waiter(queue, connect(patient), self._inbox.put) for queue in queues]
        leases = Leases(connect(patient), settings.name, settings.lease_seconds, MAX_BYTES)
        self._keeper = Keeper(leases, settings.beat_seconds)
        self._threads: list[Listener | Maintenance | Keeper] = [
            *self._waiters,
            self._keeper,
            Commands(settings.name, connect(patient), self._inbox.put),
            Maintenance(queues, connect(patient), settings.maintenance_seconds, settings.lease_seconds),
        ]
        self._is_open = False
        self._is_dry = False  # all queues were empty when last asked
        self._is_suspended = False
        self._stop_at: float | None = None  # when the grace time is over (monotonic)
        self._cancels: list[int] = []  # rows the engine shall drop
        self._beat_at = self._report_at = self._flush_at = 0.0

    def stop(self, why: str) -> None:
        """Ask for the end; may be called from a signal handler. A second time: at once."""
        self._inbox.put(Stop(why))

    def run(self) -> None:
        """Work. Raises LivebatchError when there is no engine to work with, StoreError when results could not
        be written before the end.
        """
        try:
            self._warden.start()
            if self._await_engine():
                self._open()
                while not self._is_done():
                    self._turn()
        finally:
            try:
                self._close()
            finally:
                self._warden.stop()

    def _await_engine(self) -> bool:
        """Whether there is an engine to work with. False: somebody asked us to stop first."""
        log.info("worker %s builds its engine for %s", self._settings.name, self._settings.engine.model)
        while not self._warden.is_ready and self._stop_at is None:
            for event in self._inbox.take(LOOK_SECONDS, 0.0):
                self._handle(event)
            self._warden.mind()
        return self._stop_at is None

    def _open(self) -> None:
        self._is_open = True
        for thread in self._threads:
            thread.start()
        queues = ", ".join(f"{queue.name}={queue.weight}" for queue in self._settings.queues)
        live, room = self._settings.engine.max_batch, self._settings.room
        log.info(
            "worker %s takes rows from %s: %d live, %d more ready",
            self._settings.name,
            queues,
            live,
            room - live,
        )

    def _close(self) -> None:
        for thread in self._threads:
            thread.stop()
        if not self._is_open:
            return
        leases, endings = self._leases, len(self._desk.endings)
        self._diary.close()
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
        if self._hand or self._intake or self._desk.endings:
            return False
        is_idle = self._is_dry or self._is_suspended
        return self._stop_at is not None or (self._settings.burst and is_idle)

    def _turn(self) -> None:
        for event in self._inbox.take(max(0.0, self._next_moment() - time.monotonic()), HEAR_SECONDS):
            self._handle(event)
        for held in self._hand.late():
            self._evict(held, held.lateness)
        self._sort()
        self._feed()
        self._warden.mind()
        if self._link.is_due:
            with self._link:
                self._talk()

    def _next_moment(self) -> float:
        """When there is something to do although nothing happens (monotonic seconds)."""
        if self._intake:
            return 0.0
        moments = [self._beat_at, self._report_at, self._hand.next_deadline]
        if self._desk.endings:
            moments.append(self._flush_at)
        if self._may_claim():
            moments.append(0.0)
        moment = max(min(moments), self._link.again)
        return moment if self._stop_at is None else min(moment, self._stop_at)

    def _talk(self) -> None:
        """Everything this turn has to say to Redis; the leases first, whatever else goes wrong."""
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat()
        self._desk.note_deaths()
        if self._desk.endings and now >= self._flush_at:
            self._desk.flush()
            self._flush_at = now + FLUSH_SECONDS
        if now >= self._report_at:
            self._report()
        if self._may_claim():
            self._claim()

    # -- rows in

    @property
    def _leases(self) -> list[Lease]:
        """Of the rows that have not ended."""
        return [held.claim.lease for held in self._hand] + self._intake.leases

    @property
    def _room(self) -> int:
        """For more rows. One that ended here has left the engine only when the engine says so."""
        held = len(self._intake) + self._hand.num_waiting + self._warden.owed + len(self._desk.endings)
        return self._settings.room - held

    @property
    def _is_free(self) -> bool:
        """No row would be lost with us."""
        return not (self._hand or self._intake or self._warden.owed or self._desk.endings)

    def _may_claim(self) -> bool:
        """Several rows at a time: one by one, a claim would cost each row a millisecond."""
        if self._is_dry or self._is_suspended or not self._warden.is_ready or self._stop_at is not None:
            return False
        if self._desk.is_apart and not self._is_free:
            return False
        return self._room >= max(1, self._settings.engine.max_batch // 4)

    def _claim(self) -> None:
        claimed = self._desk.claim(self._room, self._is_free)
        if claimed and not self._hand:
            self._report_at = 0.0  # idle no more: say so now
        if self._desk.is_dry:
            self._is_dry = True
            for waiter in self._waiters:
                waiter.arm()
        if suspects := sum(claim.losses >= SUSPECT_LOSSES for claim in claimed):
            log.warning("rows whose workers vanished run apart from others: %d", suspects)
        self._metrics.took(claimed)
        self._intake.take(claimed)
        self._keeper.took(self._intake.leases)

    def _sort(self) -> None:
        found = self._intake.sort(SORT_SECONDS)
        for claim, result in found.ended:
            self._end(claim, result)
        self._hand.take(found.rows)
        if found.rows:
            self._diary.holds({held.request.batch_id for held in found.rows})

    def _feed(self) -> None:
        if self._warden.is_ready:
            rows = [held.prepared.row for held in self._hand.to_engine()]
            self._warden.send(rows, self._cancels)
            self._cancels = []

    # -- rows out

    def _handle(self, event: Event) -> None:
        match event:
            case Outputs(outputs, load) as told:
                self._warden.heard(told)
                self._meter.see(load)
                self._metrics.see(told)
                for output in outputs:
                    self._hear(output)
            case Wake():
                self._is_dry = False
            case Cancel(batch_id, job_id):
                self._cancel(batch_id, job_id)
            case Stop(why):
                self._stop(why)
            case Ready():
                self._warden.ready(event)
            case Died():
                self._engine_died(event)

    def _hear(self, output: Output) -> None:
        held = self._hand.get(output.id)
        if held is None:
            return  # it ended before: cancelled, late, lost, or at a stop string
        if (result := self._listen(held, output)) is not None:
            self._hand.drop(held)
            self._end(held.claim, result)
            if result.failure is None:
                self._warden.completed()

    def _listen(self, held: Held, output: Output) -> Result | None:
        """The row's result, if this was its end."""
        try:
            if held.prepared.feed(output):
                self._cancels.append(output.id)
            elif output.status == Status.RUNNING:
                return None
            return held.prepared.result(output.status)
        except Exception as error:  # our bug, but it shall cost one row and not its neighbours
            log.exception("the end of row %s cannot be told", held.request.job_id)
            self._cancels.append(output.id)
            return failed(held.request, Failure.of("internal_error", f"{type(error).__name__}: {error}"))

    def _evict(self, held: Held, failure: Failure) -> None:
        """End a row that may be running."""
        self._forget(held)
        self._end(held.claim, failed(held.request, failure))

    def _forget(self, held: Held) -> None:
        self._hand.drop(held)
        if held.in_engine:
            self._cancels.append(held.number)

    def _end(self, claim: Claim, result: Result) -> None:
        self._desk.endings.append(ending(claim, result))
        self._metrics.ended(result)
        self._diary.ended(result)

    def _cancel(self, batch_id: str, job_id: str | None) -> None:
        if job_id is None:
            self._intake.cancel(batch_id)
        doomed = [
            held
            for held in self._hand
            if held.request.batch_id == batch_id and job_id in (None, held.request.job_id)
        ]
        for held in doomed:
            self._evict(held, CANCELLED)
        if doomed:
            log.info(
                "batch %s cancelled: %d rows evicted",
                batch_id,
                len(doomed),
                extra=named("batch_cancelled", batch=batch_id, rows=len(doomed)),
            )

    # -- the passing of time

    def _beat(self) -> None:
        """Renew every lease; find out what we missed while Redis was away."""
        leases = self._leases
        lost = set(self._desk.renew(leases))
        self._keeper.renewed([*leases, *(end.lease for end in self._desk.endings)])
        self._beat_at = time.monotonic() + self._settings.beat_seconds
        self._diary.holds(self._hand.batches)
        if lost:
            self._metrics.lost(len(lost))
            log.warning(
                "%d rows are no longer ours: cancelled, deleted or run elsewhere",
                len(lost),
                extra=named("leases_lost", rows=len(lost)),
            )
            self._intake.lose(lost)
            for held in self._hand:
                if held.claim.lease in lost:
                    self._forget(held)
        for batch_id in self._desk.cancelled(self._hand.batches):
            self._cancel(batch_id, None)

    def _report(self) -> None:
        state = WorkerStatus.BUSY if self._hand else WorkerStatus.IDLE
        if self._is_suspended:
            state = WorkerStatus.SUSPENDED
        self._is_suspended = self._desk.report(state, self._meter.fields(len(self._hand)))
        self._report_at = time.monotonic() + REPORT_SECONDS

    def _stop(self, why: str) -> None:
        now = time.monotonic()
        if self._stop_at is not None:
            log.warning("%s again: handing %d rows back at once", why, len(self._hand))
            self._stop_at = now
            return
        grace = self._settings.grace_seconds
        held = len(self._hand)
        log.info(
            "%s: no more claims; %d rows get %g s to end (again: hand them back at once)", why, held, grace
        )
        self._stop_at = now + grace

    def _engine_died(self, died: Died) -> None:
        """Its rows run again, in the next engine. Raises LivebatchError when there is none."""
        self._cancels = []
        self._meter.restart()
        self._metrics.engine_died()
        were_in, guilty = self._hand.engine_died()
        how = str(died.error or died.how)
        log.error(
            "the engine died (%s) with %d rows%s",
            how,
            len(were_in),
            "; they run again" if were_in else "",
            extra=named("engine_died", how=how, rows=len(were_in)),
        )
        self._desk.deaths |= {held.claim.lease: held.deaths for held in were_in}
        if guilty is not None:
            self._warden.condemn(guilty.request.job_id)
            self._evict(guilty, LOST)
        self._warden.died(died)
