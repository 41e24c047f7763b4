"""`worker bench`: what the engine alone gives on this machine, without Redis. Tokens a second, by live batch.

Owns the load (prompt 16, output 64, EOS ignored), the table, and when a batch counts as decoding. benchmarks/
compares with others; this is for sizing --max-batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING

from kernels.rows import RowParams, Status
from producer.errors import LivebatchError
from worker.compose import build_parts, build_policy
from worker.engine import Engine
from worker.sequence import Output, Row

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
    """Tokens a second of a full batch. Prompts are computed at once: their rows start and end together."""
    live, (model, sampler) = settings.max_batch, parts
    policy = replace(build_policy(settings, model), prefill_tokens=model.max_step_tokens)
    engine = Engine(model, sampler, policy, overlap=settings.loop == "overlapped")
    rows = [
        Row(index, prompt(index, model.vocab_size), params(index, output) if sampled else greedy(output))
        for index in range(live)
    ]
    return decode_rate(engine, rows)


def decode_rate(engine: Engine, rows: Sequence[Row]) -> float:
    """Tokens a second of a new engine, from the first step in which all ``rows`` decode to the last."""
    outputs: list[Output] = []
    for row in rows:
        engine.add(row)
    while engine.has_work and not is_decoding(engine, rows):
        outputs += engine.step()
    before, begun = engine.load.tokens_sampled, perf_counter()
    while engine.has_work:
        outputs += engine.step()
    rate = (engine.load.tokens_sampled - before) / (perf_counter() - begun)
    engine.step()  # gives the slots back
    require_whole(outputs)
    return rate


def require_whole(outputs: Iterable[Output]) -> None:
    """LivebatchError where a row did not run to its max_tokens: that makes no figure."""
    for output in outputs:
        if output.status != Status.LENGTH:
            raise LivebatchError(f"row {output.id} ended as {output.status.name}: {output.message}")


def is_decoding(engine: Engine, rows: Sequence[Row]) -> bool:
    """Whether every prompt is computed, of an engine that has had ``rows`` alone and preempted none.

    A prompt of P tokens gives one token, a decode gives one for one: what was computed and not drawn is P - 1
    tokens of each prompt that is through, however it was cut.
    """
    load = engine.load
    return load.tokens_computed - load.tokens_sampled >= sum(len(row.prompt) - 1 for row in rows)


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
