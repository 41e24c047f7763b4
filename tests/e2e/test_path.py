"""The straight path with the real model: file in, one right result per row out, whatever the live batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import by_id, error_code, lines, producer, text, worker, write

pytestmark = [pytest.mark.redis, pytest.mark.model, pytest.mark.timeout(300)]

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "1, 2, 3, 4,",
    "A B C D",
    "Water is",
    "In the morning",
]


def mixed_rows() -> list[dict[str, Any]]:
    """32 rows, no two alike: greedy and sampled, chat and plain, short and long prompts and outputs."""
    rng = random.Random(5)
    rows = []
    for index in range(32):
        row: dict[str, Any] = {
            "custom_id": f"r{index}",
            "seed": index,
            "max_tokens": rng.choice([1, 3, 8, 13]),
        }
        prompt = rng.choice(PROMPTS) * rng.choice([1, 1, 2, 15])
        row |= {"messages": [{"role": "user", "content": prompt}]} if index % 4 == 0 else {"prompt": prompt}
        if index % 3 == 0:
            row["temperature"] = 0
        else:
            row["temperature"] = rng.choice([0.5, 0.8, 1.2])
            row |= rng.choice([{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9}])
        rows.append(row)
    return rows


def bodies(path: Path) -> dict[str, Any]:
    """What must not depend on the run: choices, usage and seed of every row."""
    return {
        name: {key: line["response"]["body"][key] for key in ("choices", "usage", "seed")}
        for name, line in by_id(path).items()
    }


def run_batch(url: str, model: Path, rows: list[dict[str, Any]], folder: Path, live: int) -> dict[str, Any]:
    source, out = write(folder / "in.jsonl", rows), folder / "out.jsonl"
    out.unlink(missing_ok=True)
    with worker(url, model, "--burst", "--max-batch", str(live)) as process:
        assert producer(url, "submit", source, "--wait", "-o", out, timeout=200).returncode == 0
        assert process.wait(timeout=60) == 0
    return bodies(out)


def test_batched_equals_isolated_through_redis(redis_url: str, model_folder: Path, tmp_path: Path) -> None:
    """worker/test_master.py covers the engine at every live batch and order; this one the whole path."""
    rows = mixed_rows()
    alone = run_batch(redis_url, model_folder, rows, tmp_path, live=1)
    assert len(alone) == 32
    assert len({str(body["choices"]) for body in alone.values()}) > 24, "rows should differ"
    for order, live in ((rows, 4), (random.Random(9).sample(rows, len(rows)), 16)):
        assert run_batch(redis_url, model_folder, order, tmp_path, live) == alone


def test_reading_cases(redis_url: str, model_folder: Path, tmp_path: Path) -> None:
    """Byte-order marks, line ends, odd separators, broken JSON, bad rows: one result per row not blank."""
    source = Path(__file__).parent.parent / "data" / "reading.jsonl"
    out = tmp_path / "out.jsonl"
    with worker(redis_url, model_folder, "--max-batch", "8"):
        assert producer(redis_url, "submit", source, "--wait", "-o", out).returncode == 1
    found = lines(out)
    rows = [line for line in source.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]
    assert len(found) == len(rows)
    succeeded = [line["custom_id"] for line in found if error_code(line) is None]
    assert len([name for name in succeeded if name == "dup"]) == 1
    assert {"bom", "crlf", "u2028", "dup", "7", "last"} <= set(succeeded)
    assert any(name.startswith("line-") for name in succeeded), (
        "the row without an id is named after its line"
    )
    refused = {line["custom_id"] for line in found if error_code(line)}
    assert {"strbody", "nourl", "get", "dup", "both"} <= refused
    for line in found:
        if error_code(line):
            assert "line " in line["response"]["body"]["error"]["message"], line


def test_real_answers(redis_url: str, model_folder: Path, tmp_path: Path) -> None:
    """What the weights say, by another graph and another driver of the same file: the model is really run."""
    rows = [
        {"custom_id": "chat", "messages": [{"role": "user", "content": "What is the capital of France?"}]},
        {"custom_id": "sum", "messages": [{"role": "user", "content": "What is 12+30?"}]},  # it is that small
        {"custom_id": "primes", "messages": [{"role": "user", "content": "List three prime numbers."}]},
    ]
    source = write(tmp_path / "in.jsonl", [{**row, "temperature": 0, "max_tokens": 24} for row in rows])
    out = tmp_path / "out.jsonl"
    with worker(redis_url, model_folder):
        assert producer(redis_url, "submit", source, "--wait", "-o", out).returncode == 0
    found = by_id(out)
    assert text(found["chat"]) == "The capital of France is Paris."
    assert text(found["sum"]) == "12 + 30 = 32."
    assert text(found["primes"]).startswith("1. 1\n2. 2\n\nThese are the only prime numbers")
    usage = found["chat"]["response"]["body"]["usage"]
    assert usage == {"prompt_tokens": 37, "completion_tokens": 8, "total_tokens": 45}
