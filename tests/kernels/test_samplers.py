"""What a batched sampler promises, asked of every twin: slots, endings, and no neighbour's influence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from device import OnDevice

from kernels import cpu, reference
from kernels.rows import RowParams, Status

V = 200
KINDS = {
    "greedy": {"temperature": 0.0},
    "by id": {"temperature": 1.0},
    "top_k": {"top_k": 20, "top_p": 0.9},
    "top_p": {"top_p": 0.95, "min_p": 0.01},
    "penalised": {
        "top_k": 50,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
        "no_repeat_ngram_size": 2,
    },
}


@pytest.fixture(
    params=[
        pytest.param(reference.BatchedSampler, id="reference"),
        pytest.param(cpu.BatchedSampler, id="cpu"),
        pytest.param(OnDevice, id="cuda", marks=pytest.mark.gpu),
    ]
)
def make(request: pytest.FixtureRequest) -> Any:
    return request.param


def logits(step: int, rows: int = 1) -> np.ndarray:
    return np.random.default_rng(step).normal(0, 3, (rows, V)).astype(np.float32)


def alone(make: Any, params: RowParams, steps: int = 6) -> list[int]:
    sampler = make(1, V, 64)
    sampler.admit(0, params, [3, 4, 3])
    return [int(sampler.step(logits(step), [0])[0][0]) for step in range(steps)]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(cpu.BatchedSampler, id="cpu"),
        pytest.param(OnDevice, id="cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("wrong", [{"stop_ids": tuple(range(V))}, {"allowed_ids": (2 * V,)}])
def test_a_row_that_is_refused_leaves_its_slot_free(make: Any, wrong: dict[str, Any]) -> None:
    """And nothing of its masks to the slot's next row."""
    sampler = make(1, V, 64)
    with pytest.raises((ValueError, IndexError)):
        sampler.admit(0, RowParams(max_tokens=9, **{"banned_ids": tuple(range(100)), **wrong}), [3])
    with pytest.raises(KeyError):
        sampler.release(0)
    sampler.admit(0, RowParams(max_tokens=9, temperature=0.0, logit_bias=((5, 100.0),)), [3, 4, 3])
    assert sampler.step(logits(0), [0])[0][0] == 5


# ------------------------------------------------------------------------------------------- invariance


@pytest.mark.parametrize("kind", KINDS)
def test_same_row_at_every_position_of_32(make: Any, kind: str) -> None:
    params = RowParams(max_tokens=40, seed=9, **KINDS[kind])
    expected = alone(make, params)
    for position in (0, 9, 31) if make is reference.BatchedSampler else range(32):
        sampler = make(32, V, 64)
        for slot, other in zip(range(32), list(KINDS.values()) * 7, strict=False):
            sampler.admit(slot, RowParams(max_tokens=40, seed=slot, **other), [slot])
        sampler.release(position)
        sampler.admit(position, params, [3, 4, 3])
        for step in range(6):
            z = logits(100 + step, 32)
            z[position] = logits(step)[0]
            z[(position + 1) % 32, 5] = np.nan
            assert sampler.step(z, np.arange(32))[0][position] == expected[step]


@pytest.mark.parametrize("kind", KINDS)
def test_any_slot_and_any_order(make: Any, kind: str) -> None:
    params = RowParams(max_tokens=40, seed=9, **KINDS[kind])
    expected = alone(make, params)
    sampler = make(8, V, 64)
    sampler.admit(6, params, [3, 4, 3])
    sampler.admit(1, RowParams(max_tokens=40), [1])
    for step in range(6):
        z = np.concatenate([logits(step + 50), logits(step)])
        assert sampler.step(z, [1, 6])[0][1] == expected[step]


@pytest.mark.parametrize("kind", KINDS)
def test_slot_reuse_leaves_no_trace(make: Any, kind: str) -> None:
    params = RowParams(max_tokens=40, seed=9, **KINDS[kind])
    sampler = make(1, V, 64)
    dirty = RowParams(
        max_tokens=30, seed=1, repetition_penalty=3.0, presence_penalty=2.0, no_repeat_ngram_size=1,
        logit_bias=((3, 9.0),), banned_ids=(4, 5), eos_ids=(199,), stop_ids=(198,), min_tokens=9,
    )  # fmt: skip
    sampler.admit(0, dirty, range(30))
    sampler.set_mask(0, np.full(7, 0x55555555, np.uint32))
    for step in range(4):
        sampler.step(logits(step + 9), [0])
    sampler.release(0)
    sampler.admit(0, params, [3, 4, 3])
    assert [int(sampler.step(logits(step), [0])[0][0]) for step in range(6)] == alone(make, params)


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_row_resumes(make: Any, kind: str) -> None:
    params = RowParams(max_tokens=40, seed=9, **KINDS[kind])
    expected = alone(make, params)
    sampler = make(2, V, 64)
    sampler.admit(1, params, [3, 4, 3], expected[:3])
    assert [int(sampler.step(logits(step), [1])[0][0]) for step in range(3, 6)] == expected[3:]


def test_samples_of_one_seed_differ(make: Any) -> None:
    rows = [alone(make, RowParams(max_tokens=9, temperature=2.0, seed=5, sample=i)) for i in range(4)]
    assert len({tuple(row) for row in rows}) == 4


