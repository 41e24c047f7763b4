"""What a step costs the host beside model and sampler: plan, pack and commit, in microseconds a row a step.

No model runs; made-up tokens are committed. Two kinds of load: steady decode, where rows only grow, and
churn, where short rows end and others join all the time. CPU time of the thread, so a busy machine does not
show.

    python benchmarks/host_cost.py [--rows 256] [--steps 1000] [--out benchmarks/results/host_cost.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import thread_time

import numpy as np

from kernels.rows import RowParams, Status
from worker.batch import pack
from worker.blocks import BlockPool, blocks_for
from worker.live import LiveBatch
from worker.scheduler import Policy, Scheduler
from worker.sequence import Row

BLOCK_SIZE = 16
PHASES = ("plan", "pack", "commit")
TARGET = 5.0  # microseconds a row a step


@dataclass(frozen=True)
class Load:
    """Rows of ``prompt`` tokens that end after ``output``."""

    name: str
    prompt: int
    output: int

    def rows(self) -> Iterator[Row]:
        params = RowParams(max_tokens=self.output)
        return (Row(number, range(self.prompt), params) for number in itertools.count())


LOADS = (
    Load("steady decode, 128 to 1,152 tokens", 128, 1024),
    Load("steady decode, 2,048 to 4,096 tokens", 2048, 2048),
    Load("churn, 64 in, 64 out", 64, 64),
    Load("churn, 16 in, 16 out", 16, 16),
)


@dataclass(frozen=True)
class Cost:
    """CPU microseconds a row a step: the mean of each phase, and the median and worst step of their sum."""

    load: str
    rows: float
    plan: float
    pack: float
    commit: float
    median: float
    worst: float

    @property
    def mean(self) -> float:
        return self.plan + self.pack + self.commit


def measure(load: Load, num_rows: int, num_steps: int) -> Cost:
    """Fills ``num_rows`` slots, then times ``num_steps`` steps."""
    context = load.prompt + load.output
    pool = BlockPool(1 + num_rows * blocks_for(context, BLOCK_SIZE))
    live = LiveBatch(num_rows, context, BLOCK_SIZE)
    policy = Policy(max_batch=num_rows, prefill_tokens=2048, reserve_tokens=0)
    scheduler = Scheduler(policy, pool, live, context)
    source = load.rows()
    spent, counts = list[list[float]](), list[int]()
    while len(counts) < num_steps:
        for row in itertools.islice(source, 2 * num_rows - scheduler.num_waiting):
            scheduler.add(row)
        phases, count = step(scheduler, live, load.output)
        if counts or len(live) == num_rows:
            spent.append(phases)
            counts.append(count)
    each = 1e6 * np.array(spent) / np.array(counts)[:, None]
    total = each.sum(axis=1)
    numbers = (np.mean(counts), *each.mean(axis=0), np.median(total), total.max())
    return Cost(load.name, *(round(float(number), 2) for number in numbers))


def step(scheduler: Scheduler, live: LiveBatch, max_tokens: int) -> tuple[list[float], int]:
    """One step without a model: seconds of plan, pack and commit, and its rows."""
    start = thread_time()
    step = scheduler.plan()
    planned = thread_time()
    pack(step, live)
    packed = thread_time()
    slots = step.slots[step.samples]
    drawn = live.length[slots] - live.num_prompt[slots] + 1
    status = np.where(drawn >= max_tokens, Status.LENGTH, Status.RUNNING).astype(np.uint8)
    tokens = np.full(len(slots), 7, np.int32)
    sampled = thread_time()
    scheduler.launch(step)
    scheduler.land(step, tokens, status)
    scheduler.take_outputs()
    return [planned - start, packed - planned, thread_time() - sampled], len(step)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    print(f"{options.rows} live rows, {options.steps} steps; microseconds a row a step (target {TARGET:g})")
    print(
        f"{'load':38s}{'rows':>6s}{'plan':>7s}{'pack':>7s}{'commit':>8s}{'mean':>7s}{'median':>8s}{'worst':>7s}"
    )
    costs = []
    for load in LOADS:
        cost = measure(load, options.rows, options.steps)
        costs.append({**asdict(cost), "mean": cost.mean})
        print(
            f"{cost.load:38s}{cost.rows:6.0f}{cost.plan:7.2f}{cost.pack:7.2f}{cost.commit:8.2f}"
            f"{cost.mean:7.2f}{cost.median:8.2f}{cost.worst:7.2f}"
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        versions = {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
        }
        record = {"rows": options.rows, "steps": options.steps, "target": TARGET, **versions, "costs": costs}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
