"""What a storm did to the rows: lost, doubled, mixed up; held against the same batch run in calm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import redis

from chaos.rows import told
from chaos.stage import DOOMED, MAIN, Stage
from e2e.harness import Line, lines
from producer.store import Store

Answers = Mapping[str, Any]  # what every row has to say, by custom_id


@dataclass(slots=True)
class Verdict:
    """Names of rows, and sentences about what else is wrong."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    mixed_up: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    cancelled: int = 0

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.doubled or self.mixed_up or self.wrong)


def judge(stage: Stage, answers: Mapping[str, Answers]) -> Verdict:
    """Both batches, by their result lines and by what Redis holds. ``answers`` by batch."""
    verdict = Verdict()
    judge_lines(verdict, lines(stage.out), answers[MAIN], stage.stopped_rows)
    judge_lines(verdict, lines(stage.collect_doomed()), answers[DOOMED], None)
    for batch in (MAIN, DOOMED):
        _judge_redis(verdict, stage.connection, batch, len(answers[batch]))
    return verdict


def judge_lines(verdict: Verdict, found: list[Line], answers: Answers, stopped: set[str] | None) -> None:
    """``stopped``: job ids of rows that may be cancelled; None: all."""
    times = Counter(line["custom_id"] for line in found)
    verdict.doubled += [name for name, count in times.items() if count > 1]
    verdict.lost += [name for name in answers if name not in times]
    verdict.mixed_up += [name for name in times if name not in answers]
    for line in found:
        said, name = told(line), line["custom_id"]
        if said == "batch_cancelled" and (stopped is None or line["id"] in stopped):
            verdict.cancelled += 1
        elif said in ("batch_cancelled", "worker_lost", "batch_expired"):
            verdict.lost.append(f"{name} ({said})")
        elif name in answers and said != answers[name]:
            verdict.mixed_up.append(name)


def _judge_redis(verdict: Verdict, connection: redis.Redis, batch: str, rows: int) -> None:
    """Counts, log, queue and registries tell the same; nothing of a run is left."""
    status = Store(connection).status(batch)
    ended = [entry.job_id for entry in Store(connection).read_log(batch, "0", 10 * rows)]
    results = Counter(connection.xlen(f"rq:results:{job_id}") for job_id in ended)
    checks = {
        "rows counted": (status.rows, rows),
        "ends counted": (status.ended, rows),
        "rows logged": (len(ended), rows),
        "different rows logged": (len(set(ended)), rows),
        "results of more than one run": (sum(n for size, n in results.items() if size > 1), 0),
        "rows still leased": (connection.zcard(f"rq:wip:{batch}"), 0),
        "runs left behind": (len(connection.keys(f"rq:execution:{batch}-*")), 0),
    }
    if batch == MAIN:
        checks["rows still queued"] = (connection.llen(f"rq:queue:{batch}"), 0)
    verdict.wrong += [
        f"{batch}: {what}: {is_}, not {due}" for what, (is_, due) in checks.items() if is_ != due
    ]
