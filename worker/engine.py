"""Engine: THE LOOP. Admit, plan, launch, land.

Takes rows of token ids, gives Outputs. Knows no text, no Redis and no clock; model and sampler are duck-typed
(worker/protocols.py), so CPU, CUDA and fakes look alike from here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from producer.errors import UsageError
from worker.batch import pack
from worker.bisection import Bisection
from worker.blocks import BlockPool
from worker.live import LiveBatch
from worker.protocols import Logits, Model, Pending, Sampler
from worker.scheduler import Policy, Scheduler
from worker.sequence import Output, Row, Step

log = logging.getLogger(__name__)

MAX_VERDICTS = 3  # rows found guilty with no good step between them: then it is the model that is broken


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the engine is (now) and has been (since it was built)."""

    live: int
    waiting: int
    free_blocks: int
    steps: int
    tokens_computed: int
    tokens_sampled: int
    preemptions: int
    blocks: int = 0  # of the KV cache, those that can be lent


class SeatError(Exception):
    """The sampler does not take these rows: why, by row id."""

    def __init__(self, reasons: Mapping[int, Exception]) -> None:
        super().__init__(", ".join(f"row {row_id}: {reason!r}" for row_id, reason in reasons.items()))
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class Flight:
    """A launched step and what its rows will draw."""

    step: Step
    pending: Pending


