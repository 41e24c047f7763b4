"""The CUDA sampler on a device: equal to the CPU twin bit for bit, one launch, no allocation, no waiting."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from cases import OCTAVE, between_bins, history, logits_row, row_params
from device import OnDevice, rounded

from kernels import cpu
from kernels.rows import RowParams, Status

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(3600)]

# LIVEBATCH_TWIN_ROWS=100000 is the full run.
ROWS = int(os.environ.get("LIVEBATCH_TWIN_ROWS", "5000"))
BATCH = 64
SIZES = (64, 31, 7)  # rows of a step: each is spread over the device in another shape
SHARES = {
    2: 0.08, 3: 0.08, 50: 0.25, 1000: 0.35, 5000: 0.1, 32000: 0.03, 49152: 0.03, 50257: 0.03, 128256: 0.01,
    151936: 0.01, 201088: 0.01, 262144: 0.01,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("vocab_size", SHARES)
def test_random_rows(vocab_size: int, kind: str) -> None:
    rng = np.random.default_rng(vocab_size)
    twins = (cpu.BatchedSampler(BATCH, vocab_size, 64), OnDevice(BATCH, vocab_size, 64, kind))
    share = SHARES[vocab_size] * (0.6 if kind == "float32" else 0.2)
    for _ in range(max(1, round(ROWS * share / sum(SIZES)))):
        admit_all(rng, vocab_size, twins)
        for size in SIZES:
            check_step(rng, vocab_size, twins, size)
        for slot in range(BATCH):
            for twin in twins:
                twin.release(slot)


def admit_all(rng: np.random.Generator, vocab_size: int, twins: Any) -> None:
    for slot in range(BATCH):
        params, prompt = row_params(rng, vocab_size), history(rng, vocab_size)
        grammar = rng.integers(2**32, size=-(-vocab_size // 32), dtype=np.uint32)
        for twin in twins:
            twin.admit(slot, params, prompt)
            if slot % 10 == 0:
                twin.set_mask(slot, grammar)


def check_step(rng: np.random.Generator, vocab_size: int, twins: Any, size: int) -> None:
    slots = rng.permutation(BATCH)[:size]
    logits = np.full((size, vocab_size + int(rng.integers(6))), 1e9, np.float32)
    logits[:, :vocab_size] = [logits_row(rng, vocab_size) for _ in slots]
    twins[1].offset = int(rng.integers(4))
    logits = rounded(logits, twins[1].kind)
    expected, got = (twin.step(logits, slots) for twin in twins)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


FLAT: list[tuple[int, float, float, float]] = [  # top_k, top_p, min_p, temperature
    (0, 0.9, 0, 1), (0, 1, 1e-9, 1), (600, 0.9, 0, 1), (5000, 1, 0, 1), (512, 1, 0, 2), (50, 1, 0, 1),
    (0, 0.99, 0, 0.8), (0, 0.9999, 0, 0.8), (0, 0.95, 0.001, 1), (0, 0.3, 0, 0.3), (0, 0.9, 0, 100),
]  # fmt: skip


@pytest.mark.parametrize("rows", [7, 22, 44])
@pytest.mark.parametrize("spread", [0.0, 1e-7, 0.01, 0.5, 3.0, 8.0])
def test_what_candidates_cannot_settle(spread: float, rows: int) -> None:
    """Ties by the thousand, nuclei of most of the vocabulary, deep ones: bins, split ones too, on purpose."""
    vocab_size = 60_000
    twins = (cpu.BatchedSampler(rows, vocab_size, 64), OnDevice(rows, vocab_size, 64))
    for slot in range(rows):
        top_k, top_p, min_p, temperature = FLAT[slot % len(FLAT)]
        params = RowParams(
            max_tokens=40, seed=slot, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature
        )
        for twin in twins:
            twin.admit(slot, params, [1])
    rng = np.random.default_rng(5)
    for _ in range(3):
        logits = (8 + spread * rng.normal(size=(rows, vocab_size))).astype(np.float32)
        expected, got = (twin.step(logits, np.arange(rows)) for twin in twins)
        np.testing.assert_array_equal(got[0], expected[0])


@pytest.mark.parametrize("rows", [7, 22, 44])
@pytest.mark.parametrize("spread", [1.0, 2.0, 4.0, 8.0])
def test_entries_between_two_bins(spread: float, rows: int) -> None:
    """Each is counted once, in the bin it is later looked for in; also at the border of the near bins."""
    vocab_size = 60_000
    twins = (cpu.BatchedSampler(rows, vocab_size, 64), OnDevice(rows, vocab_size, 64))
    for slot in range(rows):
        top_p = (0.5, 0.9, 0.95, 0.99, 0.9999)[slot % 5]
        for twin in twins:
            twin.admit(slot, RowParams(max_tokens=40, seed=slot, top_p=top_p, temperature=OCTAVE), [1])
    rng = np.random.default_rng(6)
    for _ in range(8):
        logits = between_bins(rng, (rows, vocab_size), spread)
        expected, got = (twin.step(logits, np.arange(rows)) for twin in twins)
        np.testing.assert_array_equal(got[0], expected[0])


def mixed(sampler: Any, rows: int) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_k": 40, "top_p": 0.9},
        {"top_p": 0.8},
        {},
        {"min_p": 0.1, "repetition_penalty": 1.2},
        {"top_k": 700},
    ]
    for slot in range(rows):
        params = RowParams(max_tokens=4000, seed=slot, **settings[slot % len(settings)])
        sampler.admit(slot, params, list(range(slot + 1)))


def test_graphs_replay_like_plain_launches() -> None:
    """1,000 steps, and k changes under the captured graphs: a new row in an old slot."""
    import cupy as cp

    rows, vocab_size = 12, 5000
    plain, graphed = (OnDevice(rows, vocab_size, 4096, graphs=graphs) for graphs in (False, True))
    logits = cp.random.default_rng(3).standard_normal((rows, vocab_size), dtype=cp.float32) * 3
    buffers = [logits.copy(), logits.copy()]
    for each in (plain, graphed):
        mixed(each, rows)
    addresses = [b.data.ptr + np.arange(rows, dtype=np.uint64) * np.uint64(4 * vocab_size) for b in buffers]
    for step in range(1000):
        if step == 500:
            for each in (plain, graphed):
                each.release(1)
                each.admit(1, RowParams(max_tokens=4000, top_k=7, seed=99), [5])
        for buffer in buffers:
            cp.copyto(buffer, cp.roll(logits, step, axis=1))
        cp.cuda.get_current_stream().synchronize()
        order = np.random.default_rng(step).permutation(rows)[: 1 + step % rows]
        expected, got = (
            each.sampler.enqueue(where[order], order).wait()
            for each, where in zip((plain, graphed), addresses, strict=True)
        )
        np.testing.assert_array_equal(got[0], expected[0])
        assert set(expected[1]) == {Status.RUNNING}
    assert {key[0] for key in graphed.sampler._graphs or {}} == {1, 2, 4, 8, 16}


class Counted:
    """A kernel that notes its launches."""

    def __init__(self, kernel: Any, launches: list[int]) -> None:
        self.kernel, self.launches = kernel, launches

    def launch(self, rows: int, arguments: tuple[Any, ...]) -> None:
        self.launches.append(rows)
        self.kernel.launch(rows, arguments)


@pytest.mark.parametrize("logprobs", [None, 4])
def test_launches_are_counted_and_nothing_is_allocated(logprobs: int | None) -> None:
    """One launch a step, two where a row wants log-probabilities, over 1,000 steps."""
    import cupy as cp

    rows, vocab_size = 12, 5000
    device = OnDevice(rows, vocab_size, 4096, graphs=False, logprobs=logprobs)
    mixed(device, rows)
    logits = cp.random.default_rng(3).standard_normal((rows, vocab_size), dtype=cp.float32)
    addresses = logits.data.ptr + np.arange(rows, dtype=np.uint64) * np.uint64(4 * vocab_size)
    launches: list[int] = []
    for shape, kernel in device.sampler._samplers.items():
        device.sampler._samplers[shape] = Counted(kernel, launches)
    if logprobs:
        device.sampler._logprobs = Counted(device.sampler._logprobs, launches)
    pool = cp.get_default_memory_pool()
    before = (pool.used_bytes(), pool.total_bytes())
    for step in range(1000):
        n = 1 + step % rows
        wanted = np.arange(n) % 6 - 1 if logprobs and step % 2 else None
        device.sampler.enqueue(addresses[:n], np.arange(n), logprobs=wanted).wait()
    asked = sum(1 + step % rows > 1 for step in range(1, 1000, 2)) if logprobs else 0
    assert len(launches) == 1000 + asked
    assert (pool.used_bytes(), pool.total_bytes()) == before


def test_next_ids_stay_on_the_device() -> None:
    import cupy as cp

    device = OnDevice(3, 100, 64)
    for slot in range(3):
        device.admit(slot, RowParams(max_tokens=9, temperature=0.0), [1])
    logits = np.zeros((3, 100), np.float32)
    logits[0, 7], logits[1, 50], logits[2, 3] = 1, np.nan, 1
    on_device, next_ids = device.upload(logits), cp.full(3, -5, cp.int64)
    addresses = on_device.data.ptr + np.arange(3, dtype=np.uint64) * np.uint64(400)
    tokens, status = device.sampler.enqueue(addresses, [0, 1, 2], next_ids.data.ptr).wait()
    assert list(tokens) == [7, -1, 3]
    assert list(status) == [Status.RUNNING, Status.INVALID_LOGITS, Status.RUNNING]
    assert next_ids.get().tolist() == [7, 0, 3]


def test_rows_come_and_go_between_steps() -> None:
    """The device is told of all at once, in the sampler's order; at times they are more than a copy holds."""
    dice = np.random.default_rng(11)
    slots, vocab_size, length = 24, 200, 40_000
    twins = (cpu.BatchedSampler(slots, vocab_size, length), OnDevice(slots, vocab_size, length))
    live: set[int] = set()
    for step in range(40):
        for _ in range(int(dice.integers(0, 60))):
            slot = int(dice.integers(slots))
            if slot in live:
                live.remove(slot)
                for twin in twins:
                    twin.release(slot)
                continue
            live.add(slot)
            size = 30_000 if step % 10 == 0 else int(dice.integers(1, 50))
            prompt = dice.integers(vocab_size, size=size).tolist()
            params = RowParams(
                max_tokens=99, seed=step, top_k=9, repetition_penalty=1.3, presence_penalty=0.5
            )
            for twin in twins:
                twin.admit(slot, params, prompt)
        rows = np.array(sorted(live), np.int32)
        logits = dice.normal(0, 2, (len(rows), vocab_size)).astype(np.float32)
        expected, got = (twin.step(logits, rows) for twin in twins)
        np.testing.assert_array_equal(expected[0], got[0])
        np.testing.assert_array_equal(expected[1], got[1])


