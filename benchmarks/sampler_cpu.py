"""The CPU sampler: a step of 32 rows at V = 49,152 on two threads, compiled (numba) beside plain NumPy.

python benchmarks/sampler_cpu.py --out benchmarks/results/sampler_cpu.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MIXES: dict[str, Any] = {
    "greedy": lambda i: {"temperature": 0.0},
    "all distinct top_k and top_p": lambda i: {
        "temperature": 0.7 + i / 500,
        "top_k": 20 + i,
        "top_p": 0.9 + i / 500,
    },
    "top_p of all": lambda i: {"top_p": 0.9 + i / 500},
    "min_p": lambda i: {"min_p": 0.05},
    "temperature": lambda i: {},
    "penalties, 2,000 tokens": lambda i: {
        "top_k": 20 + i,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
    },
}


def milliseconds(sampler: Any, logits: Any, steps: int) -> dict[str, float]:
    """Wall time of a step, and the CPU time of all its threads (what a busy machine does not inflate)."""
    wall, cpu = [], []
    slots = np.arange(len(logits))
    sampler.step(logits, slots)
    for _ in range(steps):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        sampler.step(logits, slots)
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
    return {
        "wall_median": round(float(np.median(wall)) * 1e3, 2),
        "wall_least": round(min(wall) * 1e3, 2),
        "cpu_median": round(float(np.median(cpu)) * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "sampler_cpu.json")
    options = parser.parse_args()
    begin = time.perf_counter()
    from kernels import cpu, reference
    from kernels.rows import RowParams

    start_up = {"import_seconds": round(time.perf_counter() - begin, 2)}
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (32, 49152)).astype(np.float32)
    rows: dict[str, Any] = {}
    for name, mix in MIXES.items():
        rows[name] = {}
        for twin, steps in ((cpu, 30), (reference, 1)):
            sampler = twin.BatchedSampler(32, 49152, 4096)
            for slot in range(32):
                sampler.admit(
                    slot, RowParams(max_tokens=100, seed=slot, **mix(slot)), rng.integers(49152, size=2000)
                )
            begin = time.perf_counter()
            sampler.step(logits[:1], [0])
            start_up.setdefault("first_step_seconds", round(time.perf_counter() - begin, 2))
            rows[name][twin.__name__] = milliseconds(sampler, logits, steps)
        print(name, rows[name], flush=True)
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "command": " ".join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
    }
    options.out.write_text(
        json.dumps({"machine": machine, "start_up": start_up, "milliseconds": rows}, indent=1)
    )


if __name__ == "__main__":
    main()
