"""What Prometheus may ask of a worker, on one port: names, labels, buckets.

Every label has few values, fixed here: no batch, row, queue or worker is ever one. Must not know Redis, nor
what a row says. prometheus_client is imported only where a port was asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from producer.errors import UsageError
from producer.wire import STATUS_CODES, Result
from worker.events import Outputs
from worker.leases import Claim
from worker.settings import Settings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

log = logging.getLogger(__name__)

WAIT_SECONDS = (0.05, 0.25, 1.0, 5.0, 30.0, 120.0, 600.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
COMPLETED, OTHER = "completed", "other"
RESULTS = (COMPLETED, *STATUS_CODES, OTHER)


class Metrics(Protocol):
    """What the worker's loop tells. Each call is a few microseconds at most, and none can fail."""

    def watch(self, **levels: Callable[[], int]) -> None:
        """``levels``: asked at every scrape, from another thread; names of LEVELS."""

    def took(self, claims: Iterable[Claim]) -> None:
        """Jobs just claimed."""

    def ended(self, result: Result) -> None:
        """A row has its result."""

    def lost(self, num_rows: int) -> None:
        """Rows in hand turned out to be somebody else's."""

    def see(self, event: Outputs) -> None:
        """The engine's latest counters, which begin at zero when it starts again."""

    def engine_died(self) -> None:
        """The engine's process is gone and its counters with it; another one is being started."""


class Unmeasured:
    """Nobody asked: every call does nothing."""

    def watch(self, **levels: Callable[[], int]) -> None: ...
    def took(self, claims: Iterable[Claim]) -> None: ...
    def ended(self, result: Result) -> None: ...
    def lost(self, num_rows: int) -> None: ...
    def see(self, event: Outputs) -> None: ...
    def engine_died(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Counted:
    """An engine's counters since the worker started, or since that engine did."""

    steps: int = 0
    seconds: float = 0.0  # spent in steps
    computed: int = 0
    sampled: int = 0
    preemptions: int = 0
    deaths: int = 0

    def plus(self, event: Outputs | None) -> Counted:
        if event is None:
            return self
        load = event.load
        return Counted(
            self.steps + load.steps,
            self.seconds + event.step_seconds,
            self.computed + load.tokens_computed,
            self.sampled + load.tokens_sampled,
            self.preemptions + load.preemptions,
            self.deaths,
        )


class EngineMetrics:
    """A Prometheus collector: keeps the engine's last event, and reads it only when scraped."""

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        # Dead engines' counters and the living one's last word, replaced as one: scrapes are another thread.
        self._state: tuple[Counted, Outputs | None] = (Counted(), None)

    def see(self, event: Outputs) -> None:
        self._state = (self._state[0], event)

    def died(self) -> None:
        before, last = self._state
        total = before.plus(last)
        self._state = (replace(total, deaths=total.deaths + 1), None)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client at every scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        before, last = self._state
        total = before.plus(last)
        for name, text, level in (
            ("live_rows", "Rows in the live batch", last.load.live if last else 0),
            ("live_rows_max", "Most rows in the live batch (--max-batch)", self._max_batch),
            ("kv_blocks", "Blocks of the KV cache", last.load.blocks if last else 0),
            (
                "kv_blocks_free",
                "Blocks of the KV cache that no row holds",
                last.load.free_blocks if last else 0,
            ),
        ):
            yield GaugeMetricFamily(f"livebatch_{name}", text, value=level)
        yield SummaryMetricFamily("livebatch_step_seconds", "Steps of the engine", total.steps, total.seconds)
        tokens = CounterMetricFamily("livebatch_engine_tokens", "Tokens the engine ran", labels=["kind"])
        tokens.add_metric(["computed"], total.computed)
        tokens.add_metric(["sampled"], total.sampled)
        yield tokens
        yield CounterMetricFamily(
            "livebatch_preemptions", "Rows moved out of the live batch", total.preemptions
        )
        yield CounterMetricFamily("livebatch_engine_restarts", "Deaths of the engine's process", total.deaths)


LEVELS: Mapping[str, str] = {
    "rows_held": "Rows leased: live, waiting for the engine, and not looked at yet",
    "results_unwritten": "Results that Redis does not have yet",
}


class Measured:
    """Metrics in a registry of their own."""

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        from prometheus_client import Counter, Gauge, Histogram, ProcessCollector

        rows = Counter("livebatch_rows", "Rows that ended here, by error code", ["result"], registry=registry)
        self._rows = {result: rows.labels(result) for result in RESULTS}
        tokens = Counter("livebatch_tokens", "Tokens of completed rows", ["kind"], registry=registry)
        self._prompt_tokens, self._completion_tokens = tokens.labels("prompt"), tokens.labels("completion")
        self._deliveries = Counter(
            "livebatch_deliveries", "Rows taken from a queue, each time they are", registry=registry
        )
        self._lost = Counter(
            "livebatch_leases_lost", "Rows that were cancelled, deleted or taken over", registry=registry
        )
        self._wait = Histogram(
            "livebatch_queue_wait_seconds",
            "From being queued, for the first time or again, to being taken",
            buckets=WAIT_SECONDS,
            registry=registry,
        )
        self._levels = {
            name: Gauge(f"livebatch_{name}", text, registry=registry) for name, text in LEVELS.items()
        }
        info = Gauge("livebatch_worker_info", "Always 1", ["version", "model", "device"], registry=registry)
        engine = settings.engine
        info.labels(version("livebatch"), Path(engine.model).name, engine.device).set(1)
        self._engine = EngineMetrics(engine.max_batch)
        registry.register(self._engine)
        ProcessCollector(registry=registry)  # of the parent: memory, CPU, open files

    def watch(self, **levels: Callable[[], int]) -> None:
        for name, level in levels.items():
            self._levels[name].set_function(level)

    def took(self, claims: Iterable[Claim]) -> None:
        started = [claim for claim in claims if claim.is_started]
        for claim in started:
            if (since := queued_at(claim.enqueued_at)) is not None:
                self._wait.observe(max(0.0, claim.lease.started_at - since))
        self._deliveries.inc(len(started))

    def ended(self, result: Result) -> None:
        if result.failure is not None:
            self._rows.get(result.failure.code, self._rows[OTHER]).inc()
            return
        self._rows[COMPLETED].inc()
        if result.usage is not None:
            self._prompt_tokens.inc(result.usage.prompt_tokens)
            self._completion_tokens.inc(result.usage.completion_tokens)

    def lost(self, num_rows: int) -> None:
        self._lost.inc(num_rows)

    def see(self, event: Outputs) -> None:
        self._engine.see(event)

    def engine_died(self) -> None:
        self._engine.died()


def queued_at(text: bytes) -> float | None:
    """RQ's ``2026-11-30T12:00:00.123456Z`` as unix seconds; None for what is no time. Nothing is trusted."""
    try:
        return datetime.fromisoformat(text.decode()).timestamp()
    except (ValueError, OverflowError):
        return None


@contextmanager
def serving(settings: Settings) -> Iterator[Metrics]:
    """Metrics of one worker, answered on ``metrics_port`` of ``metrics_host`` as long as this lasts.

    Raises UsageError when the port cannot be had.
    """
    if settings.metrics_port is None:
        yield Unmeasured()
        return
    from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server

    disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series a counter, of no use here
    registry = CollectorRegistry()
    metrics = Measured(settings, registry)
    host, port = settings.metrics_host, settings.metrics_port
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(f"--metrics-port {port}: cannot listen on {host}: {error}") from None
    log.info("metrics are at http://%s:%d/metrics", host, server.server_port)
    try:
        yield metrics
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
