"""The sampler's ladder: what each rung from one call a row to one launch a step is worth. Needs a GPU.

The rungs follow the design history of continuous batching engines: one call and one wait a row; all calls,
then one wait; one call when all rows agree; one call per distinct setting, with gather and scatter; one
launch for any mix. All rungs draw the same tokens, as all call the same kernel: only the calls differ.

    python benchmarks/sampler.py --out benchmarks/results/sampler.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kernels import cuda, cuda_code  # noqa: E402
from kernels.rows import RowParams  # noqa: E402

BATCHES = (1, 8, 32, 128, 256)
VOCABULARIES = (32000, 49152, 128256, 201088)
COPY_BYTES_PER_SECOND = 4.28e12  # measured on the same kind of machine: the floor is one read of the logits
MIXES: dict[str, Callable[[int], dict[str, Any]]] = {
    "uniform": lambda i: {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "4 groups": lambda i: {"temperature": 0.7, "top_k": 20 + 10 * (i % 4), "top_p": 0.9},
    "all distinct": lambda i: {"temperature": 0.7 + i / 500, "top_k": 20 + i % 64, "top_p": 0.9 + i / 3000},
    "top_p of all": lambda i: {"temperature": 0.8 + i / 1000, "top_p": 0.9 + i / 3000},
    "penalties": lambda i: {
        "temperature": 0.7 + i / 500,
        "top_k": 20 + i % 64,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
    },
}


class Case:
    """A batch of live rows, and buffers of logits that together exceed the L2 cache."""

    def __init__(self, batch: int, vocab_size: int, mix: str, buffers: list[Any]) -> None:
        self.batch, self.buffers = batch, buffers
        self.settings = [MIXES[mix](i) for i in range(batch)]
        self.sampler = cuda.BatchedSampler(batch, vocab_size, 8192)
        prompts = np.random.default_rng(0).integers(vocab_size, size=(batch, 2000))
        for slot, fields in enumerate(self.settings):
            self.sampler.admit(slot, RowParams(max_tokens=6000, seed=slot, **fields), prompts[slot].tolist())
        self.sampler.flush()
        self.next_ids = cp.zeros(batch, cp.int64)
        self.packed = cp.empty_like(buffers[0])
        keys = [tuple(each.values()) for each in self.settings]
        self.groups = [np.array([i for i, k in enumerate(keys) if k == key]) for key in dict.fromkeys(keys)]
        self.rows = np.arange(batch)
        self.group_rows = [cp.asarray(group) for group in self.groups]

    def addresses(self, logits: Any) -> Any:
        return logits.data.ptr + np.arange(len(logits), dtype=np.uint64) * np.uint64(logits.strides[0])

    def call(self, addresses: Any, slots: Any) -> cuda.Pending:
        """One call of the sampler; the tokens also go to these rows' next ids."""
        return self.sampler.enqueue(addresses, slots, self.next_ids.data.ptr + 8 * int(slots[0]))


def row_by_row(case: Case, logits: Any) -> None:
    """One call and one wait a row."""
    for row, address in enumerate(case.addresses(logits)):
        case.call(np.array([address]), case.rows[row : row + 1]).wait()


def launch_then_wait(case: Case, logits: Any) -> None:
    """All calls, then one wait."""
    addresses = case.addresses(logits)
    pending = [case.call(addresses[row : row + 1], case.rows[row : row + 1]) for row in range(len(addresses))]
    pending[-1].wait()


def one_call_if_uniform(case: Case, logits: Any) -> None:
    """One call when all rows agree, else all calls, then one wait."""
    if len(case.groups) == 1:
        case.call(case.addresses(logits), case.rows).wait()
    else:
        launch_then_wait(case, logits)


def call_per_group(case: Case, logits: Any) -> None:
    """Gather each distinct setting's rows, one call each, scatter the tokens."""
    tokens, pending, begin = cp.empty(case.batch, cp.int64), list[cuda.Pending](), 0
    with case.sampler.stream:
        for group, rows in zip(case.groups, case.group_rows, strict=True):
            packed = case.packed[begin : begin + len(group)]
            cp.take(logits, rows, axis=0, out=packed)
            pending.append(case.sampler.enqueue(case.addresses(packed), group, tokens.data.ptr + 8 * begin))
            case.next_ids[rows] = tokens[begin : begin + len(group)]
            begin += len(group)
    pending[-1].wait()
    case.sampler.stream.synchronize()


def one_launch(case: Case, logits: Any) -> None:
    """Ours: one launch, whatever the mix."""
    case.call(case.addresses(logits), case.rows).wait()


RUNGS = (row_by_row, launch_then_wait, one_call_if_uniform, call_per_group, one_launch)


def wall_us(case: Case, rung: Callable[[Case, Any], None], seconds: float = 0.015) -> float:
    """Median from the call to the tokens on the host."""
    times: list[float] = []
    while sum(times) < seconds or len(times) < 5:
        logits = case.buffers[len(times) % len(case.buffers)]
        begin = time.perf_counter()
        rung(case, logits)
        times.append(time.perf_counter() - begin)
    return round(float(np.median(times[2:])) * 1e6, 1)


def device_us(stream: Any, work: list[Callable[[], Any]], replays: int = 20) -> float:
    """Median device time of one piece of work: all in one captured graph, replayed, timed by events."""
    with stream:
        stream.begin_capture()
        for each in work:
            each()
        graph = stream.end_capture()
    times = []
    for _ in range(replays + 3):
        begin, end = cp.cuda.Event(), cp.cuda.Event()
        begin.record(stream)
        graph.launch(stream)
        end.record(stream)
        end.synchronize()
        times.append(cp.cuda.get_elapsed_time(begin, end) * 1e3 / len(work))
    return round(float(np.median(times[3:])), 2)


