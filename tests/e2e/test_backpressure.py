"""More rows than Redis has room for, with real processes: producers wait and say so, none is lost."""

from __future__ import annotations

import random
import string
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from e2e.harness import Line, by_id, environment, producer, text, worker, write
from producer.embedded import EmbeddedRedis
from waiting import wait_until

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]


def noise(count: int, size: int) -> list[Line]:
    """Rows that zlib makes little of; the dummy model's answer is the beginning of their prompt."""
    chance = random.Random(0)
    letters = string.ascii_letters + string.digits
    return [
        {
            "custom_id": f"r{number}",
            "prompt": f"{number:05}" + "".join(chance.choices(letters, k=size)),
            "max_tokens": 6,
            "temperature": 0,
        }
        for number in range(count)
    ]


def check(out: Path, rows: list[Line]) -> None:
    assert {name: text(line) for name, line in by_id(out).items()} == {
        row["custom_id"]: row["prompt"][:5] for row in rows
    }


def test_a_redis_at_its_limit_holds_producers_and_is_drained(tmp_path: Path) -> None:
    rows = noise(1_500, 2_000)  # 4.5 MB as they wait, more than there is room for
    given, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    with (
        EmbeddedRedis(tmp_path / "redis", extra=("--maxmemory", "5mb")) as server,
        redis.Redis.from_url(server.url) as connection,
        (tmp_path / "said").open("w+") as said,
    ):
        env = {**environment(), "REDIS_URL": server.url}
        words = ["-m", "producer.cli", "submit", str(given), "--batch-id", "b"]
        submit = subprocess.Popen([sys.executable, *words], stdout=said, stderr=said, env=env)
        try:
            wait_until(lambda: "Redis is nearly full: waiting for room" in (tmp_path / "said").read_text())
            assert 0 < connection.llen("rq:queue:livebatch") < len(rows)
            with worker(server.url, "dummy", "--max-batch", "32"):
                collected = producer(server.url, "results", "b", "--follow", "--release", "-o", out)
            assert (collected.returncode, submit.wait(30)) == (0, 0)
        finally:
            submit.kill()
            submit.wait()
        assert not list(connection.scan_iter("rq:job:*")) and not list(connection.scan_iter("rq:results:*"))
    check(out, rows)


def test_submit_wait_works_a_large_file_off_in_small_pieces(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    """Results are collected and released while rows are still being queued."""
    rows = noise(300, 3_000)
    given, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    words = ["--max-queued-bytes", "256K", "--wait", "--release", "-o", out]
    with worker(redis_url, "dummy", "--max-batch", "16"):
        run = producer(redis_url, "submit", given, "--batch-id", "b", *words)
    assert run.returncode == 0
    assert "--max-queued-bytes allows" in run.stderr
    assert not list(connection.scan_iter("rq:job:*")) and not list(connection.scan_iter("rq:results:*"))
    check(out, rows)
    again = producer(redis_url, "submit", given, "--batch-id", "b")
    assert "queued 0 rows" in again.stderr and "300 were there already" in again.stderr
