"""The master test, on the real model: batched equals isolated, bit for bit, any live batch, any order."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from kernels.cpu import BatchedSampler
from kernels.rows import RowParams
from worker.engine import Engine
from worker.folder import ModelFolder
from worker.model import OrtModel
from worker.scheduler import Policy
from worker.sequence import Row

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

Results = dict[int, tuple[tuple[int, ...], int]]  # row id -> (tokens, status)


def mixed_rows(count: int) -> list[Row]:
    """Greedy and seeded rows, every filter, penalties, held-back and stop ids; prompts of 1 to 90 tokens."""
    rng = random.Random(3)
    rows = []
    for index in range(count):
        prompt = [rng.randrange(300, 40000) for _ in range(rng.choice([1, 5, 12, 30, 90]))]
        params = RowParams(
            max_tokens=rng.choice([1, 4, 9, 16]),
            temperature=rng.choice([0.0, 0.6, 1.0, 1.4]),
            top_k=rng.choice([0, 0, 5, 50]),
            top_p=rng.choice([1.0, 0.9, 0.6]),
            min_p=rng.choice([0.0, 0.0, 0.1]),
            seed=index,
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.0, 1.0]),
            presence_penalty=rng.choice([0.0, 0.0, 0.5]),
            no_repeat_ngram_size=rng.choice([0, 0, 2]),
            min_tokens=rng.choice([0, 0, 3]),
            eos_ids=(2,),
            stop_ids=rng.choice([(), (260, 28), (198,)]),
        )
        rows.append(Row(index, prompt, params))
    return rows


@cache
def model(folder: Path, num_blocks: int) -> OrtModel:
    return OrtModel(ModelFolder.load(folder), num_blocks=num_blocks)


def run(model: OrtModel, rows: list[Row], live: int, reserve: int = 16) -> tuple[Results, int]:
    """(result of every row, preemptions), invariants checked after each step."""
    sampler = BatchedSampler(live, model.vocab_size, model.context_length)
    engine = Engine(model, sampler, Policy(max_batch=live, reserve_tokens=reserve))
    for row in rows:
        engine.add(row)
    results: Results = {}
    while engine.has_work:
        for output in engine.step():
            assert output.id not in results
            results[output.id] = (tuple(output.tokens), output.status)
        engine.check()
    return results, engine.load.preemptions


@pytest.mark.parametrize("live", [4, 16])
@pytest.mark.parametrize("order", ["file order", "shuffled"])
def test_batched_equals_isolated(model_folder: Path, alone: Results, live: int, order: str) -> None:
    rows = mixed_rows(64)
    if order == "shuffled":
        random.Random(live).shuffle(rows)
    results, _ = run(model(model_folder, 256), rows, live)
    assert results == alone


def test_preempted_rows_resume_exactly(model_folder: Path, alone: Results) -> None:
    """A pool so small that rows make way for one another in mid generation."""
    results, preemptions = run(model(model_folder, 14), mixed_rows(64), 16, reserve=0)
    assert preemptions > 3
    assert results == alone


@pytest.fixture(scope="module")
def alone(model_folder: Path) -> Results:
    """Every row by itself, one after the other, in file order."""
    results, _ = run(model(model_folder, 256), mixed_rows(64), 1)
    assert len({tokens for tokens, _ in results.values()}) > 48, "rows should differ"
    assert {status for _, status in results.values()} >= {2, 3}, "some stop, some reach their limit"
    return results
