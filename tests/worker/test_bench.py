"""`worker bench`: what its clock sees. Its figures themselves are the machine's."""

from __future__ import annotations

import numpy as np
import pytest
from engine_fakes import HashModel, WatchfulSampler, engine_over, row
from numpy.typing import NDArray

from producer.errors import LivebatchError
from worker import bench
from worker.batch import Batch
from worker.engine import Load
from worker.settings import DUMMY, EngineSettings


class CountingModel(HashModel):
    runs = 0

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.runs += 1
        return super().run(batch)


def test_bench_measures_each_live_batch() -> None:
    measured = list(bench.rates(EngineSettings(model=DUMMY, max_batch=9)))
    assert [rate.live for rate in measured] == [1, 8, 9]
    assert all(rate.greedy > 0 and rate.sampled > 0 for rate in measured)


def test_the_clock_starts_when_all_rows_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rows draw more tokens than there are rows while the last prompts wait: that is no start."""
    engine = engine_over(HashModel(num_blocks=257), max_batch=32)
    looks: list[Load] = []

    def clock() -> float:
        looks.append(engine.load)
        return float(engine.load.steps)

    monkeypatch.setattr(bench, "perf_counter", clock)
    rate = bench.decode_rate(engine, [row(index, range(4), max_tokens=20) for index in range(32)])
    start, end = looks
    assert (start.live, start.waiting, end.live) == (32, 0, 0)
    assert start.tokens_computed - start.tokens_sampled == 32 * 3
    assert rate == (end.tokens_sampled - start.tokens_sampled) / (end.steps - start.steps)


def test_rows_that_do_not_run_are_no_figure() -> None:
    with pytest.raises(LivebatchError, match=r"row 0 ended as TOO_LARGE: .*KV"):
        bench.decode_rate(engine_over(HashModel(num_blocks=3)), [row(0, range(4), max_tokens=20)])


def test_a_step_of_the_bench_holds_the_whole_batch() -> None:
    """`ms a step` is of all rows: none waits for its prompt while others decode, none is left behind."""
    model = CountingModel(vocab_size=256, num_blocks=1601, max_step_tokens=4096)
    parts = (model, WatchfulSampler(40, 256))
    bench.decode(parts, EngineSettings(model="any", max_batch=40), sampled=True, output=9)
    assert model.runs == 9
