"""The models without weights: HashModel notices every way to read the cache wrong, DummyModel echoes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from engine_fakes import WatchfulSampler, hashed, run_all

from kernels.rows import RowParams, Status
from worker.batch import Batch
from worker.dummy import DummyModel, HashModel
from worker.engine import Engine
from worker.scheduler import Policy
from worker.sequence import Row

ECHO, EOS = 256, 257
TOKENS = [5, 6, 7, 8, 9, 10]


def batch(tokens: list[int], past: int, blocks: list[int]) -> Batch:
    return Batch(
        input_ids=np.array(tokens, np.int64),
        cumulative=np.array([0, len(tokens)], np.int32),
        past=np.array([past], np.int32),
        block_table=np.array([blocks], np.int32),
        logits_rows=np.array([len(tokens) - 1], np.int64),
        slots=np.zeros(1, np.int32),
    )


def test_the_next_token_is_the_hash_of_all_tokens_whatever_the_chunks() -> None:
    for cut in range(1, 6):
        model = HashModel(block_size=4)
        model.run(batch(TOKENS[:cut], 0, [3, 9]))
        logits = model.run(batch(TOKENS[cut:], cut, [3, 9]))
        assert logits.shape == (1, 64)
        assert logits.argmax() == hashed(TOKENS)


def blocks_swapped(right: Batch) -> Batch:
    return replace(right, block_table=right.block_table[:, ::-1].copy())


def token_off(right: Batch) -> Batch:
    return replace(right, input_ids=right.input_ids + 1)


def stale_block(right: Batch) -> Batch:
    return replace(right, block_table=np.array([[3, 9]], np.int32))


def position_off(right: Batch) -> Batch:
    return replace(right, past=right.past - 1)


@pytest.mark.parametrize("damage", [blocks_swapped, token_off, stale_block, position_off])
def test_hash_model_notices(damage: Callable[[Batch], Batch]) -> None:
    model = HashModel(block_size=4)
    for blocks in ([3, 9], [9, 5], [3, 9]):  # earlier rows'
        model.run(batch([1, 2, 3, 4, 5, 6, 7, 8], 0, blocks))
    model.run(batch(TOKENS[:5], 0, [3, 5]))
    assert model.run(batch(TOKENS[5:], 5, [3, 5])).argmax() == hashed(TOKENS)
    assert model.run(damage(batch(TOKENS[5:], 5, [3, 5]))).argmax() != hashed(TOKENS)


def test_hash_model_refuses_to_read_what_nobody_wrote() -> None:
    model = HashModel(block_size=4)
    model.run(batch(TOKENS[:5], 0, [3, 5]))
    model.poison(np.array([3], np.int32))
    with pytest.raises(AssertionError, match="nobody wrote"):
        model.run(batch(TOKENS[5:], 5, [3, 5]))


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
