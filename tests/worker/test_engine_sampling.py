"""The samplers of the maths room in the loop: mixed settings, forced preemption, each row as it is alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_fakes import HashModel, Ledger, run_all

from kernels import cpu, reference
from kernels.rows import RowParams, Status
from worker.engine import Engine
from worker.scheduler import Policy
from worker.sequence import Row

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.5},
    {"temperature": 0.0, "no_repeat_ngram_size": 2},
    {"temperature": 90.0},
    {"temperature": 60.0, "top_k": 9, "top_p": 0.9},
    {"temperature": 60.0, "min_p": 0.1, "presence_penalty": 2.0, "frequency_penalty": 1.0},
    {"temperature": 80.0, "allowed_ids": (3, 5, 8, 13)},
    {"temperature": 80.0, "logit_bias": ((7, 90.0),), "banned_ids": (1, 2)},
    {"temperature": 70.0, "min_tokens": 8, "eos_ids": tuple(range(20)), "stop_ids": tuple(range(20, 50))},
    {"temperature": 70.0, "held_ids": tuple(range(10)), "min_tokens": 4},
]


def mixed(count: int) -> list[Row]:
    dice = random.Random(11)
    rows = []
    for i in range(count):
        most = dice.randint(1, 30)
        numbers = {
            "eos_ids": (dice.randrange(64),),
            **SETTINGS[i % len(SETTINGS)],
            "seed": dice.getrandbits(64),
        }
        numbers["min_tokens"] = min(numbers.get("min_tokens", 0), most)
        prompt = [dice.randrange(64) for _ in range(dice.randint(1, 30))]
        rows.append(Row(i, prompt, RowParams(max_tokens=most, **numbers)))
    return rows


def ran(sampler: Any, rows: list[Row], max_batch: int, num_blocks: int) -> tuple[Engine, Ledger]:
    model = HashModel(num_blocks=num_blocks)
    policy = Policy(max_batch=max_batch, prefill_tokens=16, reserve_tokens=0)
    engine = Engine(model, sampler.BatchedSampler(max_batch, model.vocab_size, model.context_length), policy)
    return engine, run_all(engine, rows)


def outcomes(ledger: Ledger) -> dict[int, tuple[list[int], Status]]:
    return {i: (ledger.tokens[i], output.status) for i, output in ledger.endings.items()}


@pytest.mark.parametrize("max_batch", [4, 16])
def test_each_row_draws_what_it_draws_alone(max_batch: int) -> None:
    rows = mixed(60)
    _, alone = ran(reference, rows, max_batch=1, num_blocks=65)
    for twin in (reference, cpu):
        shuffled = random.Random(max_batch).sample(rows, len(rows))
        engine, together = ran(twin, shuffled, max_batch, num_blocks=19)
        assert engine.load.preemptions > 10
        assert outcomes(together) == outcomes(alone)
    assert {status for _, status in outcomes(alone).values()} >= {Status.EOS, Status.STOP, Status.LENGTH}
