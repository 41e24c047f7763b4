"""Shared by all tests: a private Redis, flushed for each that asks; a skip for those that need a GPU."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from producer.embedded import EmbeddedRedis

ROOT = Path(__file__).resolve().parent.parent

# A shell's background job ignores Ctrl-C, and so would every program started from here.
signal.signal(signal.SIGINT, signal.default_int_handler)


def gpu_is_there() -> bool:
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount()) > 0
    except Exception:  # no CuPy, no driver, no device: each has its own exception
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not gpu_is_there():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and CuPy"))


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """One server for the session: loopback, free port, private directory. Never the REDIS_URL of a user."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    """URL of an empty Redis."""
    with redis.Redis.from_url(redis_server.url) as connection:
        connection.flushall()
    return redis_server.url


@pytest.fixture
def connection(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as connection:
        yield connection


@pytest.fixture
def slow_redis(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server that loads 50,000 keys when it starts again, for 2 seconds and more."""
    with EmbeddedRedis(tmp_path / "slow", extra=("--key-load-delay", "1")) as server:
        with redis.Redis.from_url(server.url) as connection, connection.pipeline() as pipe:
            for number in range(50_000):  # each takes 60 us or more; it answers after a thousand
                pipe.set(f"key-{number}", "x")
            pipe.execute()
        yield server


@pytest.fixture
def reload(slow_redis: EmbeddedRedis) -> Iterator[Callable[[], None]]:
    """Kills that server and starts it in the background; comes back while it loads its data."""
    starting = threading.Thread(target=slow_redis.start)

    def reload() -> None:
        slow_redis.kill()
        starting.start()
        with redis.Redis.from_url(slow_redis.url, retry=Retry(NoBackoff(), 0)) as probe:
            while starting.is_alive():
                try:
                    assert not probe.ping(), "it is up: nothing would be shown"
                except redis.BusyLoadingError:
                    return
                except redis.ConnectionError:
                    starting.join(0.01)

    yield reload
    if starting.ident:
        starting.join()


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The default model, built by `make model`. Missing: an error in CI, a skip elsewhere."""
    folder = ROOT / "models" / "smollm2-135m-fp32"
    if not (folder / "genai_config.json").exists():
        if os.environ.get("CI"):
            pytest.fail("the default model folder is missing: run `make model`")
        pytest.skip("run `make model` first")
    return folder
