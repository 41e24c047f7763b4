"""The reference against float64, published vectors and plain arithmetic: what the twins are measured by."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from kernels import cpu, reference
from kernels.rows import RowParams

INF = np.inf


def row(**fields: object) -> RowParams:
    return RowParams(**({"max_tokens": 10**6} | fields))  # type: ignore[arg-type]


def pick(z: list[float] | NDArray[np.float32], index: int = 0, **fields: object) -> int:
    return reference.pick(np.asarray(z, np.float32), row(**fields), index)


# ------------------------------------------------------------------------------------------- random stream


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    """Random123's kat_vectors, philox4x32 with 10 rounds."""
    assert reference.philox4x32_10(counter, key) == words


def test_stream_depends_on_seed_index_and_sample_alone() -> None:
    draws = {
        reference.uniforms(*key) for key in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1 << 63, 0, 0)]
    }
    assert len(draws) == 5


# ------------------------------------------------------------------------------------------- masses and keys


def test_masses_follow_exp() -> None:
    rng = np.random.default_rng(0)
    z = rng.uniform(-25, 0, 100_000).astype(np.float32)
    scale = row(temperature=0.9).log2_scale
    got = reference.masses(z, np.float32(0), scale).astype(np.float64) / 2**42
    expected = np.exp2(z.astype(np.float64) * np.float64(scale))
    likely = expected > 1e-6
    assert np.max(np.abs(got / expected - 1)[likely]) < 2e-6
    assert np.max(np.abs(got - expected)) < 1e-6
    order = np.argsort(z)
    assert (np.diff(reference.masses(z[order], np.float32(0), scale).astype(np.int64)) >= 0).all()


def test_keys_order_like_floats() -> None:
    rng = np.random.default_rng(0)
    z = reference.canonical(
        rng.normal(0, 1, 1000).astype(np.float32) * np.float32(10.0) ** rng.integers(-40, 38, 1000)
    )
    assert (np.argsort(reference.keys(z), kind="stable") == np.argsort(z, kind="stable")).all()


# ------------------------------------------------------------------------------------------- against float64

FILTERS = [  # temperature, top_k, top_p, min_p
    (1, 0, 1, 0),
    (0.5, 0, 1, 0),
    (2, 0, 1, 0),
    (1, 40, 1, 0),
    (0.7, 40, 1, 0),
    (1.3, 5, 1, 0),
    (1, 2, 1, 0),
    (1, 0, 0.9, 0),
    (0.7, 0, 0.5, 0),
    (1.5, 0, 0.99, 0),
    (1, 0, 0.3, 0),
    (1, 0, 1, 0.05),
    (0.8, 0, 1, 0.3),
    (2, 0, 1, 0.01),
    (1, 20, 0.95, 0),
    (0.8, 20, 0.5, 0),
    (1, 100, 0.9, 0),
    (1, 20, 1, 0.05),
    (1, 0, 0.9, 0.05),
    (0.8, 20, 0.95, 0.02),
    (1, 50, 0.9, 0.1),
    (2, 10, 0.99, 0.001),
    (1, 600, 1, 0),
    (1, 600, 0.8, 0),
    (1, 0, 0.9999999, 0),
]
SETTINGS = [dict(zip(("temperature", "top_k", "top_p", "min_p"), each, strict=True)) for each in FILTERS]


def probabilities(z: NDArray[np.float32], params: RowParams) -> NDArray[np.float64]:
    """The distribution the filters leave, in float64."""
    order = np.lexsort((np.arange(z.size), -z.astype(np.float64)))
    order = order[: params.limited_k(z.size) or z.size]
    w = np.exp((z[order].astype(np.float64) - z[order[0]]) / params.temperature)
    order, w = order[w >= params.min_p], w[w >= params.min_p]
    before = np.cumsum(w) - w
    kept = max(1, int((before < params.top_p * w.sum()).sum()))
    out = np.zeros(z.size)
    out[order[:kept]] = w[:kept] / w[:kept].sum()
    return out


@pytest.mark.parametrize("case", range(len(SETTINGS)))
def test_kept_set_is_float64s(case: int) -> None:
    """Only the entry at the border may differ, and only when its prefix is within rounding of it."""
    rng = np.random.default_rng(case)
    params = row(**SETTINGS[case])
    for _ in range(20):
        z = rng.normal(0, 2, 1000).astype(np.float32)
        got = set(reference.survivors(z, z.max(), params).tolist())
        expected = set(np.flatnonzero(probabilities(z, params)).tolist())
        different = got ^ expected
        assert len(different) <= 1
        for token in different:
            without = probabilities(z, RowParams(max_tokens=1, temperature=params.temperature))
            assert params.top_p < 1 or abs(without[token] / without.max() - params.min_p) < 2e-6


