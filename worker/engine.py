"""Engine: THE LOOP. Admit, plan, run, sample, commit.

Takes rows of token ids, gives Outputs. Knows no text, no Redis and no clock; model and sampler are duck-typed
(worker/protocols.py), so CPU, CUDA and fakes look alike from here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from producer.errors import UsageError
from worker.batch import pack
from worker.bisection import Bisection
from worker.blocks import BlockPool
from worker.live import LiveBatch
from worker.protocols import Model, Sampler
from worker.scheduler import Policy, Scheduler
from worker.sequence import Ints, Output, Row, Step

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


class Engine:
    """Runs rows in one live batch: they join and leave at any step, and none changes another's output.

    A plan needs lengths and no tokens (a Step holds none), and only ``commit`` reads what was drawn. A loop
    that launches step t + 1 before it has step t's tokens would split ``commit`` in two: lengths move on at
    the launch of a step, tokens and endings are booked when they arrive.
    """

    def __init__(self, model: Model, sampler: Sampler, policy: Policy | None = None) -> None:
        """``sampler`` has ``policy.max_batch`` slots at least. UsageError if the policy asks too much."""
        policy = fit(policy or Policy(), model)
        self._model = model
        self._sampler = sampler
        self._pool = BlockPool(model.num_blocks)
        self._live = LiveBatch(policy.max_batch, model.context_length, model.block_size)
        self._scheduler = Scheduler(policy, self._pool, self._live, model.context_length)
        self._bisection = Bisection()
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
        step = self._scheduler.plan(self._bisection.on_trial)
        self._seat(step)
        if len(step):
            try:
                tokens, status = self._run(step)
            except Exception as error:
                self._recover(step, error)
            else:
                self._scheduler.commit(step, tokens, status)
                self._count(step)
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
        )

    def check(self) -> None:
        """Raises AssertionError where the engine's own books contradict one another."""
        self._scheduler.check()

    def _seat(self, step: Step) -> None:
        for slot in step.left:
            self._sampler.release(slot)
        for sequence in step.joined:
            row = sequence.row
            self._sampler.admit(sequence.slot, row.params, row.prompt, sequence.output)

    def _run(self, step: Step) -> tuple[Ints, NDArray[np.uint8]]:
        slots = step.slots[step.samples].astype(np.int32)
        logits = self._model.run(pack(step, self._live))
        if not len(slots):  # chunks of prompts only
            return np.empty(0, np.int32), np.empty(0, np.uint8)
        return self._sampler.step(logits, slots)

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
        ends = (step.starts + step.counts).tolist()
        ids = [self._live.at(slot).row.id for slot in step.slots.tolist()]
        self._scheduler.evict()
        guilty = self._bisection.failed(dict(zip(ids, ends, strict=True)))
        if guilty is not None:
            self._verdicts += 1
            if self._verdicts >= MAX_VERDICTS:
                raise error
            self._scheduler.fail(guilty, f"{type(error).__name__}: {error}")


def fit(policy: Policy, model: Model) -> Policy:
    """``policy``, its prefill share cut to what a run of ``model`` takes beside a decode in every slot."""
    share = min(policy.prefill_tokens, model.max_step_tokens - policy.max_batch)
    if policy.max_batch < 1 or share < 1:
        raise UsageError(
            f"--max-batch {policy.max_batch}: a step of this model takes {model.max_step_tokens} tokens, and "
            f"prompts need some of them. It can be 1 to {model.max_step_tokens - 1}."
        )
    return replace(policy, prefill_tokens=share)
