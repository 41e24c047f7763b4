"""`make chaos`: a batch under a seeded storm of faults, held row for row against the same batch in calm.

Exit code 1 when a row was lost, doubled or mixed up, or a storm did not end in its time.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from chaos.rows import DUMMY, make, name, told
from chaos.schedule import schedule
from chaos.stage import DOOMED, MAIN, Stage
from chaos.verdict import Answers, Verdict, judge
from e2e.harness import by_id, write

TICK_SECONDS = 0.05
HEAD = ("seed", "faults", "restarts", "rows lost", "doubled", "mixed up", "seconds", "clean")


@dataclass(frozen=True, slots=True)
class Plan:
    """One storm."""

    seed: int
    model: str
    rows: int
    faults: int
    workers: int
    limit_seconds: float
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it."""

    plan: Plan
    verdict: Verdict
    struck: Counter[str]
    due: int
    exits: Counter[int]
    engine_deaths: int
    rq_rounds: int
    seconds: float
    is_over: bool

    @property
    def is_clean(self) -> bool:
        return self.is_over and self.verdict.is_clean and self.struck.total() >= self.due

    def show(self) -> str:
        plan, verdict = self.plan, self.verdict
        faults = ", ".join(f"{kind} {count}" for kind, count in sorted(self.struck.items()))
        restarts = ", ".join(f"{count} x exit {code}" for code, count in sorted(self.exits.items()))
        end = f"{self.seconds:.0f} s{'' if self.is_over else ', NOT OVER IN TIME'}"
        wrong = f"lost {len(verdict.lost)}, doubled {len(verdict.doubled)}, mixed up {len(verdict.mixed_up)}"
        said = [
            f"seed {plan.seed}: {plan.rows:,} rows, {name(plan.model)}, {plan.workers} workers, {end}",
            f"  rows {wrong}; cancelled as asked {verdict.cancelled}",
            f"  {self.struck.total()} of {self.due} faults: {faults}",
            f"  engines died {self.engine_deaths} times; workers ended: {restarts or 'never'}",
            f"  RQ's own tools ran {self.rq_rounds} times",
        ]
        names = [*verdict.lost[:10], *verdict.doubled[:10], *verdict.mixed_up[:10], *verdict.wrong]
        return "\n".join([*said, *(f"  ! {what}" for what in names)])

    @property
    def cells(self) -> tuple[object, ...]:
        """Its line of the table, as HEAD names them."""
        verdict = self.verdict
        bad = (len(verdict.lost), len(verdict.doubled), len(verdict.mixed_up))
        restarts = self.exits.total() + self.engine_deaths
        is_clean = "yes" if self.is_clean else "NO"
        return (self.plan.seed, self.struck.total(), restarts, *bad, f"{self.seconds:.0f}", is_clean)

    def encode(self) -> str:
        found = {"struck": dict(self.struck), "exits": dict(self.exits), "is_clean": self.is_clean}
        found |= {"plan": asdict(self.plan), "verdict": asdict(self.verdict), "due": self.due}
        found["engine_deaths"] = self.engine_deaths
        return json.dumps({**found, "rq_rounds": self.rq_rounds, "seconds": round(self.seconds, 1)})


def calm(folder: Path, plan: Plan, files: Mapping[str, Path]) -> dict[str, Answers]:
    """What every row of both batches says where nothing goes wrong."""
    answers: dict[str, Answers] = {}
    with Stage(folder, plan.model, dict(files), 1, plan.device) as stage:
        for batch in (DOOMED, MAIN):
            stage.submit(batch, [])
        stage.follow()
        while not stage.tend():
            time.sleep(TICK_SECONDS)
        for batch, out in ((MAIN, stage.out), (DOOMED, stage.collect_doomed())):
            answers[batch] = {custom_id: told(line) for custom_id, line in by_id(out).items()}
    return answers


def storm(folder: Path, plan: Plan, files: Mapping[str, Path], answers: Mapping[str, Answers]) -> Outcome:
    """Play it, then judge. It ends with the batch, or after ``limit_seconds`` in any case."""
    begun, struck = time.monotonic(), Counter[str]()
    with Stage(folder, plan.model, dict(files), plan.workers, plan.device) as stage:
        draw = random.Random(plan.seed)
        kills = [draw.uniform(0.3, 2.0) for _ in range(2)]
        struck["submission killed"] += stage.submit(MAIN, kills)
        stage.submit(DOOMED, [])
        stage.follow()
        is_over = _play(stage, plan, struck, begun + plan.limit_seconds)
        stage.calm()
        verdict = judge(stage, answers) if is_over else Verdict(wrong=[f"{stage.ended_rows():,} rows ended"])
        verdict.wrong += stage.notes
        return Outcome(
            plan=plan,
            verdict=verdict,
            struck=struck,
            due=plan.faults + struck["submission killed"],
            exits=stage.exits,
            engine_deaths=stage.engine_deaths,
            rq_rounds=stage.reader.rounds,
            seconds=time.monotonic() - begun,
            is_over=is_over,
        )


def _play(stage: Stage, plan: Plan, struck: Counter[str], limit: float) -> bool:
    """Faults as they fall due, until the producer has all results. Whether that came in time."""
    coming = schedule(plan.seed, plan.faults)
    while time.monotonic() < limit:
        if stage.tend():
            return True
        due = [fault for fault in coming if fault.at <= stage.ended_rows() / plan.rows]
        for fault in due:
            if stage.strike(fault):
                struck[fault.kind] += 1
                coming.remove(fault)
        time.sleep(TICK_SECONDS)
    return False


def run(plans: list[Plan], keep: Path | None, out: Path | None) -> bool:
    """One calm run, then the storms one after the other. Whether all were clean."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="livebatch-chaos-") as scratch:
        folder, first = keep or Path(scratch), plans[0]
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {MAIN: first.rows, DOOMED: max(20, first.rows // 5)}
        files = {
            batch: write(folder / f"{batch}.jsonl", make(first.model, size, batch[0], first.rows))
            for batch, size in sizes.items()
        }
        begun = time.monotonic()
        answers = calm(folder / "calm", first, files)
        print(f"in calm: {first.rows:,} rows, {time.monotonic() - begun:.0f} s", flush=True)
        for plan in plans:
            outcome = storm(folder / f"seed-{plan.seed}", plan, files, answers)
            print(outcome.show(), flush=True)
            outcomes.append(outcome)
            if out:
                with out.open("a") as stream:
                    stream.write(outcome.encode() + "\n")
    for cells in (HEAD, *(outcome.cells for outcome in outcomes)):
        print("  ".join(f"{cell!s:>9}" for cell in cells))
    return all(outcome.is_clean for outcome in outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first storm; later ones count on")
    parser.add_argument("--storms", type=int, default=1)
    parser.add_argument("--model", default=DUMMY, help="dummy, or a model folder")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda:0: a --deterministic engine on a GPU")
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds of one storm")
    parser.add_argument("--keep", type=Path, help="a folder for logs, results and Redis's files")
    parser.add_argument("--out", type=Path, help="a line of JSON for each storm")
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # children end with us
    plans = [
        Plan(seed, told.model, told.rows, told.faults, told.workers, told.limit, told.device)
        for seed in range(told.seed, told.seed + told.storms)
    ]
    sys.exit(not run(plans, told.keep, told.out))


if __name__ == "__main__":
    main()
