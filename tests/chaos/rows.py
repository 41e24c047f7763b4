"""The rows of a storm, and what of a result line has to be the same in every run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from e2e.harness import Line, error_code

DUMMY = "dummy"
SUBJECTS = ("the sea", "a clock", "winter", "bread", "a bridge", "the moon", "glass", "a letter")


def make(model: str, count: int, prefix: str) -> list[Line]:
    """Rows unlike one another. The dummy answers with its prompt, a token a step."""
    draw = random.Random(prefix)
    make_one = _echoed if model == DUMMY else _sampled
    return [{"custom_id": f"{prefix}{index}", **make_one(index, draw)} for index in range(count)]


def _echoed(index: int, draw: random.Random) -> Line:
    return {"prompt": f"<{index}>" + "x" * draw.randint(20, 200), "max_tokens": 4000, "temperature": 0}


def _sampled(index: int, draw: random.Random) -> Line:
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
