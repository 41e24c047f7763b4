"""The loop over HashModel, whose every token hangs on every cached position: batched equals alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from engine_fakes import (
    DeviceModel,
    DeviceSampler,
    HashModel,
    Ledger,
    WatchfulSampler,
    by_hand,
    drain,
    engine_over,
    row,
    run_all,
    solo,
)
from numpy.typing import NDArray

from kernels.rows import Status
from producer.errors import UsageError
from worker.batch import Batch
from worker.engine import Engine
from worker.scheduler import Policy
from worker.sequence import Row


def mixed_rows(count: int, seed: int = 0) -> list[Row]:
    dice = random.Random(seed)
    return [
        row(
            i,
            [dice.randrange(64) for _ in range(dice.randint(1, 40))],
            max_tokens=dice.randint(1, 30),
            streamed=dice.random() < 0.3,
            seed=dice.randrange(1000),
            eos_ids=(dice.randrange(64),),
            stop_ids=(dice.randrange(64),),
        )
        for i in range(count)
    ]


def assert_each_equals_solo(ledger: Ledger, rows: list[Row]) -> None:
    alone = {one.id: solo(one) for one in rows}
    assert {i: (ledger.tokens[i], ledger.endings[i].status) for i in alone} == alone


def test_a_row_alone_gives_what_the_statement_by_hand_gives() -> None:
    rows = mixed_rows(100, seed=2)
    assert [solo(one) for one in rows] == [by_hand(one) for one in rows]


@pytest.mark.parametrize("max_batch", [1, 4, 16])
@pytest.mark.parametrize("shuffled", [False, True])
def test_batched_equals_alone(max_batch: int, shuffled: bool) -> None:
    rows = mixed_rows(64)
    queued = random.Random(1).sample(rows, len(rows)) if shuffled else rows
    ledger = run_all(engine_over(HashModel(num_blocks=257), max_batch=max_batch), queued)
    assert_each_equals_solo(ledger, rows)


@pytest.mark.parametrize("num_blocks", [19, 24, 40])
def test_a_small_pool_preempts_and_changes_nothing(num_blocks: int) -> None:
    rows = mixed_rows(64)
    engine = engine_over(HashModel(num_blocks=num_blocks), max_batch=16, reserve_tokens=0)
    ledger = run_all(engine, rows)
    assert engine.load.preemptions > 20
    assert_each_equals_solo(ledger, rows)


@pytest.mark.parametrize("num_blocks", [19, 24, 257])
def test_overlapped_equals_alone(num_blocks: int) -> None:
    rows = mixed_rows(64)
    model = DeviceModel(16, num_blocks=num_blocks)
    sampler = DeviceSampler(model)
    policy = Policy(max_batch=16, prefill_tokens=16, reserve_tokens=0, prefill_launch=0.5)
    engine = Engine(model, sampler, policy, overlap=True)
    ledger = run_all(engine, rows)
    assert sampler.most_on_their_way == 2
    assert (engine.load.preemptions > 20) == (num_blocks < 257)
    assert_each_equals_solo(ledger, rows)


def test_rows_wait_until_a_run_of_prefills_pays() -> None:
    policy = Policy(max_batch=8, prefill_tokens=16, prefill_launch=3.0)
    engine = Engine(HashModel(), WatchfulSampler(8, 64), policy)
    for one in [row(i, [i], max_tokens=30) for i in range(6)]:
        engine.add(one)
    engine.step()
    engine.add(row(8, [1], max_tokens=2))
    engine.add(row(9, [2], max_tokens=2))
    seated = [(engine.step(), engine.load.live)[1] for _ in range(10)]
    assert seated == [6] * 8 + [8, 6]  # two empty slots a step, until six rows times three steps are lost


@pytest.mark.parametrize("prefill_tokens", [1, 3, 7, 48])
def test_chunks_of_any_size_change_nothing(prefill_tokens: int) -> None:
    rows = mixed_rows(24, seed=5)
    ledger = run_all(engine_over(HashModel(), prefill_tokens=prefill_tokens), rows)
    assert_each_equals_solo(ledger, rows)


def test_generate_pulls_rows_as_it_needs_them() -> None:
    rows, pulled = mixed_rows(40), []

    def source() -> Iterator[Row]:
        for one in rows:
            pulled.append(one.id)
            yield one

    outputs = engine_over(HashModel(), max_batch=2).generate(source())
    next(outputs)
    assert len(pulled) < 12
    ended = [output.id for output in outputs if output.status != Status.RUNNING]
    assert len(ended) == len(set(ended)) >= 39


def test_a_refused_row_gets_its_output_though_nothing_runs() -> None:
    engine = engine_over(HashModel())
    engine.add(row(5, [1] * 100, max_tokens=100))
    assert engine.has_work
    (output,) = engine.step()
    assert (output.id, output.status) == (5, Status.TOO_LARGE)
    assert not engine.has_work
    assert engine.load.steps == 0


def test_rows_that_named_no_max_tokens_share_a_pool_smaller_than_their_context() -> None:
    """Each may fill it: they make way for one another, and none fails."""
    model = HashModel(num_blocks=9)  # 32 positions, and the last token needs none
    rows = [row(i, [i, i + 1, i + 2], max_tokens=125) for i in range(6)]
    assert model.context_length == 128
    ledger = run_all(engine_over(model), [replace(one, open_ended=True) for one in rows])
    for one in rows:
        expected = solo(replace(one, params=replace(one.params, max_tokens=30)))
        assert (ledger.tokens[one.id], ledger.endings[one.id].status) == expected


def test_cancelling_rows_frees_their_seats_and_touches_nobody() -> None:
    rows = mixed_rows(12, seed=3)
    engine, ledger = engine_over(HashModel()), Ledger()
    by_id = {one.id: one for one in rows}
    for one in rows:
        engine.add(one)
    for _ in range(3):
        ledger.book(engine.step(), by_id)
    for row_id in (0, 2, 9, 99):
        engine.cancel(row_id)
    drain(engine, ledger, by_id)
    cancelled = {i for i, output in ledger.endings.items() if output.status == Status.CANCELLED}
    assert cancelled <= {0, 2, 9}
    assert 9 in cancelled
    assert_each_equals_solo(ledger, [one for one in rows if one.id not in cancelled])
    for row_id in cancelled:
        whole, _ = solo(by_id[row_id])
        assert ledger.tokens[row_id] == whole[: len(ledger.tokens[row_id])]


def test_every_slot_of_the_sampler_is_given_back() -> None:
    sampler = WatchfulSampler(4, 64)
    engine = Engine(HashModel(num_blocks=20), sampler, Policy(max_batch=4, prefill_tokens=16))
    run_all(engine, mixed_rows(40, seed=8))
    assert engine.step() == []
    assert sampler.rows == [None] * 4
    assert (engine.load.live, engine.load.waiting, engine.load.free_blocks) == (0, 0, 19)


def test_load_counts_every_token_once() -> None:
    engine = engine_over(HashModel())
    ledger = run_all(engine, rows := mixed_rows(20))
    sampled = sum(map(len, ledger.tokens.values()))
    assert engine.load.tokens_sampled == sampled
    prompts = sum(len(one.prompt) for one in rows)
    assert engine.load.tokens_computed == prompts + sampled - len(rows)  # the last token is never run


@pytest.mark.parametrize(("max_batch", "share"), [(10, 6), (15, 1)])
def test_steps_keep_to_the_models_limit(max_batch: int, share: int) -> None:
    model = HashModel(max_step_tokens=16, num_blocks=257)  # asserts it
    engine = engine_over(model, max_batch=max_batch, prefill_tokens=99)
    assert engine._scheduler.policy.prefill_tokens == share
    run_all(engine, mixed_rows(30))


@pytest.mark.parametrize("max_batch", [0, 16, 17])
def test_a_batch_without_room_for_prompts_is_refused(max_batch: int) -> None:
    with pytest.raises(UsageError, match="max-batch"):
        engine_over(HashModel(max_step_tokens=16), max_batch=max_batch)


class NanModel(HashModel):
    """Gives NaN to any row whose next input is 13."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        logits = super().run(batch)
        logits[batch.input_ids[batch.logits_rows] == 13] = np.nan
        return logits


def test_a_row_with_invalid_logits_ends_alone() -> None:
    rows = [*mixed_rows(20), row(20, [1, 2, 13], max_tokens=5)]
    ledger = run_all(engine_over(NanModel()), rows)
    assert (ledger.tokens[20], ledger.endings[20].status) == ([], Status.INVALID_LOGITS)
    sound = [one for one in rows if 13 not in solo(one)[0] and 13 not in one.prompt]
    assert len(sound) > 5
    assert_each_equals_solo(ledger, sound)
