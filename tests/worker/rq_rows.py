"""Rows in a real Redis for the tests of the worker's queue side: jobs as the producer writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis
from rq import Queue, Retry
from rq.job import Job

from producer.store import Serializer, batch_key, counts_key, lines_key, log_key
from producer.wire import FUNCTION, Request, Result

BATCH = "b"


def request(number: int, batch: str = BATCH, **fields: Any) -> Request:
    """Row ``number`` of file 0 of a batch."""
    values = {"prompt": f"prompt {number}", **fields}
    return Request(
        custom_id=f"row-{number}", batch_id=batch, file=0, line=number, endpoint="completions", **values
    )


def enqueue(connection: redis.Redis, requests: list[Request], queue: str = "q") -> list[Job]:
    """Queue rows of a closed batch, as producer.enqueue does: jobs, accepted lines, counts."""
    rows = [
        Queue.prepare_data(
            FUNCTION,
            args=(row.encode(),),
            kwargs={},
            job_id=row.job_id,
            timeout=-1,
            result_ttl=1000,
            failure_ttl=1000,
            description="in.jsonl:1",
            retry=Retry(max=10**6),
        )
        for row in requests
    ]
    for row in requests:
        connection.hset(
            batch_key(row.batch_id), mapping={"state": "closed", "files": 1, "keep_seconds": 1000}
        )
        connection.setbit(lines_key(row.batch_id, 0), row.line, 1)
        connection.hincrby(counts_key(row.batch_id), "rows", 1)
    return list(Queue(queue, connection=connection, serializer=Serializer).enqueue_many(rows))


def fetch(connection: redis.Redis, job_id: str) -> Job:
    return Job.fetch(job_id, connection=connection, serializer=Serializer)


def status(connection: redis.Redis, job_id: str) -> str | None:
    """RQ's status of a job; None when it is gone."""
    value = connection.hget(f"rq:job:{job_id}", "status")
    return value.decode() if value else None


def counts(connection: redis.Redis, batch: str = BATCH) -> Mapping[str, int]:
    """The batch's counts of rows, those that are not zero."""
    found = {key.decode(): int(float(value)) for key, value in connection.hgetall(counts_key(batch)).items()}
    return {key: found[key] for key in ("completed", "failed", "cancelled") if found.get(key)}


def log(connection: redis.Redis, batch: str = BATCH) -> dict[str, Result | None]:
    """The completion log: job id -> its inline result, None where the RQ job returns it. Each row once."""
    entries = connection.xrange(log_key(batch))
    table = {
        fields[b"j"].decode(): Result.decode(Serializer.loads(fields[b"r"])) if b"r" in fields else None
        for _, fields in entries
    }
    assert len(table) == len(entries), "a row ended twice"
    return table


def returned(connection: redis.Redis, job_id: str) -> list[Any]:
    """What the job returned, by RQ's own reading: one entry a result."""
    return [result.return_value for result in fetch(connection, job_id).results()]
