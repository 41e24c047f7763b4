"""A small storm, and what the large one (`make chaos`) is worth: its faults come by seed, its judge sees."""

from __future__ import annotations

from collections import Counter

import pytest

from chaos.schedule import LAST, SHARES, schedule
from chaos.storm import Plan, run
from chaos.verdict import Verdict, judge_lines
from e2e.harness import Line


def test_a_seed_is_a_storm() -> None:
    faults = schedule(7, 50)
    assert faults == schedule(7, 50) != schedule(8, 50)
    kinds = Counter(fault.kind for fault in faults)
    assert kinds.total() == 50
    assert kinds.keys() == {*SHARES, "batch cancelled"}
    assert all(0 < fault.at <= LAST for fault in faults)


def line(name: str, text: str = "", error: str = "") -> Line:
    choice = {"index": 0, "text": text or f"answer {name}"}
    body = {"created": 1, "choices": [choice]}
    return {
        "id": f"storm-0-{name}",
        "custom_id": name,
        "error": {"code": error} if error else None,
        "response": None if error else {"status_code": 200, "body": body},
    }


ANSWERS = {name: {"choices": [{"index": 0, "text": f"answer {name}"}]} for name in "123"}
CALM = [line("1"), line("2"), line("3")]


@pytest.mark.parametrize(
    ("lines", "lost", "doubled", "mixed_up"),
    [
        (CALM, [], [], []),
        (CALM[1:], ["1"], [], []),
        ([*CALM, CALM[0]], [], ["1"], []),
        ([*CALM[:2], line("3", "answer 2")], [], [], ["3"]),
        ([*CALM[:2], line("3", error="worker_lost")], ["3 (worker_lost)"], [], []),
        ([*CALM[:2], line("3", error="batch_cancelled")], ["3 (batch_cancelled)"], [], []),
        ([line("1", error="batch_cancelled"), *CALM[1:]], [], [], []),
    ],
)
def test_the_judge_sees(lines: list[Line], lost: list[str], doubled: list[str], mixed_up: list[str]) -> None:
    verdict = Verdict()
    judge_lines(verdict, lines, ANSWERS, {"storm-0-1"})
    assert (verdict.lost, verdict.doubled, verdict.mixed_up) == (lost, doubled, mixed_up)


@pytest.mark.redis
@pytest.mark.timeout(180)
def test_a_small_storm() -> None:
    assert run([Plan(seed=0, model="dummy", rows=40, faults=6, workers=2, limit_seconds=150)], None, None)
