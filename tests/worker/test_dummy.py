"""The model without weights: it echoes prompts, also where its cache is short."""

from __future__ import annotations

import random

import numpy as np
import pytest
from engine_fakes import WatchfulSampler, run_all

from kernels.rows import RowParams, Status
from worker.dummy import DummyModel
from worker.engine import Engine
from worker.scheduler import Policy
from worker.sequence import Row

ECHO, EOS = 256, 257


class Greedy(WatchfulSampler):
    """The highest logit, nothing else."""

    def draw(self, logits: np.ndarray, slot: int) -> tuple[int, Status]:
        super().draw(logits, slot)
        params, history, num_prompt = self.rows[slot]  # type: ignore[misc]
        token = history[-1] = int(logits.argmax())
        ends = Status.LENGTH if len(history) - num_prompt == params.max_tokens else Status.RUNNING
        return token, Status.EOS if token in params.eos_ids else ends


def echo_rows(count: int) -> list[Row]:
    dice = random.Random(4)
    params = RowParams(max_tokens=64, eos_ids=(EOS,))
    return [Row(i, [dice.randrange(256) for _ in range(dice.randint(1, 40))], params) for i in range(count)]


@pytest.mark.parametrize("num_blocks", [16385, 8])
def test_the_dummy_echoes_prompts_and_ends(num_blocks: int) -> None:
    model = DummyModel(vocab_size=258, echo_id=ECHO, eos_id=EOS, num_blocks=num_blocks, max_step_tokens=200)
    policy = Policy(max_batch=8, reserve_tokens=0)
    engine = Engine(model, Greedy(8, 258), policy)
    ledger = run_all(engine, rows := echo_rows(60))
    assert {one.id: ledger.tokens[one.id] for one in rows} == {
        one.id: [ECHO, *one.prompt, EOS] for one in rows
    }
    assert {output.status for output in ledger.endings.values()} == {Status.EOS}
    assert (engine.load.preemptions > 0) == (num_blocks == 8)


def test_the_dummy_ends_for_ever_where_eos_is_ignored() -> None:
    model = DummyModel(vocab_size=258, echo_id=ECHO, eos_id=EOS)
    engine = Engine(model, Greedy(1, 258), Policy(max_batch=1))
    (output,) = engine.generate([Row(0, [1, 2], RowParams(max_tokens=6))])
    assert (output.tokens, output.status) == ([ECHO, 1, 2, EOS, EOS, EOS], Status.LENGTH)
