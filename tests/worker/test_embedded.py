"""The embedded Redis: a real server, killed and started again over the same data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import redis

from producer import embedded
from producer.embedded import EmbeddedRedis
from producer.errors import StoreError


def config(connection: redis.Redis, name: str) -> str:
    return str(connection.config_get(name)[name])


def test_it_is_private_durable_and_never_evicts() -> None:
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url, decode_responses=True) as connection:
        assert config(connection, "bind") == "127.0.0.1"
        assert config(connection, "appendonly") == "yes"
        assert config(connection, "appendfsync") == "everysec"
        assert config(connection, "maxmemory-policy") == "noeviction"
        assert config(connection, "stream-node-max-bytes") == "1024"
        assert Path(config(connection, "dir")).resolve() == server.directory.resolve()


def test_acknowledged_writes_survive_a_kill(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        with redis.Redis.from_url(server.url) as connection:
            for number in range(100):
                connection.rpush("list", number)
        first = server.pid, server.url
        server.kill()
        with pytest.raises(StoreError, match="not running"):
            _ = server.pid
        server.start()
        assert server.url == first[1]
        assert server.pid != first[0]
        with redis.Redis.from_url(server.url) as connection:
            assert connection.llen("list") == 100


def test_stop_ends_the_process_and_removes_only_its_own_directory(tmp_path: Path) -> None:
    kept, own = EmbeddedRedis(tmp_path).start(), EmbeddedRedis().start()
    pids = kept.pid, own.pid
    for server in (kept, own):
        server.stop()
        server.stop()  # twice is harmless
    assert tmp_path.exists()
    assert not own.directory.exists()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_no_server_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.shutil, "which", lambda name: None)
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match="set REDIS_URL"):
        EmbeddedRedis().start()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path, extra=("--no-such-option", "1"))
    with pytest.raises(StoreError, match="did not start"):
        server.start()


def test_a_server_in_the_foreground(tmp_path: Path) -> None:
    """``python -m producer.embedded``: says its URL, keeps its data, goes on SIGTERM."""
    with EmbeddedRedis(tmp_path / "probe") as probe:
        port = probe.port
    command = [
        sys.executable,
        "-m",
        "producer.embedded",
        "--port",
        str(port),
        "--directory",
        str(tmp_path / "data"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    line = process.stdout.readline()
    assert line.startswith(f"redis://127.0.0.1:{port}/0")
    with redis.Redis(port=port) as connection:
        assert connection.ping()
    process.terminate()
    assert process.wait(20) == 0
    process.stdout.close()
    assert (tmp_path / "data").is_dir()