# ------------------------------------------------------------------------------------------- endings


def step(sampler: Any, *values: float, slot: int = 0) -> tuple[int, Status]:
    """One step on logits that are 0 but for the given leading ones."""
    z = np.zeros((1, V), np.float32)
    z[0, : len(values)] = values
    tokens, status = sampler.step(z, [slot])
    return int(tokens[0]), Status(int(status[0]))


def test_endings(make: Any) -> None:
    endings = {"eos_ids": (1,), "stop_ids": (2,)}
    for values, expected in [
        ((0, 9), (1, Status.EOS)),
        ((0, 0, 9), (2, Status.STOP)),
        ((0, 0, 0, 9), (3, Status.RUNNING)),
    ]:
        sampler = make(1, V, 64)
        sampler.admit(0, RowParams(max_tokens=2, temperature=0.0, **endings), [1])
        assert step(sampler, *values) == expected
    assert step(sampler, 0, 0, 0, 0, 9) == (4, Status.LENGTH)
    assert step(sampler, 0, 9) == (-1, Status.LENGTH)  # an ended row stays as it is


def test_min_tokens_holds_back_every_ender(make: Any) -> None:
    sampler = make(1, V, 64)
    params = RowParams(
        max_tokens=9, min_tokens=2, temperature=0.0, eos_ids=(0,), stop_ids=(1,), held_ids=(2,)
    )
    sampler.admit(0, params, [1])
    assert step(sampler, 9, 8, 7, 6) == (3, Status.RUNNING)
    assert step(sampler, 9, 8, 7, 6) == (3, Status.RUNNING)
    assert step(sampler, 0, 0, 9) == (2, Status.RUNNING)  # a held id ends nothing
    assert step(sampler, 9, 8, 7, 6) == (0, Status.EOS)


def test_invalid_logits_fail_one_row_alone(make: Any) -> None:
    sampler = make(3, V, 64)
    for slot in range(3):
        sampler.admit(slot, RowParams(max_tokens=9, allowed_ids=(1, 2), temperature=0.0), [1])
    z = logits(0, 3)
    z[0, 150] = np.nan  # even where the row's own list would mask it
    z[1] = -np.inf
    tokens, status = sampler.step(z, [0, 1, 2])
    assert list(status) == [Status.INVALID_LOGITS, Status.INVALID_LOGITS, Status.RUNNING]
    assert list(tokens[:2]) == [-1, -1]
    assert tokens[2] in (1, 2)


def test_masks_that_leave_nothing(make: Any) -> None:
    sampler = make(1, V, 64)
    sampler.admit(0, RowParams(max_tokens=9, allowed_ids=(1,), banned_ids=(1,)), [1])
    assert step(sampler, 1, 1) == (-1, Status.NO_ALLOWED_TOKEN)


def test_grammar_mask_joins_the_rows_own_lists(make: Any) -> None:
    sampler = make(1, V, 64)
    sampler.admit(0, RowParams(max_tokens=9, temperature=0.0, banned_ids=(5,)), [1])
    bits = np.zeros(7, np.uint32)
    bits[0] = 0b1100000  # ids 5 and 6
    sampler.set_mask(0, bits)
    assert step(sampler, 9, 9, 9, 9, 9, 9, 1)[0] == 6
    sampler.set_mask(0, None)
    assert step(sampler, 0, 9)[0] == 1
    assert step(sampler, 0, 0, 0, 0, 0, 9, 8)[0] == 6  # the ban stays


# ------------------------------------------------------------------------------------------- misuse


def test_misuse_is_refused(make: Any) -> None:
    sampler = make(2, V, 16)
    sampler.admit(0, RowParams(max_tokens=9), [1])
    with pytest.raises(ValueError, match="taken"):
        sampler.admit(0, RowParams(max_tokens=9), [1])
    with pytest.raises(ValueError, match="not one of 2"):
        sampler.admit(2, RowParams(max_tokens=9), [1])
    with pytest.raises(ValueError, match="exceed 16"):
        sampler.admit(1, RowParams(max_tokens=9), range(8))
    with pytest.raises(KeyError):
        sampler.release(1)


def test_no_rows(make: Any) -> None:
    tokens, status = make(2, V, 16).step(np.zeros((0, V), np.float32), np.zeros(0, np.int32))
    assert tokens.shape == status.shape == (0,)


def test_threads_make_no_difference() -> None:
    z = logits(1, 32)
    results = []
    for threads in (1, 2, 5):
        sampler = cpu.BatchedSampler(32, V, 64, threads)
        for slot, kind in zip(range(32), list(KINDS.values()) * 7, strict=False):
            sampler.admit(slot, RowParams(max_tokens=9, seed=slot, **kind), [1])
        results.append(sampler.step(z, np.arange(32))[0].tolist())
    assert results[0] == results[1] == results[2]


def test_logits_stay_as_they_are(make: Any) -> None:
    z = logits(1)
    sampler = make(1, V, 64)
    sampler.admit(0, RowParams(max_tokens=9, banned_ids=(1,), repetition_penalty=2.0), [1, 2])
    sampler.step(z, [0])
    np.testing.assert_array_equal(z, logits(1))