class Engine:
    """Runs rows in one live batch: they join and leave at any step, and none changes another's output.

    A plan needs lengths and no tokens (a Step holds none). So step t + 1 can be launched before step t's
    tokens are here: lengths move on at the launch of a step, tokens and endings are booked when it lands.
    """

    def __init__(
        self, model: Model, sampler: Sampler, policy: Policy | None = None, *, overlap: bool = False
    ) -> None:
        """``sampler`` has ``policy.max_batch`` slots at least. UsageError if the policy asks too much.

        ``overlap``: a step lands while the next one runs. The model then finds PROMISED tokens by itself.
        """
        policy = fit(policy or Policy(), model)
        self._model = model
        self._sampler = sampler
        self._pool = BlockPool(model.num_blocks)
        self._live = LiveBatch(policy.max_batch, model.context_length, model.block_size)
        self._scheduler = Scheduler(policy, self._pool, self._live, model.context_length)
        self._bisection = Bisection()
        self._flights: deque[Flight] = deque()
        self._seated: set[int] = set()  # slots the sampler holds a row in
        self._overlap = int(overlap)
        self._verdicts = 0
        self._steps = self._computed = self._sampled = 0

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do or to say."""
        return self._scheduler.has_work

    def add(self, row: Row) -> None:
        """Queues a row; it joins the batch as soon as it fits. Unfinished rows have different ids."""
        self._scheduler.add(row)

    def cancel(self, row_id: int) -> None:
        """Ends a row in the next step, with an Output (CANCELLED). Unknown and finished ids are ignored."""
        self._scheduler.cancel(row_id)

    def step(self) -> list[Output]:
        """Runs the model once. Every added row gets exactly one Output whose status is not RUNNING."""
        self._conclude_trial()
        if self._flights and self._scheduler.must_preempt:
            self._land(0)
        step = self._scheduler.plan(self._bisection.on_trial)
        if len(step):
            self._launch(step)
        else:
            self._seat(step)
        on_their_way = self._overlap if len(step) and self._bisection.on_trial is None else 0
        self._land(on_their_way)
        return self._scheduler.take_outputs()

    def generate(self, rows: Iterable[Row]) -> Iterator[Output]:
        """Outputs of ``rows`` as they come; pulls rows no faster than they are needed."""
        source, ahead = iter(rows), 2 * self._scheduler.policy.max_batch
        while True:
            for row in islice(source, max(0, ahead - self._scheduler.num_waiting)):
                self.add(row)
            if not self.has_work:
                return
            yield from self.step()

    @property
    def load(self) -> Load:
        return Load(
            live=len(self._live),
            waiting=self._scheduler.num_waiting,
            free_blocks=self._pool.num_free,
            steps=self._steps,
            tokens_computed=self._computed,
            tokens_sampled=self._sampled,
            preemptions=self._scheduler.num_preemptions,
            blocks=self._pool.num_usable,
        )

    def check(self) -> None:
        """Raises AssertionError where the engine's own books contradict one another."""
        self._scheduler.check()

    def _seat(self, step: Step) -> None:
        for slot in self._seated.intersection(step.left):
            self._sampler.release(slot)
        self._seated.difference_update(step.left)
        refused: dict[int, Exception] = {}
        for sequence in step.joined:
            row = sequence.row
            try:
                self._sampler.admit(sequence.slot, row.params, row.prompt, sequence.output)
                self._seated.add(sequence.slot)
            except (RuntimeError, MemoryError):  # the device's words, which concern no row
                raise
            except Exception as error:
                refused[row.id] = error
                with suppress(KeyError):  # of a slot that it had not yet taken
                    self._sampler.release(sequence.slot)
        if refused:
            raise SeatError(refused)

    def _launch(self, step: Step) -> None:
        try:
            logits = self._run(step)
            self._seat(step)  # while the device is at it
            pending = self._sampler.enqueue(logits, step.slots[step.samples].astype(np.int32))
        except Exception as error:
            self._recover(step, error)
        else:
            self._scheduler.launch(step)
            self._flights.append(Flight(step, pending))

    def _run(self, step: Step) -> Logits:
        """The step's logits. If it fails its rows are seated all the same, for the plan stands."""
        try:
            return self._model.run(pack(step, self._live))
        except Exception:  # after a SystemExit there is no device to seat them on
            with suppress(SeatError):  # who is refused now will be refused again
                self._seat(step)
            raise

    def _land(self, remaining: int) -> None:
        """Waits for steps under way, the first launched first, until ``remaining`` are left."""
        while len(self._flights) > remaining:
            flight = self._flights.popleft()
            self._scheduler.land(flight.step, *flight.pending.wait())
            self._count(flight.step)

    def _count(self, step: Step) -> None:
        self._steps += 1
        self._computed += int(step.counts.sum())
        self._sampled += int(np.count_nonzero(step.samples))
        self._verdicts = 0

    def _conclude_trial(self) -> None:
        if self._bisection.trial_is_over(self._scheduler.computed):
            self._scheduler.evict()  # the next group runs alone, too
            if self._bisection.on_trial is None:
                self._scheduler.shrink()
                log.warning("no row fails by itself: at most %d live rows for now", self._scheduler.limit)

    def _recover(self, step: Step, error: Exception) -> None:
        """Forgets the cache, keeps the tokens, and narrows down who made ``step`` fail."""
        log.warning("a step of %d rows failed: %s: %s", len(step), type(error).__name__, error)
        self._land(0)
        here = np.flatnonzero(self._live.arrival[step.slots] == step.arrivals)
        ends = (step.starts + step.counts)[here].tolist()
        ids = [self._live.at(slot).row.id for slot in step.slots[here].tolist()]
        self._scheduler.evict()
        if not ids:
            return  # the tokens just landed were the last of all its rows
        if isinstance(error, SeatError):
            self._condemn(error.reasons, error)
        elif isinstance(error, MemoryError):
            self._make_do(len(step), error)
        elif (guilty := self._bisection.failed(dict(zip(ids, ends, strict=True)), len(step))) is not None:
            self._condemn({guilty: error}, error)

    def _make_do(self, num_rows: int, error: Exception) -> None:
        """Out of memory is no row's fault: fewer at a time. If one alone has no room, a new process may."""
        if num_rows <= 1:
            raise error
        self._scheduler.shrink()
        log.warning("out of memory: at most %d live rows for now", self._scheduler.limit)

    def _condemn(self, reasons: Mapping[int, Exception], error: Exception) -> None:
        """Fails rows that were found guilty, unless it goes on like that: then it is not the rows."""
        self._verdicts += 1
        if self._verdicts >= MAX_VERDICTS:
            raise error
        for row_id, reason in reasons.items():
            self._scheduler.fail(row_id, f"{type(reason).__name__}: {reason}")


def fit(policy: Policy, model: Model) -> Policy:
    """``policy``, its prefill share cut to what a run of ``model`` takes beside a decode in every slot."""
    share = min(policy.prefill_tokens, model.max_step_tokens - policy.max_batch)
    if policy.max_batch < 1 or share < 1:
        raise UsageError(
            f"--max-batch {policy.max_batch}: a step of this model takes {model.max_step_tokens} tokens, and "
            f"prompts need some of them. It can be 1 to {model.max_step_tokens - 1}."
        )
    return replace(policy, prefill_tokens=share)
