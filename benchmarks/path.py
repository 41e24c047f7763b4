"""Tokens a second from the bare model step up to the whole path through Redis, in one run (`make bench`).

SmolLM2 fp32 on CPU, 32 live rows, prompt 16, output 128. (a) to (c) are decode only; (d) counts prefill too,
and so does the engine figure beside it; (e) sends one row after another through the same worker.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kernels.cpu import BatchedSampler
from kernels.rows import RowParams
from producer import Client
from producer.embedded import EmbeddedRedis
from worker.batch import Batch
from worker.bench import decode_rate
from worker.engine import Engine
from worker.folder import ModelFolder
from worker.model import OrtModel
from worker.scheduler import Policy
from worker.sequence import Row

PROMPT, OUTPUT = 16, 128


def settings(index: int) -> dict[str, Any]:
    """32 settings, no two alike: temperature only, top-k, top-p, min-p and mixes."""
    kinds: list[dict[str, Any]] = [
        {},
        {"top_k": 5 + index},
        {"top_p": 0.6 + index / 100},
        {"min_p": 0.01 + index / 1000},
    ]
    mixed = {"top_k": 20 + index, "top_p": 0.7 + index / 200} if index % 8 == 5 else {}
    return {"temperature": 0.6 + index / 50, "seed": index, **kinds[index % 4], **mixed}


def prompts(count: int, vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(1000, vocab, PROMPT).tolist() for _ in range(count)]


def bare_step(model: OrtModel, rows: int) -> float:
    """(a): the model alone, a fixed batch decoding OUTPUT tokens at the same lengths as the engine's rows."""
    width = -(-(PROMPT + OUTPUT) // model.block_size)
    table = np.arange(1, 1 + rows * width, dtype=np.int32).reshape(rows, width)
    ids = np.full(rows, 1000, np.int64)
    batches = [
        Batch(
            input_ids=ids,
            cumulative=np.arange(rows + 1, dtype=np.int32),
            past=np.full(rows, past, np.int32),
            block_table=np.ascontiguousarray(table[:, : past // model.block_size + 1]),
            logits_rows=np.arange(rows, dtype=np.int64),
            slots=np.arange(rows, dtype=np.int32),
        )
        for past in range(PROMPT + OUTPUT)
    ]
    for batch in batches[:PROMPT]:
        model.run(batch)
    begun = time.perf_counter()
    for batch in batches[PROMPT:]:
        model.run(batch)
    return rows * OUTPUT / (time.perf_counter() - begun)


def engine_rows(count: int, vocab: int, mixed: bool) -> list[Row]:
    greedy = {"temperature": 0.0}
    return [
        Row(index, prompt, RowParams(max_tokens=OUTPUT, **(settings(index % 32) if mixed else greedy)))
        for index, prompt in enumerate(prompts(count, vocab))
    ]


def engine_decode(model: OrtModel, rows: int, mixed: bool) -> float:
    """(b), (c): the engine's decode phase, from the first step that holds all rows decoding to the end."""
    engine = Engine(
        model, BatchedSampler(rows, model.vocab_size, model.context_length), Policy(max_batch=rows)
    )
    return decode_rate(engine, engine_rows(rows, model.vocab_size, mixed))


def engine_whole(model: OrtModel, batch: int, count: int) -> float:
    """(c with prefill): the engine given ``count`` rows directly, first step to last."""
    engine = Engine(
        model, BatchedSampler(batch, model.vocab_size, model.context_length), Policy(max_batch=batch)
    )
    rows = engine_rows(count, model.vocab_size, mixed=True)
    begun = time.perf_counter()
    outputs = sum(len(output.tokens) for output in engine.generate(rows))
    return outputs / (time.perf_counter() - begun)


def lines(count: int, vocab: int) -> list[dict[str, Any]]:
    shared = {"max_tokens": OUTPUT, "ignore_eos": True}
    return [
        {"custom_id": str(index), "prompt_token_ids": prompt, **shared, **settings(index % 32)}
        for index, prompt in enumerate(prompts(count, vocab))
    ]


def through_redis(client: Client, rows: list[dict[str, Any]], queue: str) -> float:
    """(d), (e): tokens a second from the first line read to the last result read."""
    begun = time.perf_counter()
    batch = client.submit_rows(rows, queue=queue)
    results = list(client.results(batch.id, follow=True))
    assert len(results) == len(rows)
    assert all(result.failure is None for result in results)
    tokens = sum(result.usage.completion_tokens for result in results if result.usage)
    return tokens / (time.perf_counter() - begun)


def one_at_a_time(client: Client, rows: list[dict[str, Any]], queue: str) -> float:
    """(e): the next row is sent when the last one's result is here."""
    return statistics.harmonic_mean([through_redis(client, [row], queue) for row in rows])


def whole_path(folder: Path, batch: int, count: int, alone: int, vocab: int) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as data, EmbeddedRedis(Path(data)) as redis:
        command = [sys.executable, "-m", "worker.cli", "run", "--model", str(folder), "--queue", "bench"]
        command += ["--redis", redis.url, "--max-batch", str(batch)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            client = Client(redis.url)
            through_redis(client, lines(batch, vocab), "bench")  # warm: model loaded, kernels compiled
            together = through_redis(client, lines(count, vocab), "bench")
            return together, one_at_a_time(client, lines(alone, vocab), "bench")
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def measure(folder: Path, batch: int, rounds: int, count: int, alone: int) -> dict[str, float]:
    model = OrtModel(ModelFolder.load(folder), num_blocks=1 + batch * 16)
    rates = decode_rates(model, batch, rounds)
    rates["c with prefill"] = engine_whole(model, batch, count)
    together, single = whole_path(folder, batch, count, alone, model.vocab_size)
    return rates | {"d whole path through Redis": together, "e one row at a time": single}


def decode_rates(model: OrtModel, batch: int, rounds: int) -> dict[str, float]:
    """Rounds of (a), (b), (c) interleaved, so that a noisy neighbour hits all three alike; medians."""
    kinds: dict[str, Callable[[], float]] = {
        "a bare model step": lambda: bare_step(model, batch),
        "b engine, greedy": lambda: engine_decode(model, batch, mixed=False),
        "c engine, 32 settings": lambda: engine_decode(model, batch, mixed=True),
    }
    seen: dict[str, list[float]] = {name: [] for name in kinds}
    engine_whole(model, 2, 2)  # compiles and allocates
    for _ in range(rounds):
        for name, run in kinds.items():
            seen[name].append(run())
    return {name: statistics.median(values) for name, values in seen.items()}


def ratios(rates: dict[str, float]) -> dict[str, float]:
    bare = rates["a bare model step"]
    return {
        "b / a (at least 0.8)": rates["b engine, greedy"] / bare,
        "c / a (at least 0.8)": rates["c engine, 32 settings"] / bare,
        "d / c with prefill (at least 0.9)": rates["d whole path through Redis"] / rates["c with prefill"],
        "d / e (at least 5)": rates["d whole path through Redis"] / rates["e one row at a time"],
    }


def machine() -> dict[str, Any]:
    names = ("onnxruntime", "numpy", "numba", "rq", "redis")
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=128, help="rows of (c with prefill) and (d)")
    parser.add_argument("--alone", type=int, default=6, help="rows of (e)")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args(arguments)
    rates = measure(options.model, options.batch, options.rounds, options.rows, options.alone)
    for name, rate in rates.items():
        print(f"{name:34s} {rate:8.1f} tok/s")
    for name, ratio in ratios(rates).items():
        print(f"{name:34s} {ratio:8.2f}")
    if options.out:
        report = {
            "command": [word for last, word in pairwise(["", *sys.argv]) if "--out" not in (last, word)],
            "machine": machine(),
            "tokens_per_second": rates,
            "ratios": ratios(rates),
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
