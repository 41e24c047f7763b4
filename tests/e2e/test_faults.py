"""Real processes: outages longer than a lease, full disks, poison, cancels, expiry, resumed submissions."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from e2e.harness import Line, by_id, environment, error_code, producer, running, text, write
from e2e.quick_worker import BELL, DEADLY, LEASE_SECONDS
from producer.client import Client
from producer.embedded import EmbeddedRedis
from producer.store import Store
from waiting import wait_until
from worker.intake import GUILTY_LOSSES
from worker.scripts import SUSPECT_LOSSES

pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]


def rows(count: int, size: int = 400) -> list[Line]:
    """Rows whose answers are their prompts."""
    prompts = (f"<{index}>" + "x" * (size + index % 7) for index in range(count))
    return [
        {"custom_id": f"r{index}", "prompt": prompt, "max_tokens": 4000, "temperature": 0}
        for index, prompt in enumerate(prompts)
    ]


@contextmanager
def quick_worker(url: str, max_batch: int = 8) -> Iterator[subprocess.Popen[str]]:
    root = Path(__file__).resolve().parents[2]
    env = {**environment(), "PYTHONPATH": f"{root}:{root / 'tests'}"}
    with running([sys.executable, "-m", "e2e.quick_worker", url, str(max_batch)], env) as process:
        yield process


def answers(path: Path) -> dict[str, str]:
    return {name: error_code(line) or text(line) for name, line in by_id(path).items()}


def prompts(lines: list[Line]) -> dict[str, str]:
    return {line["custom_id"]: line["prompt"] for line in lines}


def ended(connection: redis.Redis) -> int:
    return Store(connection).status("b").ended


def test_redis_away_for_many_leases_while_rows_end(tmp_path: Path) -> None:
    """Two workers end rows meanwhile, and each thinks the other dead when Redis is back."""
    given, out = rows(30), tmp_path / "out.jsonl"
    with EmbeddedRedis(tmp_path / "redis") as server, redis.Redis.from_url(server.url) as connection:
        producer(server.url, "submit", write(tmp_path / "in.jsonl", given), "--batch-id", "b")
        with quick_worker(server.url) as one, quick_worker(server.url) as other:
            wait_until(lambda: len(Store(connection).workers()) == 2 and ended(connection) >= 4)
            server.kill()
            time.sleep(3 * LEASE_SECONDS)
            server.start()
            assert producer(server.url, "results", "b", "--follow", "-o", out).returncode == 0
            assert one.poll() is other.poll() is None
        assert answers(out) == prompts(given)
        assert not connection.keys("rq:execution*")
        assert {connection.xlen(key) for key in connection.keys("rq:results:*")} == {1}


def test_a_row_that_kills_its_engine_every_time_fails_alone(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    """And is the only one that --retry-failed queues again."""
    given, out = rows(6, size=40), tmp_path / "out.jsonl"
    given[3]["prompt"] = f"toll {BELL}"
    path = write(tmp_path / "in.jsonl", given)
    with quick_worker(redis_url, max_batch=1):
        run = producer(redis_url, "submit", path, "--batch-id", "b", "--wait", "-o", out)
        assert run.returncode == 1
        assert answers(out) == {**prompts(given), "r3": "worker_lost"}
        assert by_id(out)["r3"]["response"] is None
        deaths = int(connection.hget("rq:job:b-0-4", "livebatch_deaths") or 0)
        assert 2 <= deaths <= 5
    again = producer(redis_url, "submit", "--retry-failed", "b", "--batch-id", "c")
    assert "queued 1 rows on livebatch" in again.stderr
    assert connection.lrange("rq:queue:livebatch", 0, -1) == [b"c-0-4"]


def test_a_row_that_kills_its_whole_worker_every_time_fails_alone(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    """Somebody starts a worker again whenever one has died, as Kubernetes does where memory ran out."""
    given, out = rows(21, size=40), tmp_path / "out.jsonl"
    given[10]["prompt"] = f"poison {DEADLY}"
    producer(redis_url, "submit", write(tmp_path / "in.jsonl", given), "--batch-id", "b")
    died = 0
    while ended(connection) < len(given):
        with quick_worker(redis_url) as process:
            wait_until(lambda process=process: ended(connection) == len(given) or process.poll() is not None)
            died += process.poll() == -signal.SIGKILL
    assert died == GUILTY_LOSSES
    assert producer(redis_url, "results", "b", "-o", out).returncode == 1
    assert answers(out) == {**prompts(given), "r10": "worker_lost"}
    assert by_id(out)["r10"]["error"]["message"].startswith("6 workers vanished while they had this row")


def test_rows_whose_workers_are_killed_again_and_again_come_to_their_end(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    given, out = rows(4, size=2000), tmp_path / "out.jsonl"
    producer(redis_url, "submit", write(tmp_path / "in.jsonl", given), "--batch-id", "b")

    def told(field: str) -> list[bytes | None]:
        return [connection.hget(f"rq:job:b-0-{line}", field) for line in range(1, 5)]

    for _ in range(GUILTY_LOSSES - 1):
        before = told("started_at")
        with quick_worker(redis_url) as process:
            wait_until(lambda before=before: told("started_at") != before)
            process.kill()
    with quick_worker(redis_url):
        assert producer(redis_url, "results", "b", "--follow", "-o", out).returncode == 0
    assert answers(out) == prompts(given)
    assert max(int(losses or 0) for losses in told("livebatch_losses")) > SUSPECT_LOSSES


def test_a_cancelled_batch_leaves_the_live_batch_within_a_second_and_an_expired_one_in_time(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    path, out = write(tmp_path / "in.jsonl", rows(40, size=4000)), tmp_path / "out.jsonl"
    producer(redis_url, "submit", path, "--batch-id", "b")
    with quick_worker(redis_url):
        wait_until(lambda: connection.zcard("rq:wip:livebatch") == 16)  # the live ones, and as many ready
        begun = time.monotonic()
        Client(redis_url).cancel("b")
        wait_until(lambda: not connection.exists("rq:wip:livebatch"), seconds=10)
        seconds = time.monotonic() - begun
        print(f"the last row was out after {seconds:.2f} s")
        assert seconds < 1.0
        status = Store(connection).status("b")
        assert (status.ended, status.completed + status.cancelled) == (40, 40)
        assert status.cancelled >= 32
        flags = ["--batch-id", "c", "--expires-in", str(1 / 3600), "--wait", "-o", out]
        assert producer(redis_url, "submit", path, *flags).returncode == 1
        assert not connection.exists("rq:wip:livebatch")
    expired = [name for name, said in answers(out).items() if said == "batch_expired"]
    assert len(expired) >= 24


def test_a_full_disk_of_the_producer(redis_url: str, tmp_path: Path) -> None:
    given, out = rows(30), tmp_path / "out.jsonl"
    producer(redis_url, "submit", write(tmp_path / "in.jsonl", given), "--batch-id", "b")
    command = [sys.executable, "-m", "producer.cli", "results", "b", "--follow", "-o", str(out)]
    with quick_worker(redis_url):
        for size in (4_000, 10_000):
            full = subprocess.run(
                command,
                env={**environment(), "REDIS_URL": redis_url},
                preexec_fn=lambda size=size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert full.returncode == 2
            assert "cannot be written: File too large. Nothing is lost" in full.stderr
            assert "Traceback" not in full.stderr
        assert producer(redis_url, "results", "b", "--follow", "-o", out).returncode == 0
    assert answers(out) == prompts(given)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[], Any]]]:
    """A file system of 300 KB, and what makes it larger."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    grow = ["mount", "-o", "remount,size=64m", str(folder)]
    try:
        yield folder, lambda: subprocess.run(grow, check=True)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_of_redis(small_disk: tuple[Path, Callable[[], Any]], tmp_path: Path) -> None:
    """It refuses to write until there is room; results wait in the worker."""
    folder, grow = small_disk
    given, out = rows(80, size=500), tmp_path / "out.jsonl"
    with EmbeddedRedis(folder) as server, redis.Redis.from_url(server.url) as connection:
        assert (
            producer(server.url, "submit", write(tmp_path / "in.jsonl", given), "--batch-id", "b").returncode
            == 0
        )
        with quick_worker(server.url) as process:
            wait_until(lambda: connection.info("persistence")["aof_last_write_status"] == "err")
            before = ended(connection)
            assert before < len(given), "the disk was too large to show anything"
            grow()
            assert producer(server.url, "results", "b", "--follow", "-o", out).returncode == 0
            assert process.poll() is None
        assert answers(out) == prompts(given)


