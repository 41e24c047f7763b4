"""Real processes, real kills: whatever dies in mid batch, every row ends once, with its own answer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Queue
from rq.registry import FinishedJobRegistry, StartedJobRegistry

from e2e.harness import by_id, engine_of, producer, text, worker, write
from producer.embedded import EmbeddedRedis
from producer.store import Serializer, Store
from waiting import wait_until

pytestmark = [pytest.mark.redis, pytest.mark.timeout(180)]


def rows(count: int = 40, size: int = 500) -> list[dict[str, Any]]:
    """Rows whose answers are their prompts, each long enough to be caught alive."""
    return [
        {
            "custom_id": f"r{index}",
            "prompt": f"<{index}>" + "x" * (size + index % 7),
            "max_tokens": 4000,
            "temperature": 0,
        }
        for index in range(count)
    ]


def submit(url: str, folder: Path, lines: list[dict[str, Any]]) -> str:
    run = producer(url, "submit", write(folder / "in.jsonl", lines), "--batch-id", "b")
    assert run.returncode == 0
    return "b"


def collect(url: str, folder: Path, lines: list[dict[str, Any]]) -> None:
    """Every row has one result, its own."""
    out = folder / "out.jsonl"
    assert producer(url, "results", "b", "--follow", "-o", out).returncode == 0
    found = by_id(out)
    assert {line["custom_id"]: line["prompt"] for line in lines} == {
        name: text(line) for name, line in found.items()
    }
    with redis.Redis.from_url(url) as connection:
        status = Store(connection).status("b")
        assert (status.completed, status.failed, status.cancelled) == (len(lines), 0, 0)
        jobs = Queue("livebatch", connection=connection, serializer=Serializer)
        assert jobs.count == 0
        assert StartedJobRegistry(queue=jobs).get_job_count(cleanup=False) == 0
        assert FinishedJobRegistry(queue=jobs).get_job_count(cleanup=False) == len(lines)
        for job_id in FinishedJobRegistry(queue=jobs).get_job_ids():
            assert connection.xlen(f"rq:results:{job_id}") == 1


def completed(connection: redis.Redis) -> int:
    return Store(connection).status("b").completed


def test_the_engine_killed_in_mid_batch_its_heir_hung_while_it_is_built_and_another_later(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    lines = rows()
    submit(redis_url, tmp_path, lines)
    with worker(redis_url, "dummy", "--max-batch", "8", "--engine-timeout", "2") as process:
        for reached, number in ((5, signal.SIGKILL), (5, signal.SIGSTOP), (20, signal.SIGSTOP)):
            wait_until(lambda reached=reached: completed(connection) >= reached)
            struck = engine_of(process)
            assert struck is not None
            os.kill(struck, number)
            wait_until(lambda struck=struck: engine_of(process) not in (None, struck))
        assert completed(connection) < len(lines), "struck too late to show anything"
        collect(redis_url, tmp_path, lines)


def test_the_worker_killed_in_mid_batch(redis_url: str, connection: redis.Redis, tmp_path: Path) -> None:
    """The other worker runs the dead one's rows within 15 s: a lease of 10, and 3 between two looks."""
    lines = rows(80)
    submit(redis_url, tmp_path, lines)
    with (
        worker(redis_url, "dummy", "--max-batch", "4") as first,
        worker(redis_url, "dummy", "--max-batch", "8") as other,
    ):
        wait_until(lambda: len(held_by(connection, first)) >= 4 and len(held_by(connection, other)) >= 4)
        name = name_of(connection, first)
        first.kill()
        first.wait()
        killed, held = time.monotonic(), held_by(connection, first)
        wait_until(lambda: all(runs_elsewhere(connection, job_id, name) for job_id in held))
        seconds = time.monotonic() - killed
        print(f"all {len(held)} rows of the killed worker run elsewhere after {seconds:.1f} s")
        assert seconds < 15
        collect(redis_url, tmp_path, lines)


def held_by(connection: redis.Redis, process: subprocess.Popen[str]) -> list[str]:
    """Job ids of the rows a worker has."""
    runs = connection.smembers(f"rq:worker:{name_of(connection, process)}:executions")
    return [run.decode().split(":")[0] for run in runs]


