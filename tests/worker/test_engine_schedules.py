"""Random schedules over HashModel: joins, preemptions, cancels, failures; every row equals its solo run.

Half of them overlap their steps.

500 by default; ``LIVEBATCH_SCHEDULES=10000`` runs as many. Each is a function of its number alone.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from engine_fakes import DeviceModel, DeviceSampler, Ledger, by_hand, row
from numpy.typing import NDArray

from kernels.rows import Status
from worker.batch import Batch
from worker.blocks import blocks_for
from worker.engine import Engine
from worker.scheduler import Policy
from worker.sequence import Row

SCHEDULES = int(os.environ.get("LIVEBATCH_SCHEDULES", "500"))
PARTS = 20
POISON = 999  # makes a run fail; no row draws it


class TrickyModel(DeviceModel):
    """DeviceModel that fails on POISON."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        if POISON in batch.input_ids:
            self.poison(np.arange(self.num_blocks, dtype=np.int32))
            raise RuntimeError("poison")
        return super().run(batch)


@dataclass
class Schedule:
    """One schedule, drawn from its number: sizes, policy, and what happens before which step."""

    number: int
    rows: dict[int, Row] = field(default_factory=dict)
    adds: dict[int, list[Row]] = field(default_factory=dict)
    cancels: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.dice = dice = random.Random(f"schedule {self.number}")
        self.overlap = dice.random() < 0.5
        self.block_size = dice.choice([1, 2, 3, 4])
        self.context = dice.choice([20, 40, 48])
        self.policy = Policy(
            max_batch=dice.choice([1, 3, 6, 6]),
            prefill_tokens=dice.choice([1, 4, 16, 16]),
            max_overtakes=dice.randint(0, 3),
            lookahead=dice.randint(1, 4),
            reserve_tokens=dice.choice([0, 0, 0, 0, 16]),
            apart=dice.random() < 0.3,
            prefill_launch=dice.choice([0.0, 0.0, 0.5, 3.0]),
        )
        for row_id in range(dice.randint(2, 9)):
            self.rows[row_id] = one = self.draw_row(row_id)
            step = dice.choice([0, 0, 0, dice.randint(0, 30)])
            self.adds.setdefault(step, []).append(one)
            if dice.random() < 0.15:
                self.cancels.setdefault(step + dice.randint(0, 20), []).append(row_id)
        largest = max(len(one.prompt) + one.params.max_tokens for one in self.rows.values())
        self.num_blocks = 1 + blocks_for(
            dice.choice([largest, largest, largest + 5, 20, 60]), self.block_size
        )

    def draw_row(self, row_id: int) -> Row:
        dice = self.dice
        prompt = [dice.randrange(64) for _ in range(dice.choice([1, 4, dice.randint(1, 20)]))]
        if dice.random() < 0.02:
            prompt[dice.randrange(len(prompt))] = POISON
        return row(
            row_id,
            prompt,
            max_tokens=dice.choice([1, 12, dice.randint(2, 18)]),
            streamed=dice.random() < 0.3,
            seed=dice.randrange(64),
            eos_ids=tuple(dice.sample(range(64), dice.randint(0, 4))),
        )

    def run(self) -> tuple[Ledger, Engine]:
        sizes = {"block_size": self.block_size, "context_length": self.context, "num_blocks": self.num_blocks}
        limit = self.policy.max_batch + self.policy.prefill_tokens
        model = TrickyModel(self.policy.max_batch, **sizes, max_step_tokens=limit)
        sampler = DeviceSampler(model)
        engine = Engine(model, sampler, self.policy, overlap=self.overlap)
        ledger, step = Ledger(), 0
        while engine.has_work or step <= max([*self.adds, *self.cancels], default=0):
            for one in self.adds.get(step, ()):
                engine.add(one)
            for row_id in self.cancels.get(step, ()):
                engine.cancel(row_id)
            ledger.book(engine.step(), self.rows)
            engine.check()
            model.poison(engine._pool.free_blocks)
            step += 1
            assert step < 2000, "no end"
        engine.step()
        assert sampler.most_on_their_way <= 1 + self.overlap
        self.has_overlapped = sampler.most_on_their_way == 2
        assert sampler.rows == [None] * self.policy.max_batch, "a slot leaked"
        assert engine.load.free_blocks == self.num_blocks - 1
        return ledger, engine

    def verify(self, ledger: Ledger) -> None:
        assert ledger.endings.keys() == self.rows.keys()
        for row_id, one in self.rows.items():
            output, tokens = ledger.endings[row_id], ledger.tokens[row_id]
            if output.status == Status.TOO_LARGE:
                assert not self.can_fit(one)
                assert tokens == []
            elif output.status == Status.FAILED:
                assert POISON in one.prompt
                assert output.message == "RuntimeError: poison"
                assert tokens == []
            else:
                assert self.can_fit(one)
                self.verify_tokens(one, tokens, output.status)

    def verify_tokens(self, one: Row, tokens: list[int], status: Status) -> None:
        cancelled = status == Status.CANCELLED
        if POISON in one.prompt:
            assert (cancelled, tokens) == (True, [])
            return
        whole, how = by_hand(one)
        assert tokens == (whole[: len(tokens)] if cancelled else whole)
        assert cancelled or status == how
        assert not cancelled or any(one.id in ids for ids in self.cancels.values())

    def can_fit(self, one: Row) -> bool:
        total = len(one.prompt) + one.params.max_tokens
        return total <= self.context and blocks_for(total - 1, self.block_size) < self.num_blocks


@pytest.mark.parametrize("part", range(PARTS))
def test_random_schedules(part: int) -> None:
    seen = Counter[str]()
    for number in range(part, SCHEDULES, PARTS):
        schedule = Schedule(number)
        try:
            ledger, engine = schedule.run()
            schedule.verify(ledger)
        except Exception as error:
            error.add_note(f"schedule {number}")
            raise
        seen.update(output.status.name for output in ledger.endings.values())
        seen["preempted"] += engine.load.preemptions
        seen["overlapped"] += schedule.has_overlapped
    if SCHEDULES >= 500:  # the schedules do meet what they are here for
        assert min(seen[what] for what in ("LENGTH", "EOS", "CANCELLED", "TOO_LARGE")) > 0
        assert seen["preempted"] > 0
        assert seen["overlapped"] > 0
