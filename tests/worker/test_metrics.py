"""What Prometheus reads of a worker: over HTTP, from one on a real Redis, and with labels that stay few."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import redis
from rq_rows import enqueue, request
from service_fakes import worker

from producer.embedded import free_port
from producer.errors import UsageError
from producer.wire import STATUS_CODES, Failure, Result, Usage
from waiting import wait_until
from worker import settings
from worker.engine import Load
from worker.events import Outputs
from worker.leases import Claim, Lease
from worker.metrics import Measured, Metrics, Unmeasured, queued_at, serving
from worker.scripts import FIELDS

ROOT = Path(__file__).resolve().parents[2]
Values = dict[str, float]


def scrape(port: int) -> Values:
    """Series (name and labels) -> value, as Prometheus gets them."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    series = [line.rpartition(" ") for line in lines if line.startswith("livebatch")]
    return {name: float(value) for name, _, value in series}


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def metrics(port: int) -> Iterator[Metrics]:
    told = settings.read(model="dummy", redis_url="redis://nowhere", metrics_port=port)
    with serving(told) as measured:
        yield measured


def result(code: str | None = None, number: int = 1) -> Result:
    name = f"b-0-{number}"
    if code:
        return Result(custom_id=name, job_id=name, created=0, failure=Failure.of(code, "why"))
    return Result(custom_id=name, job_id=name, created=0, usage=Usage(10, 4))


def claim(enqueued_at: str = "", *, number: int = 1, is_started: bool = True) -> Claim:
    values = dict.fromkeys((name for name in FIELDS if name != "enqueued_at"), b"").values()
    return Claim(Lease("q", f"b-0-{number}", "e", 1000.0), is_started, *values, enqueued_at.encode())


def test_rows_count_by_result_and_only_answers_have_tokens(metrics: Metrics, port: int) -> None:
    for one in (result(), result(), result("timeout")):
        metrics.ended(one)
    seen = scrape(port)
    assert seen['livebatch_rows_total{result="completed"}'] == 2
    assert seen['livebatch_rows_total{result="timeout"}'] == 1
    assert seen['livebatch_tokens_total{kind="prompt"}'] == 20
    assert seen['livebatch_tokens_total{kind="completion"}'] == 8


def test_labels_never_grow(metrics: Metrics, port: int) -> None:
    before = set(scrape(port))
    for number in range(1000):
        metrics.ended(result(f"invented_{number}", number))
        metrics.took([claim(f"not a time {number}", number=number)])
        metrics.see(Outputs([], Load(number, number, 0, 0, 0, 0, 0)))
        metrics.engine_died()
    seen = scrape(port)
    assert set(seen) == before
    assert seen['livebatch_rows_total{result="other"}'] == 1000
    assert set(re.findall(r'result="(\w+)"', " ".join(before))) == {"completed", "other", *STATUS_CODES}


def test_the_wait_is_from_being_queued_to_being_taken(metrics: Metrics, port: int) -> None:
    metrics.took([claim("1970-01-01T00:16:38.000000Z"), claim("nonsense"), claim(is_started=False)])
    seen = scrape(port)
    assert seen["livebatch_queue_wait_seconds_sum"] == 2.0
    assert seen["livebatch_queue_wait_seconds_count"] == 1
    assert seen["livebatch_deliveries_total"] == 2


@pytest.mark.parametrize("text", [b"", b"\xff", b"99999-01-01T00:00:00Z", b"os.system"])
def test_a_hostile_moment_is_no_moment(text: bytes) -> None:
    assert queued_at(text) is None


def test_a_dead_engines_counters_stay_counted(metrics: Metrics, port: int) -> None:
    metrics.see(Outputs([], Load(3, 2, 60, 10, 200, 30, 1, blocks=100), 0.5))
    assert scrape(port)["livebatch_live_rows"] == 3
    metrics.engine_died()
    assert scrape(port)["livebatch_live_rows"] == 0
    metrics.see(Outputs([], Load(1, 0, 90, 5, 50, 5, 0, blocks=100), 0.25))
    seen = scrape(port)
    assert (seen["livebatch_step_seconds_count"], seen["livebatch_step_seconds_sum"]) == (15, 0.75)
    assert seen['livebatch_engine_tokens_total{kind="computed"}'] == 250
    assert seen['livebatch_engine_tokens_total{kind="sampled"}'] == 35
    assert (seen["livebatch_preemptions_total"], seen["livebatch_engine_restarts_total"]) == (1, 1)
    assert (seen["livebatch_kv_blocks"], seen["livebatch_kv_blocks_free"]) == (100, 90)


def test_without_a_port_nothing_listens_and_prometheus_is_not_imported() -> None:
    with serving(settings.read(model="dummy", redis_url="redis://nowhere")) as measured:
        assert isinstance(measured, Unmeasured)


def test_the_port_is_given_back(port: int) -> None:
    told = settings.read(model="dummy", redis_url="redis://nowhere", metrics_port=port)
    for _ in range(2):
        with serving(told) as measured:
            assert isinstance(measured, Measured)
            assert "livebatch_live_rows" in scrape(port)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = settings.read(model="dummy", redis_url="redis://nowhere", metrics_port=port)
        with pytest.raises(UsageError, match=f"--metrics-port {port}"), serving(told):
            pass


@pytest.mark.parametrize("port", [-1, 65536])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(UsageError, match="--metrics-port"):
        settings.read(model="dummy", redis_url="redis://nowhere", metrics_port=port)


@pytest.mark.redis
def test_a_worker_tells_what_it_does(
    redis_url: str, connection: redis.Redis, metrics: Metrics, port: int
) -> None:
    enqueue(connection, [request(number) for number in (1, 2, 3, 4)])
    enqueue(connection, [request(5, model="another")])
    with worker(redis_url, metrics=metrics) as made:
        wait_until(lambda: len(made.engine.rows) == 4)
        assert scrape(port)["livebatch_rows_held"] == 4
        assert scrape(port)["livebatch_deliveries_total"] == 5
        made.engine.end(made.engine.number("prompt 1"))
        wait_until(lambda: scrape(port)['livebatch_rows_total{result="completed"}'] == 1)
        assert scrape(port)['livebatch_rows_total{result="model_not_found"}'] == 1
        made.engine.die()
        wait_until(lambda: len(made.engine.rows) == 3)
        connection.delete("rq:job:b-0-2")
        wait_until(lambda: scrape(port)["livebatch_leases_lost_total"] == 1)
    seen = scrape(port)
    assert seen["livebatch_engine_restarts_total"] == 1
    assert seen["livebatch_queue_wait_seconds_count"] == 5
    assert 0 < seen["livebatch_queue_wait_seconds_sum"] < 60


def test_a_row_costs_microseconds(metrics: Metrics) -> None:
    """20 us would be 3 % of what a row costs the parent anyway; it takes about 5."""
    one, taken = result(), claim("2026-11-30T00:00:00.000000Z")
    costs = []
    for _ in range(20):
        begun = time.perf_counter()
        for _ in range(100):
            metrics.took([taken])
            metrics.ended(one)
        costs.append((time.perf_counter() - begun) / 100)
    print(f"{min(costs) * 1e6:.1f} us a row")
    assert min(costs) < 50e-6
