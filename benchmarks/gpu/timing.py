"""An engine's rows against the clock. Knows neither GPU nor peers: any Engine will do.

All rows must run to their max_tokens: whatever else happens is an error, never a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

from kernels.rows import Status
from worker.bench import is_decoding, require_whole
from worker.engine import Engine
from worker.sequence import Output, Row


@dataclass(frozen=True, slots=True)
class Rates:
    """Output tokens a second."""

    total: float  # from the first row's arrival to the last token, prefills counted
    decode: float  # from the first step in which all rows decode to the last token


def batch(engine: Engine, rows: Sequence[Row], step: Callable[[], list[Output]] | None = None) -> Rates:
    """Rows that fit the live batch together, two tokens each at least. ``step``: engine.step, watched."""
    step = step or engine.step
    begun, outputs = perf_counter(), []
    for row in rows:
        engine.add(row)
    while engine.has_work and not is_decoding(engine, rows):
        outputs += step()
    before, decoding = engine.load.tokens_sampled, perf_counter()
    while engine.has_work:
        outputs += step()
    ended, sampled = perf_counter(), engine.load.tokens_sampled
    engine.step()  # gives the slots back
    require_whole(outputs)
    return Rates(sampled / (ended - begun), (sampled - before) / (ended - decoding))


def whole(engine: Engine, rows: Iterable[Row]) -> tuple[float, int]:
    """Seconds from first to last of any number of rows, and the tokens they gave."""
    begun, tokens = perf_counter(), 0
    for output in engine.generate(rows):
        require_whole([output])
        tokens += len(output.tokens)
    seconds = perf_counter() - begun
    engine.step()
    return seconds, tokens


def until_last(engine: Engine, rows: Sequence[Row], last: int, *, to_the_end: bool) -> tuple[float, float]:
    """Tokens a second until only ``last`` rows are left, and of the whole; else the rest is cancelled."""
    begun, left, until = perf_counter(), {row.id for row in rows}, 0.0
    for output in engine.generate(rows):
        left.discard(output.id)
        if output.status != Status.CANCELLED:
            require_whole([output])
        if len(left) == last and not until:
            until = engine.load.tokens_sampled / (perf_counter() - begun)
            for row_id in () if to_the_end else left:
                engine.cancel(row_id)
    total = engine.load.tokens_sampled / (perf_counter() - begun)
    engine.step()
    return until, total
