"""What a person sees when something is missing: one clear line, an exit code, no traceback, nothing lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from e2e.harness import environment, producer, worker, write

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

NOWHERE = "redis://127.0.0.1:1"
ROWS = [{"custom_id": "a", "prompt": "hello"}]


def worker_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "worker.cli", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), check=False)
    assert "Traceback" not in run.stderr, run.stderr
    return run


@pytest.mark.parametrize("command", ["status", "results b", "cancel b", "list"])
def test_producer_without_redis(command: str) -> None:
    run = producer(NOWHERE, *command.split())
    assert run.returncode == 3
    assert "127.0.0.1:1" in run.stderr


def test_submit_without_redis_queues_nothing_and_says_so(tmp_path: Path) -> None:
    run = producer(NOWHERE, "submit", write(tmp_path / "in.jsonl", ROWS))
    assert run.returncode == 3
    assert "127.0.0.1:1" in run.stderr


def test_worker_without_redis() -> None:
    run = worker_command("run", "--model", "dummy", "--redis", NOWHERE)
    assert run.returncode == 3
    assert "127.0.0.1:1" in run.stderr


def test_worker_without_model_folder(redis_url: str, tmp_path: Path) -> None:
    run = worker_command("run", "--model", str(tmp_path / "none"), "--redis", redis_url)
    assert run.returncode == 2
    assert "none" in run.stderr


def test_worker_with_broken_model_folder(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text("{")
    run = worker_command("run", "--model", str(tmp_path), "--redis", redis_url)
    assert run.returncode == 2
    assert "genai_config.json" in run.stderr


def test_missing_input_file(redis_url: str, tmp_path: Path) -> None:
    run = producer(redis_url, "submit", tmp_path / "none.jsonl")
    assert run.returncode == 2
    assert "none.jsonl" in run.stderr


def test_unwritable_output_is_found_before_anything_is_queued(redis_url: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", ROWS)
    run = producer(redis_url, "submit", source, "--wait", "-o", tmp_path / "none" / "out.jsonl")
    assert run.returncode == 2
    assert "out.jsonl" in run.stderr
    assert '"a"' not in producer(redis_url, "list", "--json").stdout
    assert producer(redis_url, "list", "--json").stdout.strip() in ("[]", "")


def test_all_rows_bad(redis_url: str, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{bad\n[1]\n")
    out = tmp_path / "out.jsonl"
    run = producer(redis_url, "submit", source, "--wait", "-o", out)
    assert run.returncode == 1
    assert len(out.read_text().splitlines()) == 2


def test_empty_file(redis_url: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [])
    run = producer(redis_url, "submit", source, "--wait", "-o", tmp_path / "out.jsonl")
    assert run.returncode == 0


def test_dummy_model_runs_the_whole_path(redis_url: str, tmp_path: Path) -> None:
    rows = [{"custom_id": f"r{index}", "prompt": f"row {index}", "max_tokens": 50} for index in range(200)]
    out = tmp_path / "out.jsonl"
    with worker(redis_url, "dummy"):
        assert (
            producer(redis_url, "submit", write(tmp_path / "in.jsonl", rows), "--wait", "-o", out).returncode
            == 0
        )
    assert len(out.read_text().splitlines()) == 200