def test_a_submission_killed_and_gone_on_with(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    """Killed while it waits for room in the queue, of which it was given little."""
    given, out = rows(60, size=100), tmp_path / "out.jsonl"
    path = write(tmp_path / "in.jsonl", given)
    command = [sys.executable, "-m", "producer.cli", "submit", str(path), "--batch-id", "b"]
    env = {**environment(), "REDIS_URL": redis_url}
    first = subprocess.Popen([*command, "--max-queued-bytes", "4K"], env=env, stderr=subprocess.DEVNULL)
    wait_until(
        lambda: connection.exists("livebatch:batch:b:counts") and Store(connection).status("b").rows > 0
    )
    first.kill()
    first.wait()
    queued = connection.llen("rq:queue:livebatch")
    assert 0 < queued < len(given)
    path.write_text(path.read_text() + "\n")
    changed = producer(redis_url, "submit", path, "--batch-id", "b")
    assert (changed.returncode, connection.llen("rq:queue:livebatch")) == (2, queued)
    write(path, given)
    resumed = producer(redis_url, "submit", path, "--batch-id", "b")
    assert f"queued {len(given) - queued} rows on livebatch, {queued} were there already" in resumed.stderr
    with quick_worker(redis_url):
        assert producer(redis_url, "results", "b", "--follow", "-o", out).returncode == 0
    assert answers(out) == prompts(given)
