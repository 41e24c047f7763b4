"""Inputs that broke other batch tools (tests/data/README.md), through real processes and the real model."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Line, by_id, error_code, producer, text, worker, write
from worker.tokenizer import Tokenizer

pytestmark = [pytest.mark.redis, pytest.mark.model, pytest.mark.timeout(300)]

DATA = Path(__file__).parent.parent / "data"


def rows_of(name: str) -> list[Line]:
    data = (DATA / name).read_bytes()
    if name.endswith(".gz"):
        data = gzip.decompress(data)
    return [json.loads(line) for line in data.split(b"\n") if line.strip()]


def run_rows(url: str, rows: list[Line], folder: Path) -> dict[str, Line]:
    out = folder / "out.jsonl"
    out.unlink(missing_ok=True)
    producer(url, "submit", write(folder / "in.jsonl", rows), "--wait", "-o", out, timeout=200)
    return by_id(out)


def generated(line: Line) -> Any:
    """What a neighbour must not change."""
    body = line["response"]["body"]
    return body["choices"], body["usage"]


@pytest.fixture(scope="module")
def live_worker(redis_server: Any, model_folder: Path) -> Iterator[str]:
    with worker(redis_server.url, model_folder, "--max-batch", "16"):
        yield redis_server.url


def test_hostile_neighbours_change_nothing(live_worker: str, tmp_path: Path) -> None:
    rows = rows_of("neighbours.jsonl.gz")
    good = [row for row in rows if row["custom_id"] in ("g0", "g1", "g2", "g3")]
    together = run_rows(live_worker, rows, tmp_path)
    assert len(together) == len(rows)
    for row in good:
        alone = run_rows(live_worker, [row], tmp_path)
        name = row["custom_id"]
        assert generated(alone[name]) == generated(together[name])
    codes = {name: error_code(line) for name, line in together.items()}
    assert codes.pop("long") == "context_length_exceeded"
    assert codes.pop("stopid-oov") == "invalid_value"
    for name in ("ids-oov", "ids-neg", "empty", "nomsg"):
        assert codes.pop(name) == "invalid_request", name
    assert set(codes.values()) == {None}, "blank, zeros, tiny-T, k-huge and the good rows succeed"


def test_stops(live_worker: str, model_folder: Path, tmp_path: Path) -> None:
    found = run_rows(live_worker, rows_of("stops.jsonl"), tmp_path)
    usage = {name: line["response"]["body"].get("usage") for name, line in found.items()}
    assert "D E F" not in text(found["span"])
    assert usage["min-stop"]["completion_tokens"] >= 20
    assert usage["eos-ignored"]["completion_tokens"] == 64
    if usage["emoji"]["completion_tokens"] < 40:
        assert "\ufffd" not in text(found["emoji"])
    assert usage["bias-eos"]["completion_tokens"] == 5
    assert {error_code(found["n4"]), error_code(found["lp"])} == {"unsupported_parameter"}


def test_a_stop_string_across_tokens_leaves_no_piece(live_worker: str, tmp_path: Path) -> None:
    """The stop string is cut out of the row's own free text, from inside one token to inside another."""
    row = {"custom_id": "free", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 40}
    free = text(run_rows(live_worker, [row], tmp_path)["free"])
    stop = free[23:37]
    assert free.find(stop) == 23
    rows = [
        {**row, "custom_id": "cut", "stop": ["not there", stop]},
        {**row, "custom_id": "kept", "stop": stop, "include_stop_str_in_output": True},
    ]
    found = run_rows(live_worker, rows, tmp_path)
    assert text(found["cut"]) == free[:23]
    assert text(found["kept"]) == free[:37]
    for name in ("cut", "kept"):
        body = found[name]["response"]["body"]
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["stop_reason"] == stop
        assert 0 < body["usage"]["completion_tokens"] < 40


def test_special_tokens_in_user_text_stay_text(live_worker: str, model_folder: Path, tmp_path: Path) -> None:
    """`inject` must not become a system turn: its prompt has as many turns as any other."""
    row = next(row for row in rows_of("stops.jsonl") if row["custom_id"] == "inject")
    found = run_rows(live_worker, [row], tmp_path)
    tokenizer = Tokenizer.load(model_folder)
    ids = tokenizer.encode(row["messages"][0]["content"])
    assert not set(ids) & {0, 1, 2}, "no control token among them"
    assert found["inject"]["response"]["body"]["usage"]["prompt_tokens"] > len(ids)


def test_ids_the_model_does_not_have(live_worker: str, tmp_path: Path) -> None:
    rows = [row for row in rows_of("values.jsonl") if "999999" in str(row) or "10000000" in str(row)]
    assert len(rows) == 3
    found = run_rows(live_worker, rows, tmp_path)
    for line in found.values():
        assert error_code(line) == "invalid_value"
        assert line["response"]["body"]["error"]["param"] in line["custom_id"]


@pytest.fixture
def leaks_alone(redis_url: str, model_folder: Path, tmp_path: Path) -> dict[str, Any]:
    """Every row of leaks.jsonl in a batch of one."""
    with worker(redis_url, model_folder, "--max-batch", "1"):
        found = run_rows(redis_url, rows_of("leaks.jsonl"), tmp_path)
    return {name: generated(line) for name, line in found.items()}


def test_state_never_reaches_the_next_row(
    redis_url: str, model_folder: Path, tmp_path: Path, leaks_alone: dict[str, Any]
) -> None:
    """2, 4 and 16 live rows; file order, reversed and shuffled: every row equals its solo run."""
    rows = rows_of("leaks.jsonl")
    orders = {2: rows, 4: rows[::-1], 16: random.Random(1).sample(rows, len(rows))}
    for live, order in orders.items():
        with worker(redis_url, model_folder, "--max-batch", str(live)):
            found = run_rows(redis_url, order, tmp_path)
        assert {name: generated(line) for name, line in found.items()} == leaks_alone, live
    counts = {name: usage["completion_tokens"] for name, (_, usage) in leaks_alone.items()}
    assert counts["allowed"] == 60
    assert counts["short"] == 2
    assert all(counts[f"long-plain-{index}"] == 120 for index in range(4))
    tokenizer = Tokenizer.load(model_folder)
    allowed = leaks_alone["allowed"][0][0]["text"]
    assert not allowed.replace(tokenizer.decode([260]), "").replace(tokenizer.decode([28]), "")
