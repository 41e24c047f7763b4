"""Delivery as a state machine on real Redis: producers and workers die, people meddle."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from rq import Queue
from rq.job import Job, JobStatus
from rq.registry import StartedJobRegistry
from tiny_worker import TinyWorker, rows, write

from producer import completions, enqueue
from producer.batch import Progress
from producer.client import Client
from producer.errors import UsageError
from producer.store import Serializer
from producer.wire import Request

pytestmark = pytest.mark.redis

NUM_ROWS = 23
LINES = [*rows(NUM_ROWS), "{bad", rows(1)[0]]  # one bad line, one custom_id used before


class Dead(Exception):
    """The producer was killed between two chunks."""


class Delivery(RuleBasedStateMachine):
    """Rules are what may happen; the invariant holds after each; ``teardown`` brings the batch to its end."""

    url: str

    @initialize()
    def start(self) -> None:
        self.connection = redis.Redis.from_url(self.url)
        self.connection.flushall()
        self.client, self.worker = Client(self.url), TinyWorker(self.connection)
        self.folder = tempfile.TemporaryDirectory()
        self.path = write(Path(self.folder.name) / "in.jsonl", LINES)
        self.live: list[Request] = []
        self.read: list[str] = []
        self.cursor: str | None = None
        self.submit(chunks=1)

    @rule(chunks=st.integers(1, 6))
    def submit(self, chunks: int) -> None:
        """Submit the same file again; the producer dies after so many chunks."""
        left = Counter({"chunks": chunks})

        def die(_: Progress) -> None:
            left["chunks"] -= 1
            if not left["chunks"]:
                raise Dead

        try:
            self.client.submit([self.path], batch_id="m", on_progress=die)
        except Dead:
            pass
        except UsageError:
            assert self.client.status("m").state == "cancelled"

    @rule(count=st.integers(1, 10))
    def claim(self, count: int) -> None:
        self.live += self.worker.claim(count)

    @rule(count=st.integers(1, 5), good=st.booleans())
    def end(self, count: int, good: bool) -> None:
        """End live rows whose jobs are still ours; a real worker's fence drops the others."""
        ended, self.live = self.live[:count], self.live[count:]
        ours = [row for row in ended if self.status_of(row.job_id) == JobStatus.STARTED]
        (self.worker.complete if good else self.worker.fail)(ours)

    @rule()
    def worker_dies(self) -> None:
        """Its leases run out, and RQ's own cleanup puts the rows back."""
        self.live.clear()
        registry = StartedJobRegistry("livebatch", connection=self.connection, serializer=Serializer)
        registry.cleanup(timestamp=2**40)

    @rule(index=st.integers(0, NUM_ROWS - 1), how=st.sampled_from(["delete", "fail", "cancel", "requeue"]))
    def meddle(self, index: int, how: str) -> None:
        """Somebody clicks in a dashboard."""
        if (status := self.status_of(f"m-0-{index + 1}")) is None:
            return
        job = Job.fetch(f"m-0-{index + 1}", self.connection, serializer=Serializer)
        if how == "delete":
            job.delete()
        elif how == "fail":
            job.set_status(JobStatus.FAILED)
        elif how == "cancel" and status != JobStatus.CANCELED:
            job.cancel()
        elif how == "requeue" and status not in (JobStatus.QUEUED, JobStatus.STARTED):
            self.worker.queue.enqueue_job(job)

    @rule()
    def empty_the_queue(self) -> None:
        Queue("livebatch", connection=self.connection).empty()

    @rule()
    def cancel(self) -> None:
        self.client.cancel("m")

    @rule()
    def read_some(self) -> None:
        for page in self.client.pages("m", cursor=self.cursor):
            self.read += [result.job_id for result in page.results]
            self.cursor = page.cursor

    @invariant()
    def counts_follow_the_log(self) -> None:
        log = [entry.job_id for entry in self.worker.store.read_log("m", "0", 10_000)]
        status = self.client.status("m")
        assert len(set(log)) == len(log) == status.ended <= status.rows <= len(LINES)
        assert self.read == log[: len(self.read)]

    def status_of(self, job_id: str) -> JobStatus | None:
        status = self.connection.hget(f"rq:job:{job_id}", "status")
        return JobStatus(status.decode()) if status else None

    def teardown(self) -> None:
        """Submit to the end, run what is queued, and follow: every row the batch accepted has one result."""
        self.submit(chunks=10**6)
        self.worker_dies()
        self.worker.run()
        for page in self.client.pages("m", follow=True, cursor=self.cursor):
            self.read += [result.job_id for result in page.results]
        status = self.client.status("m")
        assert status.is_over
        assert status.rows == len(LINES) or status.state == "cancelled"
        assert len(set(self.read)) == len(self.read) == status.rows
        ordered = [result.job_id for result in self.client.results("m", ordered=True)]
        assert ordered == [f"m-0-{line}" for line in range(1, status.rows + 1)]
        self.folder.cleanup()
        self.connection.close()


def test_each_row_ends_once(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "BLOCK_MS", 5)
    monkeypatch.setattr(enqueue, "CHUNK_ROWS", 5)
    monkeypatch.setattr(Delivery, "url", redis_url, raising=False)
    limits = settings(
        max_examples=12, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Delivery, settings=limits)
