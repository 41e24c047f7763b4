"""The product's side of every case, and the peers that need its session: raw, eager, static. On the GPU.

    python -m benchmarks.gpu.cases --model DIR --cases a,b,c,d,e --peers raw,eager,static --report FILE

Rounds of things that are compared are interleaved, so that a noisy machine hits all alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from benchmarks.gpu import allocations, breakdown, load, timing
from benchmarks.gpu.bench import Bench, idle
from benchmarks.gpu.findings import Findings
from benchmarks.gpu.raw import FIRST_ID, Rate, RawLoop
from benchmarks.gpu.timing import Rates
from kernels.cuda import bucket_of
from producer.sizes import parse_bytes
from worker.blocks import blocks_for
from worker.cuda.graph import EAGER
from worker.sequence import Row
from worker.settings import EngineSettings
from worker.tokenizer import Tokenizer

MAX_BATCH = 256
DETERMINISTIC_BATCHES = (1, 32, 256)
BROKEN_DOWN = TAIL_BATCHES = (32, 128, 256)
EAGER_STEPS = 96  # enough for a rate, a third of the time
PREFILL_ROUNDS = 5
LENGTHS = (384, 2048)  # longest rows of (a), and of all cases
SMALL = 32  # batches up to here are cheap: every mix gets all rounds


@dataclass(frozen=True, slots=True)
class Task:
    """What a case works with."""

    bench: Bench
    findings: Findings
    peers: Set[str]
    rounds: int
    peer: str  # what our own figures are called
    batches: Sequence[int] = load.BATCHES

    @property
    def vocab(self) -> int:
        return int(self.bench.model.vocab_size)


def decode(task: Task) -> None:
    """(a): ours, every mix; beside it the raw loops, the same number of rows at the same lengths."""
    for batch in task.batches:
        rows = load.decode(load.DISTINCT, batch, task.vocab)
        timing.batch(task.bench.engine(batch), [load.lengthened(row, 2) for row in rows])
        found: list[Rates] = []
        raw = Raw(task, batch)
        for _ in range(task.rounds):
            found.append(timing.batch(task.bench.engine(batch), rows))
            raw.round()
        add_rates(task, batch, load.DISTINCT, found)
        raw.add()
        if task.peer == "ours":
            other_mixes(task, batch)


def other_mixes(task: Task, batch: int) -> None:
    """Greedy, one setting for all, and the plain loop."""
    for mix in (name for name in load.MIXES if name != load.DISTINCT):
        rows = load.decode(mix, batch, task.vocab)
        rounds = task.rounds if batch <= SMALL else 1
        add_rates(task, batch, mix, [timing.batch(task.bench.engine(batch), rows) for _ in range(rounds)])
    plain = timing.batch(task.bench.engine(batch, "plain"), load.decode(load.DISTINCT, batch, task.vocab))
    add_rates(task, batch, load.DISTINCT, [plain], peer="plain loop")


def add_rates(task: Task, batch: int, mix: str, found: Sequence[Rates], peer: str | None = None) -> None:
    rounds = {"decode_tok_s": [one.decode for one in found], "total_tok_s": [one.total for one in found]}
    task.findings.add("a", peer or task.peer, rounds, batch=batch, mix=mix)


class Raw:
    """The raw loops that are asked for, round by round."""

    def __init__(self, task: Task, batch: int, prompt: int = 128, output: int = 256) -> None:
        kinds = {"raw": (output, FIRST_ID + batch), "eager": (EAGER_STEPS, EAGER)}
        self._kinds = {name: each for name, each in kinds.items() if name in task.peers}
        self._found: dict[str, list[Rate]] = {name: [] for name in self._kinds}
        self._task, self._batch = task, batch
        self._loop = RawLoop(task.bench.model._graph, batch, prompt, output)

    def round(self) -> None:
        for name, (steps, graph_id) in self._kinds.items():
            self._found[name].append(self._loop.rate(steps, graph_id))

    def add(self) -> None:
        for name, found in self._found.items():
            rounds = {"decode_tok_s": [one.tok_s for one in found], "step_ms": [one.step_ms for one in found]}
            self._task.findings.add("a", name, rounds, batch=self._batch)


def steps(task: Task) -> None:
    """Where a step's time goes, and whether steps allocate."""
    for batch in BROKEN_DOWN:
        rows = load.decode(load.DISTINCT, batch, task.vocab)
        task.findings.add("steps", task.peer, batch=batch, **breakdown.measure(task.bench, rows))
    task.findings.add("allocations", task.peer, **allocations.measure(task.bench))


def offline(task: Task) -> None:
    """(b). Of what the static batch computes, only the tokens that were asked for count."""
    rows = load.offline(task.vocab)
    timing.whole(task.bench.engine(MAX_BATCH), [load.lengthened(row, 2) for row in rows])
    found = [timing.whole(task.bench.engine(MAX_BATCH), rows) for _ in range(max(1, task.rounds - 1))]
    task.findings.add("b", task.peer, {"total_tok_s": [tokens / seconds for seconds, tokens in found]})
    if "static" in task.peers:
        seconds, _ = timing.whole(task.bench.engine(MAX_BATCH), load.padded(rows))
        task.findings.add("b", "static", total_tok_s=load.num_tokens(rows) / seconds)


