"""`python -m producer.embedded`, and what it does where the port is taken or the server dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from producer import embedded
from producer.embedded import EmbeddedRedis
from producer.errors import StoreError

pytestmark = pytest.mark.redis

ROOT = Path(embedded.__file__).parents[1]


def command(port: int, directory: Path) -> list[str]:
    flags = ["--port", str(port), "--directory", str(directory)]
    return [sys.executable, "-m", "producer.embedded", *flags]


def foreground(port: int, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(port, directory), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_a_port_that_another_server_holds_is_said_to_be_taken(
    redis_server: EmbeddedRedis, tmp_path: Path
) -> None:
    """The other one answers the PING."""
    found = subprocess.run(
        command(redis_server.port, tmp_path), capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr.startswith(f"error: port {redis_server.port} is taken by another program: ")


def test_a_port_that_was_taken_once_is_not_taken_for_ever(tmp_path: Path) -> None:
    """The log of an earlier start is not what this one says."""
    with EmbeddedRedis() as first:
        second = EmbeddedRedis(tmp_path, port=first.port)
        with pytest.raises(StoreError, match=f"port {first.port} is taken"):
            second.start()
    with second, redis.Redis.from_url(second.url) as connection:
        assert connection.ping()
    with pytest.raises(StoreError, match="did not start"):
        EmbeddedRedis(tmp_path, port=second.port, extra=("--no-such-option", "1")).start()


def test_a_free_port_that_somebody_takes_first_is_another_one(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = embedded.free_port()
    ports = iter([redis_server.port, free])
    monkeypatch.setattr(embedded, "free_port", lambda: next(ports))
    with EmbeddedRedis() as server:
        assert server.port == free
        server.kill()
        server.start()
        with redis.Redis.from_url(server.url) as connection:
            assert connection.info("server")["process_id"] == server.pid


def test_a_server_that_dies_is_not_waited_for(tmp_path: Path) -> None:
    process = foreground(0, tmp_path)
    assert process.stdout is not None
    found = re.match(r"redis://127\.0\.0\.1:(\d+)/0 ", process.stdout.readline())
    assert found is not None
    with redis.Redis(port=int(found[1])) as connection:
        os.kill(connection.info("server")["process_id"], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said.startswith("error: the embedded Redis ended by itself (killed by SIGKILL): ")
    assert f"Its data is in {tmp_path}: start it again there" in said


# A server that takes its time.


def test_a_server_that_loads_its_data_is_waited_for(
    slow_redis: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "START_SECONDS", 1.0)
    slow_redis.kill()
    began = time.monotonic()
    slow_redis.start()
    assert time.monotonic() - began > 2.0, "else this shows nothing"
    with redis.Redis.from_url(slow_redis.url) as connection:
        assert connection.dbsize() == 50_000


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A server that never answers; where it writes its process id."""
    binary, pids = tmp_path / "redis-server", tmp_path / "pids"
    binary.write_text(f"#!/bin/sh\necho $$ >>{pids}\nexec sleep 60\n")
    binary.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return pids


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_server_that_is_silent_is_killed_and_no_other_port_tried(
    silent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "START_SECONDS", 1.0)
    with pytest.raises(StoreError, match="did not start: it said nothing"):
        EmbeddedRedis().start()
    (pid,) = silent.read_text().split()
    assert is_gone(int(pid))


def test_who_will_not_wait_for_it_leaves_no_server_behind(silent: Path, tmp_path: Path) -> None:
    os.mkfifo(silent)  # whoever reads it waits for the server
    process = foreground(0, tmp_path / "data")
    pid = int(silent.read_text())
    process.terminate()
    assert process.communicate(timeout=20) == ("", "")
    assert (process.returncode, is_gone(pid)) == (0, True)
