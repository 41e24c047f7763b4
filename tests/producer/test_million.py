"""benchmarks/million.py finds what it is there to find: rows lost, doubled and mixed up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import million


def result(number: int, answer: str) -> str:
    body = {"choices": [{"text": answer}]}
    return json.dumps({"custom_id": f"row-{number}", "response": {"body": body}}) + "\n"


def test_rows_have_the_size_asked_for_and_begin_with_their_number(tmp_path: Path) -> None:
    million.write_rows(tmp_path / "in.jsonl", 20, 1000)
    rows = [json.loads(line) for line in (tmp_path / "in.jsonl").read_text().splitlines()]
    assert [len(row["prompt"]) for row in rows] == [1000] * 20
    assert [row["prompt"][:7] for row in rows] == [f"{number:07}" for number in range(20)]
    assert len({row["prompt"][8:] for row in rows}) == 20


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([(0, 0), (1, 1)], "1 rows lost, 0 doubled"),
        ([(0, 0), (1, 1), (2, 2), (1, 1)], "0 rows lost, 1 doubled"),
        ([(0, 0), (1, 2), (2, 1)], "row-1"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, found: list[tuple[int, int]], said: str) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("".join(result(number, f"{answer:07}") for number, answer in found))
    with pytest.raises(AssertionError, match=said):
        million.check_answers(out, 3)


def test_nothing_is_wrong(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("".join(result(number, f"{number:07}") for number in (2, 0, 1)))
    million.check_answers(out, 3)
