"""A client and a worker of a few lines, on the test's Redis; standard input."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
import redis
from tiny_worker import TinyWorker

from producer.client import Client


@pytest.fixture
def client(redis_url: str) -> Client:
    return Client(redis_url)


@pytest.fixture
def worker(connection: redis.Redis) -> TinyWorker:
    return TinyWorker(connection)


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Gives these bytes as standard input, from its beginning."""
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