def chi_square(counts: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """p-value; cells that expect fewer than 8 are pooled."""
    assert not counts[p == 0].any(), "a token outside the kept set"
    expected = p * counts.sum()
    large = expected >= 8
    observed = np.append(counts[large], counts[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    return (
        float(stats.chisquare(observed, expected * (counts.sum() / expected.sum())).pvalue)
        if observed.size > 1
        else 1.0
    )


def counts_of(z: NDArray[np.float32], fields: dict[str, float], seed: int, draws: int) -> NDArray[np.int64]:
    """Tokens of ``draws`` steps on the same logits, by the CPU twin, which test_twins shows is equal."""
    sampler = cpu.BatchedSampler(1, z.size, draws + 1, threads=1)
    sampler.admit(0, RowParams(max_tokens=draws, seed=seed, **fields), [0])  # type: ignore[arg-type]
    tokens = [sampler.step(z[None], [0])[0][0] for _ in range(draws)]
    return np.bincount(tokens, minlength=z.size)


def test_draws_follow_float64() -> None:
    """25 settings, 5,000 draws each: the p-values are uniform, and nothing outside the kept set is drawn."""
    p_values = []
    for case, fields in enumerate(SETTINGS):
        rng = np.random.default_rng(1000 + case)
        z = rng.normal(0, 1, int(rng.choice([50, 300, 1500]))).astype(np.float32)
        counts = counts_of(z, fields, seed=77 + case, draws=5000)
        p_values.append(chi_square(counts, probabilities(z, row(**fields))))
    real = [p for p in p_values if p < 1]
    assert len(real) >= 24
    assert min(real) > 1e-4
    assert stats.kstest(real, "uniform").pvalue > 1e-3


def test_far_tail_is_drawn_in_proportion() -> None:
    """131,072 tokens 18 nats below one: together 0.2 % of the mass, none of it lost."""
    z = np.zeros(131_073, np.float32)
    z[7] = 18.0
    p = probabilities(z, row())
    counts = counts_of(z, {"temperature": 1.0}, seed=5, draws=3000)
    assert stats.binomtest(int(counts.sum() - counts[7]), 3000, 1 - p[7]).pvalue > 1e-4


# ------------------------------------------------------------------------------------------- edges


@pytest.mark.parametrize(
    ("z", "fields", "token"),
    [
        ([1, 2, 3, 3], {"top_p": 0.0}, 2),  # p = 0 is argmax, ties by lower id
        ([1, 2, 3, 3], {"temperature": 0.0}, 2),
        ([1, 2, 3, 3], {"temperature": 1e-6}, 2),
        ([1, 2, 3, 3], {"top_k": 1}, 2),
        ([1, 3, 2], {"min_p": 1.0}, 1),
        ([-0.0, 0.0, 1e-40, -1e-40], {"temperature": 0.0}, 0),  # zeros and denormals tie
        ([-INF, -INF, -3e38, -INF], {}, 2),  # one finite
        ([0, INF, 1, 2], {"temperature": 2.0}, 1),
        ([-INF, -INF], {}, -1),
        ([5.0] + [-INF] * 9, {"temperature": 100.0}, 0),
        ([0.0, 200.0, 0.0], {"temperature": 1.0}, 1),  # one-hot
    ],
)
def test_certain_tokens(z: list[float], fields: dict[str, float], token: int) -> None:
    assert {pick(z, index, seed=index, **fields) for index in range(20)} == {token}


def test_equal_infinities_share_the_mass() -> None:
    assert {pick([INF, 0, INF, 3], index) for index in range(64)} == {0, 2}


def test_ties_at_rank_k_go_to_the_lower_id() -> None:
    z = np.float16([1, 2, 2, 2, 3]).astype(np.float32)
    assert {pick(z, index, top_k=3) for index in range(200)} == {4, 1, 2}


@pytest.mark.parametrize("top_k", [0, -1, 4, 10**9])
def test_top_k_off(top_k: int) -> None:
    assert [pick([0, 1, 2, 1], i, top_k=top_k) for i in range(50)] == [
        pick([0, 1, 2, 1], i) for i in range(50)
    ]


def test_top_p_just_under_one_keeps_all_likely() -> None:
    z = np.zeros(64, np.float32)
    assert reference.survivors(z, z.max(), row(top_p=0.9999999)).size == 64
    assert row(top_p=1 - 2**-40).top_p_fraction == row().top_p_fraction  # rounds to off


def test_order_is_top_k_min_p_top_p_on_the_rest() -> None:
    z = np.log(np.float32([0.4, 0.3, 0.2, 0.1]))
    assert set(reference.survivors(z, z.max(), row(top_k=2, top_p=0.6))) == {0, 1}  # 0.4 / 0.7 < 0.6
    assert set(reference.survivors(z, z.max(), row(top_p=0.6))) == {0, 1}
    assert set(reference.survivors(z, z.max(), row(top_k=3, top_p=0.4))) == {0}
    assert set(reference.survivors(z, z.max(), row(min_p=0.6, top_p=0.57))) == {0}  # 0.4 / 0.7 > 0.57
    assert set(reference.survivors(z, z.max(), row(temperature=0.5, min_p=0.6))) == {0}  # 0.75 ** 2 < 0.6


# ------------------------------------------------------------------------------------------- edits


def test_penalties_by_hand() -> None:
    z = np.float32([2, -2, 3, 4, 0])
    params = row(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25)
    got = reference.penalise(z, [0, 1, 1], [1, 3, 3], params)
    np.testing.assert_array_equal(got, np.float32([1, -4 - 0.5 - 0.25, 3, 2 - 1 - 0.25, 0]))


def test_repeated_ngrams_by_hand() -> None:
    assert set(reference.repeated([1, 2, 3, 1, 2], 3)) == {3}
    assert set(reference.repeated([1, 2, 3, 1, 2], 2)) == {3}
    assert set(reference.repeated([1, 2, 3, 2, 4, 2], 2)) == {3, 4}
    assert set(reference.repeated([1, 2], 1)) == {1, 2}
    assert set(reference.repeated([1, 2], 3)) == set()
    assert set(reference.repeated([1, 2, 1], 0)) == set()


def test_edits_in_order() -> None:
    z = np.float32([1, 2, 3, 4, 5, 6])
    params = row(
        allowed_ids=(0, 1, 2, 3, 4), logit_bias=((0, 2.0), (5, 50.0)), banned_ids=(4,), min_tokens=2,
        eos_ids=(3,), repetition_penalty=2.0,
    )  # fmt: skip
    got = reference.edit(z, params, [0], [1], np.array([0b111011], np.uint32))
    np.testing.assert_array_equal(got, np.float32([1.5, 1, -INF, -INF, -INF, -INF]))
    later = reference.edit(z, params, [0], [1, 1], None)
    assert later[3] == 4  # min_tokens reached


# ------------------------------------------------------------------------- log-probabilities


@pytest.mark.parametrize("logprobs", [reference.logprobs, cpu.logprobs])
def test_logprobs(logprobs: object) -> None:
    z = np.float32([[0, 1, 2, 1, -INF], [3, 3, 3, 3, 3]])
    got = logprobs(z, [1, 2], 3)  # type: ignore[operator]
    expected = stats_log_softmax(z)
    np.testing.assert_allclose(got.token, [expected[0, 1], expected[1, 2]], rtol=1e-6)
    np.testing.assert_array_equal(got.top_ids, [[2, 1, 3], [0, 1, 2]])
    np.testing.assert_allclose(got.top, np.take_along_axis(expected, got.top_ids.astype(int), 1), rtol=1e-6)
    assert logprobs(z, [4, 0], 5).top[0, 4] == -INF  # type: ignore[operator]


def stats_log_softmax(z: NDArray[np.float32]) -> NDArray[np.float64]:
    e = np.exp(z.astype(np.float64))
    with np.errstate(divide="ignore"):
        return np.log(e / e.sum(axis=1, keepdims=True))


def test_logprobs_of_the_twins_are_equal() -> None:
    z = np.random.default_rng(3).normal(0, 3, (6, 5000)).astype(np.float16).astype(np.float32)
    for expected, got in zip(reference.logprobs(z, range(6), 20), cpu.logprobs(z, range(6), 20), strict=True):
        np.testing.assert_array_equal(got, expected)