def test_a_step_without_rows_can_be_waited_for() -> None:
    device = OnDevice(2, 100, 64)
    device.admit(1, RowParams(max_tokens=5), [1])
    tokens, status = device.sampler.enqueue(np.empty(0, np.uint64), np.empty(0, np.int32)).wait()
    assert (len(tokens), len(status)) == (0, 0)


def test_rows_far_apart() -> None:
    """Rows by address: more than 2**32 bytes between the first and the last."""
    import cupy as cp

    vocab_size, stride = 1000, 2_500_000_000
    memory = cp.cuda.alloc(2 * stride + 4 * vocab_size)
    twins = (cpu.BatchedSampler(3, vocab_size, 64), OnDevice(3, vocab_size, 64))
    z = np.random.default_rng(0).normal(0, 3, (3, vocab_size)).astype(np.float32)
    for slot in range(3):
        view = cp.ndarray((vocab_size,), cp.float32, memory + slot * stride)
        view.set(z[slot])
        for twin in twins:
            twin.admit(slot, RowParams(max_tokens=9, top_k=40, seed=slot, banned_ids=(3,)), [1])
    addresses = memory.ptr + np.arange(3, dtype=np.uint64) * np.uint64(stride)
    got = twins[1].sampler.enqueue(addresses, np.arange(3)).wait()
    np.testing.assert_array_equal(got[0], twins[0].step(z, np.arange(3))[0])


