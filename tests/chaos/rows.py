"""The rows of a storm, and what of a result line has to be the same in every run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from e2e.harness import Line, error_code

DUMMY = "dummy"
MANY = 1000  # from here on a storm lasts by the number of its rows; before, by their length
SUBJECTS = ("the sea", "a clock", "winter", "bread", "a bridge", "the moon", "glass", "a letter")


def make(model: str, count: int, prefix: str, storm_rows: int) -> list[Line]:
    """Rows unlike one another. The dummy answers with its prompt, a token a step.

    A storm of few rows has long ones: its faults wait for rows to end, and have to come before the last does.
    """
    draw = random.Random(prefix)
    longest = 200 if storm_rows >= MANY else 3000
    make_one = _echoed if model == DUMMY else _sampled
    return [{"custom_id": f"{prefix}{index}", **make_one(index, draw, longest)} for index in range(count)]


def _echoed(index: int, draw: random.Random, longest: int) -> Line:
    prompt = f"<{index}>" + "x" * draw.randint(longest // 10, longest)
    return {"prompt": prompt, "max_tokens": 4000, "temperature": 0}


def _sampled(index: int, draw: random.Random, _longest: int) -> Line:
    greedy = index % 4 == 0
    return {
        "prompt": f"{index}. A sentence about {draw.choice(SUBJECTS)}:",
        "max_tokens": draw.randint(6, 24),
        "temperature": 0 if greedy else draw.choice((0.7, 1.0, 1.3)),
        **({} if greedy else {"top_p": draw.choice((0.8, 0.95, 1.0)), "top_k": draw.choice((0, 20, 200))}),
    }


def told(line: Line) -> Any:
    """The error's code, or all of the answer but its time."""
    if code := error_code(line):
        return code
    return {key: value for key, value in line["response"]["body"].items() if key != "created"}


def name(model: str) -> str:
    return model if model == DUMMY else Path(model).name