def tail(task: Task) -> None:
    """(c): until the long rows are alone, and decode alone of as many live rows; at last, to the end."""
    rows = load.tail(task.vocab)
    for batch in TAIL_BATCHES:
        same = load.decode(load.DISTINCT, batch, task.vocab, prompt=16, output=128)
        until_last(task, rows, batch)  # warm
        until, pure = [], []
        for _ in range(task.rounds):
            pure.append(timing.batch(task.bench.engine(batch), same).decode)
            until.append(until_last(task, rows, batch))
        rounds = {"until_tok_s": until, "pure_decode_tok_s": pure}
        task.findings.add("c", task.peer, rounds, batch=batch)
    _, total = timing.until_last(task.bench.engine(MAX_BATCH), rows, load.TAIL_LONG, to_the_end=True)
    task.findings.add("c", f"{task.peer}, to the end", total_tok_s=total)
    if "static" in task.peers:
        static_tail(task, rows)


def until_last(task: Task, rows: Sequence[Row], batch: int) -> float:
    return timing.until_last(task.bench.engine(batch), rows, load.TAIL_LONG, to_the_end=False)[0]


def static_tail(task: Task, rows: Sequence[Row]) -> None:
    first = rows[:MAX_BATCH]  # as many long rows are in each of the batches, so one stands for all
    seconds, _ = timing.whole(task.bench.engine(MAX_BATCH), load.padded(first))
    figures = {"batches_measured": 1, "batches": -(-len(rows) // MAX_BATCH)}
    task.findings.add("c", "static", total_tok_s=load.num_tokens(first) / seconds, **figures)


def direct(task: Task, count: int) -> None:
    """(d) without a queue: the rows' token ids into Engine.generate."""
    encode = Tokenizer.load(Path(task.bench.settings.model)).encode
    rows = load.tokenised(load.texts(count), encode)
    timing.whole(task.bench.engine(MAX_BATCH), rows[: 4 * MAX_BATCH])
    seconds, tokens = timing.whole(task.bench.engine(MAX_BATCH), rows)
    prompts = sum(len(row.prompt) for row in rows)
    task.findings.add(
        "d", "direct", rows=count, total_tok_s=tokens / seconds, seconds=seconds, prompt_tokens=prompts
    )


def prefill(task: Task) -> None:
    """(e); eager: the bare runs, 16 prompts each."""
    rows = load.prefill(task.vocab, 0)
    prompts = sum(len(row.prompt) for row in rows)
    timing.whole(task.bench.engine(MAX_BATCH), rows)
    rounds = [load.prefill(task.vocab, seed) for seed in range(1, 1 + PREFILL_ROUNDS)]
    found = [timing.whole(task.bench.engine(MAX_BATCH), rows)[0] for rows in rounds]
    task.findings.add("e", task.peer, {"prompt_tok_s": [prompts / seconds for seconds in found]})
    if "eager" in task.peers:
        bare = [bare_prefill(task.bench, 16, len(rows[0].prompt), 4) for _ in range(PREFILL_ROUNDS)]
        task.findings.add("e", "eager", {"prompt_tok_s": bare})


def bare_prefill(bench: Bench, rows: int, tokens: int, runs: int) -> float:
    """Prompt tokens a second of runs of the model alone."""
    model = bench.model
    batch = idle(rows, tokens, -(-tokens // model.block_size), first_block=1)
    model.run(batch)
    model._graph.stream.synchronize()
    begun = perf_counter()
    for _ in range(runs):
        model.run(batch)
    model._graph.stream.synchronize()
    return runs * rows * tokens / (perf_counter() - begun)


CASES: dict[str, Sequence[Callable[[Task], None]]] = {
    "a": (decode, steps),
    "b": (offline,),
    "c": (tail,),
    "e": (prefill,),
}


def warm(bench: Bench) -> None:
    """Every number of rows that is captured, with tables for the lengths of the cases."""
    buckets = sorted({bucket_of(rows) for rows in range(1, MAX_BATCH + 1)})
    for tokens in LENGTHS:
        bench.warm(buckets, blocks_for(tokens, bench.model.block_size))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--cases", default="a,b,c,d,e")
    parser.add_argument("--peers", default="raw,eager,static")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=20_000, help="of (d)")
    parser.add_argument("--kv-memory", default="24G")
    parser.add_argument("--deterministic", action="store_true", help="(a) alone, at three batches")
    parser.add_argument("--report", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    told = parse()
    settings = EngineSettings(
        model=str(told.model),
        device="cuda:0",
        max_batch=MAX_BATCH,
        kv_bytes=parse_bytes(told.kv_memory, "--kv-memory"),
        loop="overlapped",
        deterministic=told.deterministic,
    )
    findings, begun = Findings(told.report), perf_counter()
    bench = Bench.build(settings)
    built = perf_counter()
    if told.deterministic:
        decode(Task(bench, findings, frozenset(), told.rounds, "deterministic", DETERMINISTIC_BATCHES))
        return
    warm(bench)
    seconds = {"build_seconds": built - begun, "warm_seconds": perf_counter() - built}
    findings.add("load", "ours", **seconds, kv_blocks=bench.model.num_blocks)
    task = Task(bench, findings, frozenset(told.peers.split(",")), told.rounds, "ours")
    for case in told.cases.split(","):
        for measure in CASES.get(case, ()):
            measure(task)
        if case == "d":
            direct(task, told.rows)


if __name__ == "__main__":
    main()
