"""A connection to a Redis that will not lose work: reached, checked, and never named with its password.

Owns connecting, the wording of connection errors, and what a server must be set to. Must not know keys.
redis-py is imported inside: it takes longer to import than the rest of the command line together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from producer.errors import StoreError, UsageError

if TYPE_CHECKING:
    from redis import Redis

DEFAULT_URL = "redis://127.0.0.1:6379"
CONNECT_SECONDS = 5.0
NOT_DURABLE = (
    "this Redis keeps no append-only file: if it dies, accepted rows are lost. "
    "Turn it on: redis-cli CONFIG SET appendonly yes"
)
START_ONE = (
    "Start one (redis-server --appendonly yes, or python -m producer.embedded --directory out/redis) "
    "or give its URL with --redis or REDIS_URL"
)
NAME_SIGNER = "Name the file of who signed it in the URL: rediss://...?ssl_ca_certs=FILE"
UNPRINTABLE = "the given Redis URL"  # shown for one of which any part may be the password's
MEMORY_FULL = 0.85  # of maxmemory; beyond it a producer holds, so that workers can still drain


def default_url() -> str:
    return os.environ.get("REDIS_URL") or DEFAULT_URL


def redact(url: str) -> str:
    """The URL as it may be printed: no password, no query."""
    if "://" not in url:  # urlsplit would take localhost:6379 for a scheme
        _, at, host = url.rpartition("@")
        return UNPRINTABLE if "?" in url or "#" in url else f"***@{host}" if at else host
    try:
        parts = urlsplit(url)
        secret = parts.password is not None
    except ValueError:
        return UNPRINTABLE
    if "@" in url and "@" not in parts.netloc:  # cut at a # or / of a password
        return UNPRINTABLE
    host = parts.netloc.rpartition("@")[2]
    who = f"{parts.username or ''}:***@" if secret else f"{parts.username}@" if parts.username else ""
    return f"{parts.scheme}://{who}{host}{parts.path}"


def connect(url: str, on_outage: Callable[[], None] = lambda: None) -> Redis:
    """A connection that waits out half a minute of silence, and any time of loading.

    The first contact fails at once. ``on_outage`` is called again and again while it waits.
    Raises UsageError for a malformed URL, StoreError when nothing answers there.
    """
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    from producer.patience import Patience

    settings: dict[str, Any] = {"socket_connect_timeout": CONNECT_SECONDS}
    try:
        probe = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **settings)
    except ValueError:
        raise UsageError(not_a_url(url)) from None
    with probe, explained(url):
        probe.ping()
    return redis.Redis.from_url(url, retry=Patience(on_outage), **settings)


def not_a_url(url: str) -> str:
    """What to say of a URL that redis-py does not take; its own words may hold parts of a password."""
    shown = redact(url)
    if "://" in url or shown == UNPRINTABLE:
        return f"{shown} is not a Redis URL (redis://USER:PASSWORD@HOST:PORT/DB, special characters as %XX)"
    meant = f"unix://{shown}" if shown.startswith("/") else f"redis://{shown}"
    return f"{shown} is not a Redis URL: did you mean {meant}?"


@contextmanager
def explained(url: str) -> Iterator[None]:
    """Turn redis-py's errors into one StoreError each that says what to do."""
    import redis

    try:
        yield
    except redis.exceptions.RedisError as error:
        raise StoreError(_explain(error, redact(url))) from error


def _explain(error: Exception, url: str) -> str:
    from redis import exceptions

    if isinstance(error, exceptions.BusyLoadingError):
        return f"Redis at {url} is still loading its data: try again in a moment"
    if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError):
        why = str(error).rstrip(".")
        return f"Redis at {url} refused the login: {why}. Check user and password in --redis or REDIS_URL"
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError):
        why = str(error).rstrip(".")
        advice = NAME_SIGNER if "CERTIFICATE_VERIFY_FAILED" in why else START_ONE
        return f"cannot reach Redis at {url}: {why}. {advice}"
    if isinstance(error, exceptions.OutOfMemoryError):
        return f"Redis at {url} is full: give it more maxmemory, or collect results with --release"
    return f"Redis at {url} refused a command: {error}"


def check_server(connection: Redis) -> list[str]:
    """What is wrong with the server's settings but bearable, one sentence each.

    Raises StoreError for settings under which accepted rows vanish or RQ cannot work.
    """
    info: dict[str, Any] = connection.info()
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        raise StoreError(
            f"Redis evicts keys when it is full ({policy}): {_evicted(policy)} would vanish without a trace. "
            "Set it to refuse writes instead: redis-cli CONFIG SET maxmemory-policy noeviction"
        )
    if info.get("cluster_enabled"):
        raise StoreError("this is a Redis Cluster, where RQ's transactions cannot run: use a single Redis")
    if not info.get("aof_enabled"):
        return [NOT_DURABLE]
    return []


def _evicted(policy: str) -> str:
    """What such a Redis drops: any key, or those with a TTL, which rows get when they end."""
    return "results that nobody has read yet" if policy.startswith("volatile") else "rows"


def memory_used(connection: Redis) -> float:
    """Used share of maxmemory, or where there is none of the machine's memory: 0 to about 1."""
    info: dict[str, Any] = connection.info("memory")
    limit = int(info.get("maxmemory") or info.get("total_system_memory") or 0)
    return int(info["used_memory"]) / limit if limit else 0.0
