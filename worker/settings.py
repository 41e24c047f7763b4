"""What a worker was told: flags and LIVEBATCH_* environment, read once, checked, then frozen.

Owns the rules and their wording. Must not know Redis, models or terminals. Computed facts are never
written back.
"""

from __future__ import annotations

import re
import socket
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from producer.batch import DEFAULT_QUEUE
from producer.errors import UsageError
from producer.sizes import parse_bytes

SamplingDefaults = Literal["openai", "model"]
LogFormat = Literal["text", "json"]
Loop = Literal["plain", "overlapped"]
Choice = TypeVar("Choice", bound=str)
LOG_FORMATS: tuple[LogFormat, ...] = ("text", "json")
SAMPLING_DEFAULTS: tuple[SamplingDefaults, ...] = ("openai", "model")
LOOPS: tuple[Loop, ...] = ("plain", "overlapped")
MAX_BATCH = {"cpu": 32, "cuda": 256}  # unless told: on a GPU, as many rows as its attention takes

DUMMY = "dummy"


def unique_name() -> str:
    """A worker's name is never used twice: RQ takes the death of a namesake for the living one's."""
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())
    return f"{host}-{uuid.uuid4().hex[:12]}"


@dataclass(frozen=True, slots=True)
class QueueShare:
    """One queue and its weight: with rows in all queues, each gets its weight's share of the claims."""

    name: str
    weight: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What the engine's process needs to build its model. Plain values: they cross a process border."""

    model: str  # a model folder's path, or DUMMY
    device: str = "cpu"  # or cuda:N
    max_batch: int = 32
    threads: int | None = None  # None: what the machine has
    kv_bytes: int | None = None  # None: the model's own choice
    loop: Loop = "plain"
    deterministic: bool = False
    log_format: LogFormat = "text"

    @property
    def gpu(self) -> int | None:
        """The number of the GPU; None: the CPU."""
        kind, _, number = self.device.partition(":")
        return None if kind == "cpu" else int(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a worker was told. Build it with ``read``, which checks."""

    engine: EngineSettings
    redis_url: str = field(repr=False)  # it may hold a password
    queues: tuple[QueueShare, ...] = (QueueShare(DEFAULT_QUEUE),)
    burst: bool = False
    grace_seconds: float = 30.0
    engine_timeout_seconds: float = 600.0
    sampling_defaults: SamplingDefaults = "openai"
    max_tokens_default: int | None = None
    metrics_port: int | None = None  # None: no metrics; 0: any free port
    metrics_host: str = "127.0.0.1"
    name: str = field(default_factory=unique_name)
    lease_seconds: float = 10.0  # a row of a dead worker waits this long before it runs elsewhere
    beat_seconds: float = 3.0
    maintenance_seconds: float = 3.0

    @property
    def room(self) -> int:
        """Most rows in hand: the live batch, and as many again checked and tokenised ahead."""
        return 2 * self.engine.max_batch


def read(
    *,
    model: str,
    redis_url: str,
    queues: Sequence[str] = (),
    device: str = "cpu",
    max_batch: int | None = None,
    threads: int | None = None,
    kv_memory: str | None = None,
    burst: bool = False,
    grace: float = 30.0,
    engine_timeout: float = 600.0,
    sampling_defaults: str = "openai",
    max_tokens_default: int | None = None,
    metrics_port: int | None = None,
    metrics_host: str = "127.0.0.1",
    log_format: str = "text",
    loop: str | None = None,
    deterministic: bool = False,
) -> Settings:
    """Settings from values as a person typed them. Raises UsageError naming the flag and what it wants."""
    device = parse_device(device)
    kind = device.partition(":")[0]
    engine = EngineSettings(
        model=model,
        device=device,
        max_batch=_at_least(1, MAX_BATCH[kind] if max_batch is None else max_batch, "--max-batch"),
        threads=_count(threads, "--threads"),
        kv_bytes=None if kv_memory is None else parse_bytes(kv_memory, "--kv-memory"),
        log_format=_one_of(log_format, LOG_FORMATS, "--log-format"),
        loop=_one_of(loop or _default_loop(model, kind), LOOPS, "--loop"),
        deterministic=deterministic,
    )
    settings = Settings(
        engine=engine,
        redis_url=redis_url,
        queues=parse_queues(queues),
        burst=burst,
        grace_seconds=grace,
        engine_timeout_seconds=engine_timeout,
        sampling_defaults=_one_of(sampling_defaults, SAMPLING_DEFAULTS, "--sampling-defaults"),
        max_tokens_default=_count(max_tokens_default, "--max-tokens-default"),
        metrics_port=metrics_port,
        metrics_host=metrics_host,
    )
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    """What types do not say. Raises UsageError."""
    engine, port = settings.engine, settings.metrics_port
    if engine.loop == "overlapped" and (engine.gpu is None or engine.model == DUMMY):
        raise UsageError(
            "--loop overlapped wants a model on a GPU: the CPU, and so the dummy model, computes a step "
            "before it goes on"
        )
    if port is not None and not 0 <= port < 2**16:
        raise UsageError(f"--metrics-port is a port, 0 (any free one) to 65535, not {port}")
    if not 0 <= settings.grace_seconds < float("inf"):
        raise UsageError(f"--grace wants seconds, 0 or more, not {settings.grace_seconds}")
    if not settings.engine_timeout_seconds > 0:
        raise UsageError(
            f"--engine-timeout wants seconds, more than 0, not {settings.engine_timeout_seconds}"
        )


def _default_loop(model: str, kind: str) -> Loop:
    """The dummy model runs on the CPU, whatever the device."""
    return "plain" if kind == "cpu" or model == DUMMY else "overlapped"


def parse_device(text: str) -> str:
    """``cpu``, ``cuda`` (the first GPU) or ``cuda:N``."""
    match = re.fullmatch(r"cpu|cuda(:[0-9]{1,3})?", text)
    if not match:
        raise UsageError(f"--device is cpu, cuda or cuda:N, not {text!r}")
    return "cuda:0" if text == "cuda" else text


def parse_queues(given: Sequence[str]) -> tuple[QueueShare, ...]:
    """``NAME`` or ``NAME=WEIGHT``, once each; none given: the default queue."""
    shares = tuple(map(_parse_queue, given)) or (QueueShare(DEFAULT_QUEUE),)
    if len({share.name for share in shares}) < len(shares):
        raise UsageError("--queue names a queue twice")
    return shares


def _parse_queue(text: str) -> QueueShare:
    name, equals, weight = text.partition("=")
    if not name or not name.isprintable() or any(one.isspace() or one in ",{}" for one in name):
        raise UsageError(f"--queue wants NAME or NAME=WEIGHT, not {text!r}")
    if not equals:
        return QueueShare(name)
    if not weight.isascii() or not weight.isdigit() or not 1 <= int(weight) <= 1000:
        raise UsageError(f"--queue {name}: the weight is a whole number from 1 to 1000, not {weight!r}")
    return QueueShare(name, int(weight))


def _at_least(least: int, value: int, flag: str) -> int:
    if value < least:
        raise UsageError(f"{flag} must be at least {least}, not {value}")
    return value


def _count(value: int | None, flag: str) -> int | None:
    """At least 1, or nothing."""
    return None if value is None else _at_least(1, value, flag)


def _one_of(text: str, choices: tuple[Choice, ...], flag: str) -> Choice:
    for choice in choices:
        if text == choice:
            return choice
    raise UsageError(f"{flag} is {' or '.join(choices)}, not {text!r}")
