"""A worker in twenty lines: claims rows and ends them with RQ's own calls and Store's, as the real one does.

Also rows and readings that several tests share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from redis import Redis
from rq import Queue
from rq.executions import Execution
from rq.job import Job, JobStatus

from producer.batch import DEFAULT_QUEUE
from producer.scripts import LOG_ROWS
from producer.store import Serializer, Store, batch_key
from producer.wire import Choice, Failure, Request, Result, Usage

# As the worker's own script does it. ARGV: prompt tokens, completion tokens, when the rows were taken and
# when they completed, then (job id, outcome, result) for each row.
COMPLETE = (
    LOG_ROWS
    + """
local rows = {}
for i = 5, #ARGV do rows[i - 4] = ARGV[i] end
return log_rows(KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4], rows)
"""
)


class TinyWorker:
    """Holds any number of live rows; ends those it is told to."""

    def __init__(self, connection: Redis, queue: str = DEFAULT_QUEUE) -> None:
        self.connection = connection
        self.store = Store(connection)
        self.queue = Queue(queue, connection=connection, serializer=Serializer)

    def claim(self, most: int = 10**6, lease_seconds: int = 60) -> list[Request]:
        """Take rows from the head of the queue; those that are no longer queued are dropped."""
        ids = self.connection.lpop(self.queue.key, most) or []
        jobs = Job.fetch_many([name.decode() for name in ids], self.connection, serializer=Serializer)
        live = [job for job in jobs if job and job.get_status(refresh=False) == JobStatus.QUEUED]
        with self.connection.pipeline() as pipe:
            for job in live:
                Execution.create(job, lease_seconds, pipeline=pipe)
                job.prepare_for_execution("tiny", pipeline=pipe)
            pipe.execute()
        return [Request.decode(job.args[0]) for job in live]

    def complete(self, requests: Iterable[Request]) -> None:
        """Each row's answer is ``echo <custom_id>``: 3 prompt tokens, 2 completion tokens."""
        self._end([answer(request) for request in requests])

    def fail(self, requests: Iterable[Request], code: str = "model_not_found") -> None:
        self._end([failed(request, code) for request in requests])

    def run(self) -> int:
        """Claim and complete everything that is queued."""
        rows = self.claim()
        self.complete(rows)
        return len(rows)

    def _end(self, results: Sequence[Result]) -> None:
        with self.connection.pipeline() as pipe:
            for result in results:
                job = Job.fetch(result.job_id, self.connection, serializer=Serializer)
                if result.failure is None:
                    job._result = result.encode()
                    job._handle_success(job.result_ttl, pipeline=pipe)
                    job.cleanup(job.result_ttl, pipeline=pipe, remove_from_queue=False)
                else:
                    job.set_status(JobStatus.FAILED, pipeline=pipe)
                    job._handle_failure(result.failure.message, pipeline=pipe)
            for batch_id in {result.job_id.rsplit("-", 2)[0] for result in results}:
                self._log(pipe, batch_id, [r for r in results if r.job_id.startswith(f"{batch_id}-")])
            pipe.execute()

    def _log(self, pipe: Any, batch_id: str, results: Sequence[Result]) -> None:
        good = [result.job_id for result in results if result.failure is None]
        tokens = {"prompt_tokens": 3 * len(good), "completion_tokens": 2 * len(good)}
        log_completed(pipe, batch_id, good, **tokens)
        self.store.log_failed(pipe, batch_id, [result for result in results if result.failure])


def log_completed(
    pipe: Any,
    batch_id: str,
    job_ids: Sequence[str],
    *,
    prompt_tokens: int = 0,
    completion_tokens: int = 0,
    started_at: float | None = None,
) -> None:
    """These rows ended well; ``started_at``: when the first of them was taken, None: just now."""
    now = time.time()
    times = repr(now if started_at is None else started_at), repr(now)
    rows = [part for job_id in job_ids for part in (job_id, "completed", "")]
    pipe.eval(COMPLETE, 1, batch_key(batch_id), prompt_tokens, completion_tokens, *times, *rows)


def answer(request: Request) -> Result:
    return Result(
        custom_id=request.custom_id,
        job_id=request.job_id,
        created=int(time.time()),
        endpoint=request.endpoint,
        model="tiny",
        choices=(Choice(0, f"echo {request.custom_id}", "stop"),),
        usage=Usage(3, 2),
        seed=1,
    )


def failed(request: Request, code: str) -> Result:
    failure = Failure.of(code, f"{code} of {request.custom_id}")
    return Result(custom_id=request.custom_id, job_id=request.job_id, created=1, failure=failure)


def rows(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"custom_id": f"r{index}", "prompt": f"row {index}"} for index in range(start, start + count)]


def write(path: Path, lines: Iterable[Any]) -> str:
    """A JSONL file of these rows (strings go in as they stand); its name."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(text + "\n" for text in texts), encoding="utf-8")
    return str(path)


def ids(results: Iterable[Result]) -> list[str]:
    return [result.custom_id for result in results]


def codes(results: Iterable[Result]) -> dict[str, str | None]:
    """custom_id -> failure code; a row that comes twice is an error here."""
    found = [(result.custom_id, result.failure.code if result.failure else None) for result in results]
    assert len(dict(found)) == len(found), "a row has two results"
    return dict(found)
