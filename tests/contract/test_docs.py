"""docs/requests.md and the code say the same: every field, name and code; and its examples are rows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from producer import fields, jsonl, wire
from producer.later import LATER

TEXT = (Path(__file__).parents[2] / "docs" / "requests.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]] for line in TEXT.splitlines() if line.startswith("| `")
]
ALIASES = {row[0].strip("`"): set(re.findall(r"`(\w+)`", row[1])) for row in ROWS if len(row) == 4}
CODES = {row[0].strip("`"): int(row[1]) if row[1] else None for row in ROWS if len(row) == 3}


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return [line for block in found for line in block.splitlines()]


@pytest.mark.parametrize("name", sorted(fields.BODY.keys() - LATER.keys()))
def test_every_field_has_its_line_and_aliases(name: str) -> None:
    assert ALIASES[name] == {alias for alias, field in fields.ALIASES.items() if field == name}


def test_custom_id_has_its_aliases() -> None:
    assert {"custom_id", *ALIASES["custom_id"]} == set(jsonl.ID_NAMES)


@pytest.mark.parametrize("name", sorted(LATER))
def test_every_later_field_is_named(name: str) -> None:
    assert re.search(rf"`{name}`", TEXT)


@pytest.mark.parametrize("name", sorted(fields.IGNORED))
def test_every_ignored_field_is_named(name: str) -> None:
    assert f"`{name}`" in TEXT


def test_the_codes_are_those_of_the_wire() -> None:
    assert CODES == wire.STATUS_CODES


@pytest.mark.parametrize("line", blocks("jsonl"), ids=range(len(blocks("jsonl"))))
def test_the_input_examples_are_rows(line: str) -> None:
    assert isinstance(jsonl.parse_line(line.encode(), jsonl.Place("b")), wire.Request)


def test_the_output_examples_have_the_shape_of_outputs() -> None:
    answer, refused, cancelled, flat, flat_refused = map(json.loads, blocks("json"))
    choice = wire.Choice(0, "Hello!", "stop", None)
    result = wire.Result(
        custom_id="a",
        job_id="b1-0-1",
        created=1764000000,
        endpoint="chat",
        model="smollm2-135m",
        choices=(choice,),
        usage=wire.Usage(31, 3),
        seed=5187912340023,
    )
    row = jsonl.parse_object({"custom_id": "b", "prompt": "x", "top_p": 7}, jsonl.Place("b1", line=2))
    assert isinstance(row, jsonl.BadRow)
    bad = row.result(created=1)
    gone = wire.Failure.of("batch_cancelled", "the batch was cancelled before this row ended")
    assert answer == jsonl.result_line(result)
    assert flat == jsonl.flat_line(result)
    assert refused == jsonl.result_line(bad)
    assert flat_refused == jsonl.flat_line(bad)
    assert cancelled == jsonl.result_line(
        wire.Result(custom_id="c", job_id="b1-0-3", created=1, failure=gone)
    )
