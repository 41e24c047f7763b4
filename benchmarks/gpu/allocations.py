"""Whether decode steps allocate: memory before, during and after a thousand of them."""

from __future__ import annotations

import os
from typing import Any

import cupy as cp

from benchmarks.gpu import load
from benchmarks.gpu.bench import Bench
from benchmarks.soak import rss_mb

SETTLED = 8  # steps after the prefills before we look
EVERY = 50  # steps between two looks


def measure(bench: Bench, rows: int = 256, steps: int = 1000) -> dict[str, Any]:
    """Bytes of CuPy's pool and of the device over ``steps`` decodes; up to 1,000, tables keep their width."""
    engine = bench.engine(rows)
    for row in load.decode(load.DISTINCT, rows, bench.model.vocab_size, prompt=8, output=steps + 2 * SETTLED):
        engine.add(row)
    while engine.load.tokens_sampled < rows * SETTLED:
        engine.step()
    looks = [look()]
    for number in range(1, steps + 1):
        engine.step()
        if number % EVERY == 0:
            looks.append(look())
    while engine.has_work:
        engine.step()
    engine.step()
    spread = {f"{name}_spread": max(each[name] for each in looks) - looks[0][name] for name in looks[0]}
    return {"rows": rows, "steps": steps, **looks[0], **spread}


def look() -> dict[str, int]:
    pool = cp.get_default_memory_pool()
    free, total = cp.cuda.runtime.memGetInfo()
    return {
        "pool_used_bytes": int(pool.used_bytes()),
        "pool_total_bytes": int(pool.total_bytes()),
        "device_used_bytes": int(total - free),
        "rss_mb": round(rss_mb(os.getpid())),
    }
