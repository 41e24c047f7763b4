"""Where a decode step's time goes: the host's clock at a step's joints, events on the device's stream.

    host      | plan, pack | launch | book | wait | land |
    device    ... draw t - 1 | gap, feed | replay t | draw t | gap, feed | replay t + 1 ...

The gap is all that lies between a draw's end and the next replay: idle time and, counted against us, the copy
of the step's small arrays and the kernel that feeds the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any
from unittest.mock import patch

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu import timing
from benchmarks.gpu.bench import Bench
from worker.batch import Batch
from worker.cuda.graph import EAGER
from worker.sequence import Ints, Output, Row

HOST = ("begin", "run", "launched", "wait", "waited", "end")
DEVICE = ("replay", "replayed", "drawn")


@dataclass(slots=True)
class Joints:
    """Of one step: seconds on the host, events on the device."""

    rows: int = 0  # of its run, if they were decodes
    host: dict[str, float] = field(default_factory=dict)
    device: dict[str, Any] = field(default_factory=dict)


class Recorder:
    """The steps so far; the last one is under way."""

    def __init__(self, stream: Any) -> None:
        self.steps: list[Joints] = []
        self._stream = stream

    def host(self, name: str) -> None:
        self.steps[-1].host[name] = perf_counter()

    def device(self, name: str) -> None:
        event = self.steps[-1].device[name] = cp.cuda.Event()
        event.record(self._stream)


class MarkedModel:
    """A model whose runs are marked."""

    def __init__(self, model: Any, recorder: Recorder) -> None:
        self._model, self._recorder = model, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def run(self, batch: Batch) -> NDArray[Any]:
        self._recorder.host("run")
        is_decode = len(batch.input_ids) == len(batch.past)
        self._recorder.steps[-1].rows = len(batch.past) if is_decode else 0
        addresses: NDArray[Any] = self._model.run(batch)
        return addresses


class MarkedSampler:
    """A sampler whose draws and waits are marked."""

    def __init__(self, sampler: Any, recorder: Recorder) -> None:
        self._sampler, self._recorder = sampler, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def enqueue(self, *step: Any, **more: Any) -> MarkedPending:
        pending = self._sampler.enqueue(*step, **more)
        self._recorder.device("drawn")
        self._recorder.host("launched")
        return MarkedPending(pending, self._recorder)


class MarkedPending:
    """A draw whose wait is marked."""

    def __init__(self, pending: Any, recorder: Recorder) -> None:
        self._pending, self._recorder = pending, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pending, name)

    def wait(self) -> tuple[Ints, NDArray[np.uint8]]:
        self._recorder.host("wait")
        answer: tuple[Ints, NDArray[np.uint8]] = self._pending.wait()
        self._recorder.host("waited")
        return answer


def measure(bench: Bench, rows: Sequence[Row]) -> dict[str, float]:
    """Medians over the steps in which all rows decode, the first few left out. Milliseconds, microseconds."""
    graph = bench.model._graph
    recorder = Recorder(graph.stream)
    model, sampler = MarkedModel(bench.model, recorder), MarkedSampler(bench.sampler, recorder)
    engine = Bench(bench.settings, model, sampler).engine(len(rows))
    run = graph.run

    def replay(binding: Any, graph_id: int = EAGER) -> None:
        recorder.device("replay")
        run(binding, graph_id)
        recorder.device("replayed")

    def step() -> list[Output]:
        recorder.steps.append(Joints())
        recorder.host("begin")
        outputs = engine.step()
        recorder.host("end")
        return outputs

    with patch.object(graph, "run", replay):
        timing.batch(engine, rows, step)
    return host_times(recorder.steps, len(rows)) | device_times(recorder.steps, len(rows))


def full(steps: Sequence[Joints], rows: int) -> list[Joints]:
    """Steps of decodes of all rows, as the engine runs them once it has settled."""
    return [one for one in steps if one.rows == rows and len(one.host) == len(HOST)][4:]


def host_times(steps: Sequence[Joints], rows: int) -> dict[str, float]:
    times = np.array([[one.host[name] for name in HOST] for one in full(steps, rows)])
    plan, launch, book, wait, land = np.median(np.diff(times, axis=1), axis=0) * 1e6
    return {
        "host_plan_us": float(plan),
        "host_launch_us": float(launch),
        "host_land_us": float(book + land),
        "host_wait_us": float(wait),
    }


def device_times(steps: Sequence[Joints], rows: int) -> dict[str, float]:
    marks = [one.device for one in full(steps, rows)]
    spans = np.array([between(*pair) for pair in pairwise(marks)])  # [n, 3] ms
    replay, draw, gap = np.median(spans, axis=0)
    sums = spans.sum(axis=0)
    return {
        "step_ms": float(np.median(spans.sum(axis=1))),
        "replay_ms": float(replay),
        "draw_us": float(draw) * 1e3,
        "gap_us": float(gap) * 1e3,
        "gap_share": float(sums[2] / sums.sum()),
    }


def between(this: dict[str, Any], following: dict[str, Any]) -> tuple[float, float, float]:
    """Milliseconds of a step's replay, of its draw, and of the gap behind it."""
    elapsed = cp.cuda.get_elapsed_time
    replay, replayed, drawn = (this[name] for name in DEVICE)
    return elapsed(replay, replayed), elapsed(replayed, drawn), elapsed(drawn, following["replay"])
