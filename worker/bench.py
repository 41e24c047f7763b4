"""`worker bench`: what the engine alone gives on this machine, without Redis. Tokens a second, by live batch.

Owns the load (prompt 16, output 64, EOS ignored) and the table. benchmarks/ compares with others; this is for
sizing --max-batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernels.rows import RowParams
from worker.compose import build_parts, build_policy
from worker.engine import Engine
from worker.sequence import Row

if TYPE_CHECKING:
    from worker.protocols import Model, Sampler
    from worker.settings import EngineSettings

PROMPT, OUTPUT = 16, 64
HEADER = f"{'live rows':>10}{'greedy tok/s':>14}{'sampled tok/s':>15}{'ms a step':>11}"


@dataclass(frozen=True, slots=True)
class Rate:
    """Decode rates of one live batch, tokens a second."""

    live: int
    greedy: float
    sampled: float

    @property
    def line(self) -> str:
        step_ms = 1000 * self.live / self.sampled
        return f"{self.live:>10}{self.greedy:>14,.0f}{self.sampled:>15,.0f}{step_ms:>11.1f}"


def rates(settings: EngineSettings) -> Iterator[Rate]:
    """Rates at 1, 8, 32, ... live rows up to ``max_batch``, as they are measured."""
    parts = build_parts(settings)
    sizes = sorted({size for size in (1, 8, 32, 128) if size < settings.max_batch} | {settings.max_batch})
    for live in sizes:
        alone = replace(settings, max_batch=live)
        decode(parts, alone, sampled=True, output=2)  # compiles and allocates
        yield Rate(live, decode(parts, alone, sampled=False), decode(parts, alone, sampled=True))


def decode(
    parts: tuple[Model, Sampler], settings: EngineSettings, *, sampled: bool, output: int = OUTPUT
) -> float:
    """Tokens a second from the first step in which all rows decode to the last."""
    live, (model, sampler) = settings.max_batch, parts
    overlap = settings.loop == "overlapped"
    engine = Engine(model, sampler, build_policy(settings, model), overlap=overlap)
    for index in range(live):
        engine.add(
            Row(index, prompt(index, model.vocab_size), params(index, output) if sampled else greedy(output))
        )
    while engine.load.tokens_sampled < live:
        engine.step()
    before, begun = engine.load.tokens_sampled, time.perf_counter()
    while engine.has_work:
        engine.step()
    rate = (engine.load.tokens_sampled - before) / (time.perf_counter() - begun)
    engine.step()  # gives the slots back
    return rate


def prompt(index: int, vocab_size: int) -> list[int]:
    return [(7919 * (PROMPT * index + place) + 11) % vocab_size for place in range(PROMPT)]


def params(index: int, output: int) -> RowParams:
    """Settings that differ from row to row."""
    return RowParams(
        max_tokens=output,
        temperature=0.6 + index / 64,
        top_k=10 + index,
        top_p=0.95 - index / 1024,
        seed=index,
    )


def greedy(output: int) -> RowParams:
    return RowParams(max_tokens=output, temperature=0.0)