def launch_us(case: Case) -> float:
    """Device time of our launch. Entries lie there already, as in a step whose batch has not changed."""
    sampler, work = case.sampler, list[Callable[[], Any]]()
    kernel = sampler._samplers[cuda_code.shape_for(case.batch)]
    for logits in case.buffers:
        entries = np.zeros(case.batch, cuda.ENTRY)
        entries["address"], entries["slot"] = case.addresses(logits), case.rows
        entries["edits"], entries["top"] = sampler._edited[: case.batch], -1
        held = cp.asarray(entries.view(np.uint8))
        results = np.uint64(sampler._results[0].rows.ctypes.data)
        arguments = (held, sampler._copies, results, np.uint64(0), *sampler._parameters)
        work.append(partial(kernel.launch, case.batch, arguments))
    cp.cuda.get_current_stream().synchronize()
    return device_us(sampler.stream, work)


def same_tokens(batch: int, vocab_size: int, mix: str, logits: Any) -> bool:
    """Whether one step of every rung, from a fresh start, draws the same tokens."""
    drawn = []
    for rung in RUNGS:
        copy = logits.copy()
        case = Case(batch, vocab_size, mix, [copy])
        cp.cuda.get_current_stream().synchronize()
        rung(case, copy)
        drawn.append(case.next_ids.get())
    return all((tokens == drawn[0]).all() for tokens in drawn)


def peers(batch: int, buffers: list[Any]) -> dict[str, float]:
    """torch on the same logits, uniform settings, device time by events over replays of a captured graph."""
    import torch

    tensors = [torch.from_dlpack(each) for each in buffers]
    out: dict[str, float] = {}
    for name, function in TORCH.items():
        graph = torch.cuda.CUDAGraph()
        for each in tensors[:1]:
            function(torch, each)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for each in tensors:
                function(torch, each)
        times = []
        for _ in range(13):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / len(tensors))
        out[name] = round(float(np.median(times[3:])), 1)
    return out


def torch_top_k_top_p(torch: Any, z: Any) -> Any:
    values, ids = torch.topk(z, 50)
    p = torch.softmax(values / 0.7, -1)
    p = torch.where(p.cumsum(-1) - p < 0.9, p, 0.0)
    return ids.gather(-1, (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True))


def torch_sorted_top_p(torch: Any, z: Any) -> Any:
    values, ids = torch.sort(z, descending=True)
    p = torch.softmax(values / 0.7, -1)
    p = torch.where(p.cumsum(-1) - p < 0.9, p, 0.0)
    return ids.gather(-1, (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True))


def torch_exponential_trick(torch: Any, z: Any) -> Any:
    p = torch.softmax(z / 0.7, -1)
    return (p / torch.empty_like(p).exponential_()).argmax(-1)


TORCH = {
    "torch top-k 50, top-p": torch_top_k_top_p,
    "torch sort, top-p": torch_sorted_top_p,
    "torch temperature only": torch_exponential_trick,
}


def buffers_of(batch: int, vocab_size: int) -> list[Any]:
    """As many buffers of logits as exceed the L2 cache (60 MB) twofold, at most 32."""
    count = min(32, max(2, -(-120_000_000 // (4 * batch * vocab_size))))
    rng = cp.random.default_rng(1)
    return [rng.standard_normal((batch, vocab_size), dtype=cp.float32) * 3 for _ in range(count)]


def measure(batch: int, vocab_size: int, mix: str, buffers: list[Any], check: bool) -> dict[str, Any]:
    case = Case(batch, vocab_size, mix, buffers)
    row: dict[str, Any] = {"batch": batch, "vocab_size": vocab_size, "mix": mix}
    row["floor_us"] = round(4 * batch * vocab_size / COPY_BYTES_PER_SECOND * 1e6, 1)
    row["device_us"] = launch_us(case)
    row["wall_us"] = {rung.__name__: wall_us(case, rung) for rung in RUNGS}
    if check:
        row["same_tokens"] = same_tokens(batch, vocab_size, mix, buffers[0])
    return row


def settings_of(arguments: list[str]) -> list[str]:
    """The arguments without where the result goes."""
    at = arguments.index("--out") if "--out" in arguments else len(arguments)
    return arguments[:at] + arguments[at + 2 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "sampler.json")
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    options = parser.parse_args()
    rows, torch_rows = [], []
    for vocab_size in options.vocabularies:
        for batch in options.batches:
            buffers = buffers_of(batch, vocab_size)
            torch_rows.append({"batch": batch, "vocab_size": vocab_size, **peers(batch, buffers)})
            for mix in MIXES:
                rows.append(measure(batch, vocab_size, mix, buffers, check=batch <= 32))
                print(json.dumps(rows[-1]), flush=True)
            print(json.dumps(torch_rows[-1]), flush=True)
            del buffers
            cp.get_default_memory_pool().free_all_blocks()
    device = cp.cuda.runtime.getDeviceProperties(0)
    machine = {
        "gpu": device["name"].decode(),
        "driver": cp.cuda.runtime.driverGetVersion(),
        "cupy": cp.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python", sys.argv[0], *settings_of(sys.argv[1:])]),
        "date": time.strftime("%Y-%m-%d"),
    }
    options.out.write_text(json.dumps({"machine": machine, "rows": rows, "torch": torch_rows}, indent=1))


if __name__ == "__main__":
    main()
