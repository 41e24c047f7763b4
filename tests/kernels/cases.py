"""Random rows over every class of parameters and every ugly kind of logits, for the CPU and the GPU tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kernels.rows import RowParams

TEMPERATURES = (0.0, 1e-6, 0.05, 0.3, 0.7, 1.0, 1.0, 1.5, 2.0, 100.0)
TOP_PS = (1.0, 1.0, 1.0, 0.95, 0.9, 0.5, 0.01, 0.0, 0.9999999)
MIN_PS = (0.0, 0.0, 0.0, 0.02, 0.3, 1.0)
OCTAVE = float(np.log2(np.e))  # the temperature at which a logit is one octave of probability


def logits_row(rng: np.random.Generator, vocab_size: int) -> NDArray[np.float32]:
    """One row f32[V]: normal, fp16, integers, by id, spikes, masked, constant, denormal, infinite, NaN."""
    kind = rng.integers(12)
    z = rng.normal(0, rng.choice([0.5, 2.0, 8.0]), vocab_size)
    if kind == 1:
        z = z.astype(np.float16)
    elif kind == 2:
        z = np.round(z)
    elif kind == 3:
        z = -1.5 * np.log(np.arange(1, vocab_size + 1))
    elif kind == 4:
        z[rng.integers(vocab_size, size=3)] += 30
    elif kind == 5:
        z[rng.random(vocab_size) < 0.99] = -np.inf
    elif kind == 6:
        z[:] = rng.choice([0.0, 1.5, -3e38, -np.inf])
    elif kind == 7:
        z = z * 1e-39
        z[rng.random(vocab_size) < 0.3] = -0.0
    elif kind == 8:
        z[rng.integers(vocab_size, size=2)] = np.inf
    elif kind == 9 and rng.random() < 0.3:
        z[rng.choice([0, vocab_size // 2, vocab_size - 1])] = np.nan
    elif kind == 10:
        z = np.where(np.arange(vocab_size) == rng.integers(vocab_size), z, -np.inf)
    return z.astype(np.float32)


def between_bins(rng: np.random.Generator, shape: tuple[int, int], spread: float) -> NDArray[np.float32]:
    """Rows f32[n, V]; one entry in fifty is halfway between two bins of 1/32 octave below the maximum."""
    octaves = np.maximum(spread * (4.4 - rng.normal(size=shape)), 0)
    octaves = np.where(rng.random(shape) < 0.02, (np.floor(octaves * 32) + 0.5) / 32, octaves)
    octaves[:, 0] = 0
    return (8 - octaves).astype(np.float32)


def ids(rng: np.random.Generator, vocab_size: int, most: int) -> tuple[int, ...]:
    return tuple(int(x) for x in rng.integers(vocab_size, size=rng.integers(1, most + 1)))


def row_params(rng: np.random.Generator, vocab_size: int) -> RowParams:
    """Filters of every mix; about half the rows also carry edits."""
    top_ks = (0, 0, 0, 1, 2, 20, 50, 256, 512, 513, 800, vocab_size - 1, vocab_size, vocab_size + 1)
    fields: dict[str, object] = {
        "max_tokens": int(rng.integers(1, 8)),
        "temperature": float(rng.choice(TEMPERATURES)),
        "top_k": int(rng.choice(top_ks)),
        "top_p": float(rng.choice(TOP_PS)),
        "min_p": float(rng.choice(MIN_PS)),
        "seed": int(rng.integers(2**63)) * 2 + int(rng.integers(2)),
        "sample": int(rng.integers(4)),
    }
    if rng.random() < 0.5:
        fields |= edits(rng, vocab_size)
    return RowParams(**fields)  # type: ignore[arg-type]


def edits(rng: np.random.Generator, vocab_size: int) -> dict[str, object]:
    choices: dict[str, object] = {
        "min_tokens": int(rng.integers(4)),
        "repetition_penalty": float(rng.choice([0.5, 1.1, 2.0, 10.0])),
        "presence_penalty": float(rng.choice([-2.0, 0.7])),
        "frequency_penalty": float(rng.choice([-0.3, 0.2, 2.0])),
        "no_repeat_ngram_size": int(rng.integers(1, 4)),
        "eos_ids": ids(rng, vocab_size, 2),
        "stop_ids": ids(rng, vocab_size, 5),
        "held_ids": ids(rng, vocab_size, 2),
        "logit_bias": tuple((token, float(rng.normal(0, 5))) for token in set(ids(rng, vocab_size, 6))),
        "allowed_ids": ids(rng, vocab_size, 20),
        "banned_ids": ids(rng, vocab_size, 10),
    }
    return {name: value for name, value in choices.items() if rng.random() < 0.3}


def history(rng: np.random.Generator, vocab_size: int) -> list[int]:
    """A prompt of few distinct ids, so that counts and n-grams repeat."""
    return [int(x) for x in rng.integers(min(vocab_size, 12), size=rng.integers(1, 30))]
