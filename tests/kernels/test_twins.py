"""The CPU twin returns the reference's tokens, bit for bit, on random rows of every class."""

from __future__ import annotations

import os

import numpy as np
import pytest
from cases import OCTAVE, between_bins, history, logits_row, row_params

from kernels import cpu, reference
from kernels.rows import RowParams

# LIVEBATCH_TWIN_ROWS=100000 is the full run; what is here is a seeded sample of it.
ROWS = int(os.environ.get("LIVEBATCH_TWIN_ROWS", "2500"))
BATCH = 25
SHARES = {2: 0.1, 3: 0.1, 50: 0.2, 1000: 0.35, 5000: 0.15, 32000: 0.04, 49152: 0.03, 50257: 0.03}


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("vocab_size", SHARES)
def test_random_rows(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    twins = [twin(BATCH, vocab_size, 64) for twin in (reference.BatchedSampler, cpu.BatchedSampler)]
    for _ in range(max(1, round(ROWS * SHARES[vocab_size] / BATCH / 3))):
        for slot in range(BATCH):
            params, prompt = row_params(rng, vocab_size), history(rng, vocab_size)
            grammar = rng.integers(2**32, size=-(-vocab_size // 32), dtype=np.uint32)
            for twin in twins:
                twin.admit(slot, params, prompt)
                if slot % 10 == 0:
                    twin.set_mask(slot, grammar)
        for _ in range(3):
            check_step(rng, vocab_size, twins)
        for slot in range(BATCH):
            for twin in twins:
                twin.release(slot)


def check_step(rng: np.random.Generator, vocab_size: int, twins: list) -> None:
    slots = rng.permutation(BATCH)
    logits = np.full((BATCH, vocab_size + 7), 1e9, np.float32)  # padded columns are never read
    logits[:, :vocab_size] = [logits_row(rng, vocab_size) for _ in slots]
    expected, got = (twin.step(logits, slots) for twin in twins)
    np.testing.assert_array_equal(got[0], expected[0])
    np.testing.assert_array_equal(got[1], expected[1])


@pytest.mark.parametrize("spread", [0.5, 2.0, 8.0])
def test_entries_between_two_bins(spread: float) -> None:
    rng, rows = np.random.default_rng(6), 10
    twins = [twin(rows, 5000, 64) for twin in (reference.BatchedSampler, cpu.BatchedSampler)]
    for slot in range(rows):
        params = RowParams(max_tokens=40, seed=slot, top_p=0.5 + 0.05 * slot, temperature=OCTAVE)
        assert params.log2_scale == 1
        for twin in twins:
            twin.admit(slot, params, [1])
    for _ in range(5):
        logits = between_bins(rng, (rows, 5000), spread)
        expected, got = (twin.step(logits, np.arange(rows)) for twin in twins)
        np.testing.assert_array_equal(got[0], expected[0])