@pytest.mark.parametrize("side", ["runtime", "driver"])
def test_a_graph_there_is_no_memory_for_says_so_by_its_type(
    side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy as cp

    from kernels.cuda import OUT_OF_MEMORY, BatchedSampler

    kind = {"runtime": cp.cuda.runtime.CUDARuntimeError, "driver": cp.cuda.driver.CUDADriverError}[side]
    sampler = BatchedSampler(2, 64, 8)
    sampler.admit(0, RowParams(max_tokens=2), [1])
    logits = cp.zeros((1, 64), cp.float32)
    for status, expected in ((OUT_OF_MEMORY, MemoryError), (1, kind)):
        with monkeypatch.context() as patch:
            error = kind(status)

            def fail(*_: object, error: Exception = error) -> None:
                raise error

            patch.setattr(cp.cuda.Stream, "begin_capture", fail)
            with pytest.raises(expected):
                sampler.step(logits, [0])
    tokens, _ = sampler.step(logits, [0])
    assert tokens[0] >= 0


def test_a_vocabulary_too_large_is_refused() -> None:
    from kernels import cuda

    with pytest.raises(ValueError, match="exceeds"):
        cuda.BatchedSampler(1, (1 << 18) + 1, 64)


# ------------------------------------------------------------------------- log-probabilities

WANTED = np.array([20, -1, 0, 1, 7, 20, 20, 3, 20, 20, -1, 20])
EDITS: dict[str, Any] = {"banned_ids": (1,), "repetition_penalty": 1.5, "logit_bias": ((0, 3.0),)}


def ugly(rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """Rows of which some have ties by the thousand, and some less than 20 finite entries."""
    z = rng.normal(0, 4, (len(WANTED), vocab_size)).astype(np.float32)
    z[5], z[6] = np.round(z[5]), 3.0
    z[7:9] = np.where(rng.random((2, vocab_size)) < 10 / vocab_size, z[7:9], -np.inf)
    z[7:9, 2], z[9, 3:5] = 1.0, np.inf
    return z


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("vocab_size", [50, 1000, 5003, 128256])
def test_logprobs_are_the_cpu_twins(vocab_size: int, kind: str) -> None:
    """Of the raw logits, whatever edits a row has; and asking changes no token."""
    rng, rows = np.random.default_rng(vocab_size), len(WANTED)
    plain, asking = OnDevice(rows, vocab_size, 64, kind), OnDevice(rows, vocab_size, 64, kind, logprobs=20)
    for slot in range(rows):
        edits = EDITS if slot % 2 else {}
        for each in (plain, asking):
            each.admit(slot, RowParams(max_tokens=9, seed=slot, top_k=40 * (slot % 3), **edits), [1, 2])
    for _ in range(4):
        slots = rng.permutation(rows)
        z = rounded(ugly(rng, vocab_size), kind)
        plain.offset = asking.offset = int(rng.integers(4))
        logits, wanted = asking.upload(z), np.minimum(WANTED, vocab_size)
        addresses = logits.data.ptr + np.arange(rows, dtype=np.uint64) * np.uint64(logits.strides[0])
        pending = asking.sampler.enqueue(addresses, slots, logprobs=wanted)
        tokens, _ = pending.wait()
        np.testing.assert_array_equal(tokens, plain.step(z, slots)[0])
        got = pending.logprobs()
        for row in np.flatnonzero(wanted >= 0):
            check_logprobs(got, row, cpu.logprobs(z[row : row + 1], tokens[row : row + 1], wanted[row]))


def check_logprobs(got: Any, row: int, expected: Any) -> None:
    count = expected.top.shape[1]
    np.testing.assert_array_equal(got.top_ids[row, :count], expected.top_ids[0])
    np.testing.assert_allclose(got.top[row, :count], expected.top[0], rtol=0, atol=2e-6)
    np.testing.assert_allclose(got.token[row], expected.token[0], rtol=0, atol=2e-6)


def test_more_logprobs_than_provided_for_are_refused() -> None:
    device = OnDevice(1, 100, 64)
    device.admit(0, RowParams(max_tokens=9), [1])
    logits = device.upload(np.zeros((1, 100), np.float32))
    with pytest.raises(ValueError, match="log-probabilities"):
        device.sampler.enqueue(np.array([logits.data.ptr], np.uint64), [0], logprobs=[0])
    with pytest.raises(ValueError, match="at most"):
        OnDevice(1, 100, 64, logprobs=101)
