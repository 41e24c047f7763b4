"""A client and a worker of a few lines, on the test's Redis."""

from __future__ import annotations

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
