"""An outage is borne for a time, not for a number of attempts: some are over at once, some take seconds."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis
from tiny_worker import TinyWorker, rows, write

from producer import connection, enqueue, patience
from producer.batch import Progress
from producer.client import Client
from producer.embedded import EmbeddedRedis

pytestmark = pytest.mark.redis

SILENCE = 1.0
ANSWER = 0.2  # seconds that an attempt may take
SLACK = 2.0  # of a busy machine


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SILENCE_SECONDS", SILENCE)


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def gone(server: EmbeddedRedis, stack: ExitStack) -> None:
    server.kill()


def frozen(server: EmbeddedRedis, stack: ExitStack) -> None:
    os.kill(server.pid, signal.SIGSTOP)
    stack.callback(os.kill, server.pid, signal.SIGCONT)


def deaf(server: EmbeddedRedis, stack: ExitStack) -> None:
    """As a host that drops packets: who connects hears nothing."""
    server.kill()
    listener = stack.enter_context(socket.create_server(("127.0.0.1", server.port), backlog=0))
    listener.setblocking(False)
    stack.enter_context(socket.create_connection(listener.getsockname()))  # more have no room


@pytest.mark.parametrize("outage", [gone, frozen, deaf])
def test_silence_is_borne_for_its_time(
    server: EmbeddedRedis, outage: Callable[[EmbeddedRedis, ExitStack], None]
) -> None:
    told: list[float] = []
    url = f"{server.url}?socket_timeout={ANSWER}&socket_connect_timeout={ANSWER}"
    with connection.connect(url, lambda: told.append(time.monotonic())) as client, ExitStack() as stack:
        client.ping()
        outage(server, stack)
        began = time.monotonic()
        with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
            client.ping()
        over = time.monotonic()
        assert told[0] - began < 2 * ANSWER + SLACK
        assert SILENCE < over - told[0] < SILENCE + patience.LONGEST_SECONDS + ANSWER + SLACK
        told.clear()
        with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
            client.ping()
        assert time.monotonic() - told[0] > SILENCE, "another command has a patience of its own"


def test_a_connection_that_has_aged_is_nothing_to_tell_of(server: EmbeddedRedis) -> None:
    told: list[None] = []
    with connection.connect(server.url, lambda: told.append(None)) as client:
        for _ in range(3):
            server.kill()
            server.start()
            assert client.ping()
    assert told == []


def test_a_redis_that_loads_its_data_answers(slow_redis: EmbeddedRedis, reload: Callable[[], None]) -> None:
    """However long that takes."""
    told: list[None] = []
    with connection.connect(slow_redis.url, lambda: told.append(None)) as client:
        reload()
        began = time.monotonic()
        assert client.dbsize() == 50_000
        assert time.monotonic() - began > SILENCE, "else this shows nothing"
        assert told


def test_a_redis_that_loads_its_data_within_a_transaction(
    slow_redis: EmbeddedRedis, reload: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes WATCH and refuses what follows, which looks like another producer's change."""
    monkeypatch.setattr(enqueue, "CHUNK_ROWS", 2)
    told: list[None] = []
    watched: list[None] = []
    watch = redis.client.Pipeline.watch

    def count(pipe: redis.client.Pipeline, *names: str) -> object:
        watched.append(None)
        return watch(pipe, *names)

    def crash(progress: Progress) -> None:
        if progress.queued == 2:
            reload()
            monkeypatch.setattr(redis.client.Pipeline, "watch", count)

    client = Client(slow_redis.url, on_outage=lambda: told.append(None))
    client.submit([write(tmp_path / "m.jsonl", rows(5))], batch_id="m", on_progress=crash)
    assert told
    assert len(watched) < 6
    with redis.Redis.from_url(slow_redis.url) as direct:
        TinyWorker(direct).run()
    assert [result.custom_id for result in client.results("m", follow=True)] == [f"r{n}" for n in range(5)]