def name_of(connection: redis.Redis, process: subprocess.Popen[str]) -> str:
    """Of a worker, as Redis knows it; empty as long as it does not."""
    reports = Store(connection).workers()
    return next((each.name for each in reports if each.fields["pid"] == str(process.pid)), "")


def runs_elsewhere(connection: redis.Redis, job_id: str, name: str) -> bool:
    status, runner = connection.hmget(f"rq:job:{job_id}", "status", "worker_name")
    return status == b"finished" or (status == b"started" and runner != name.encode())


def test_two_workers_one_frozen_past_its_lease_and_thawed(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    lines = rows()
    submit(redis_url, tmp_path, lines)
    with worker(redis_url, "dummy", "--max-batch", "4") as frozen:
        wait_until(lambda: completed(connection) >= 5)
        os.kill(frozen.pid, signal.SIGSTOP)
        try:
            with worker(redis_url, "dummy", "--max-batch", "4"):
                wait_until(lambda: completed(connection) == len(lines))
        finally:
            os.kill(frozen.pid, signal.SIGCONT)
        collect(redis_url, tmp_path, lines)


def test_redis_killed_and_restarted_while_rows_run(tmp_path: Path) -> None:
    lines = rows()
    with EmbeddedRedis(tmp_path / "redis") as server:
        submit(server.url, tmp_path, lines)
        with (
            redis.Redis.from_url(server.url) as connection,
            worker(server.url, "dummy", "--max-batch", "8") as process,
        ):
            wait_until(lambda: completed(connection) >= 5)
            server.kill()
            time.sleep(1.0)  # rows end meanwhile, and their results wait
            server.start()
            collect(server.url, tmp_path, lines)
            assert process.poll() is None


def test_sigterm_hands_rows_back_in_order(redis_url: str, connection: redis.Redis, tmp_path: Path) -> None:
    lines = rows(20, size=2000)
    submit(redis_url, tmp_path, lines)
    before = Queue("livebatch", connection=connection, serializer=Serializer).job_ids
    with worker(redis_url, "dummy", "--max-batch", "4", "--grace", "0.2") as process:
        wait_until(lambda: completed(connection) >= 4)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
    jobs = Queue("livebatch", connection=connection, serializer=Serializer)
    assert jobs.job_ids == [job_id for job_id in before if job_id in set(jobs.job_ids)]
    assert len(jobs.job_ids) + completed(connection) == len(lines)
    assert jobs.fetch_job(jobs.job_ids[0]).retries_left == 10**6
    assert connection.zcard("rq:wip:livebatch") == 0
    with worker(redis_url, "dummy", "--burst"):
        collect(redis_url, tmp_path, lines)


def test_a_second_signal_does_not_wait(redis_url: str, connection: redis.Redis, tmp_path: Path) -> None:
    submit(redis_url, tmp_path, rows(20, size=2000))
    with worker(redis_url, "dummy", "--max-batch", "4", "--grace", "1000") as process:
        wait_until(lambda: completed(connection) >= 1)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: connection.zcard("rq:wip:livebatch") > 0)
        process.send_signal(signal.SIGINT)  # Ctrl-C is the same wish
        assert process.wait(timeout=30) == 0
    jobs = Queue("livebatch", connection=connection, serializer=Serializer)
    assert len(jobs) + completed(connection) == 20


def test_rq_info_runs_throughout_and_shows_the_truth(
    redis_url: str, connection: redis.Redis, tmp_path: Path
) -> None:
    """RQ's own tool cleans registries as it reads them; it must neither lose nor double a row."""
    lines = rows(size=1500)  # longer than rq info takes to start
    submit(redis_url, tmp_path, lines)
    with worker(redis_url, "dummy", "--max-batch", "4"):
        wait_until(lambda: completed(connection) >= 1)
        wait_until(lambda: re.search(r"\S+ \(\S+ \S+ \d+\): busy livebatch", rq_info(redis_url)) is not None)
        shown = rq_info(redis_url)
        assert re.search(r"livebatch .* [1-8] executing", shown), shown
        assert "1 workers" in shown
        while completed(connection) < len(lines):
            rq_info(redis_url)
        collect(redis_url, tmp_path, lines)
        assert f"{len(lines)} finished, 0 failed" in rq_info(redis_url)


def rq_info(url: str) -> str:
    run = subprocess.run(
        [Path(sys.executable).with_name("rq"), "info", "--url", url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return re.sub(r"\x1b\[\d*m", "", run.stdout)
