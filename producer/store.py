"""THE KEYSPACE: our own keys in Redis, all under one prefix, beside RQ's.

Owns key names, batch records and counts, the completion log, worker reports, the serializer of RQ jobs.
enqueue.py and sweep.py change several of RQ's keys and ours in one transaction, by the names drawn here.
Must not know files, terminals or how a row is run.

    livebatch:batches               zset    batch id -> created (unix seconds)
    livebatch:batch:{id}            hash    record (JSON), state open|closed|cancelled, files, keep_seconds
    livebatch:batch:{id}:counts     hash    rows, completed, failed, cancelled, prompt_tokens,
                                            completion_tokens, queued_at
    livebatch:batch:{id}:ids        hash    custom_id -> "{file}-{line}"; the job id is "{id}-{file}-{line}"
    livebatch:batch:{id}:lines:{f}  bitmap  lines of file f that were accepted (bad lines too)
    livebatch:batch:{id}:ended:{f}  bitmap  lines of file f whose end stands in the log
    livebatch:batch:{id}:log        stream  one entry a row, in order of ending: j = job id;
                                            r = encoded Result, only where the RQ job has none to return
    livebatch:workers               set     worker names
    livebatch:worker:{name}         hash    what the worker last said, with a TTL
    livebatch:commands              pubsub  {"command": "cancel", "batch": id}

Counts stand apart from the batch's hash because a producer WATCHes the hash (it must see a cancel) while
workers count up all the time. A batch's keys start to age when its last row has ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from producer import scripts
from producer.batch import State, WorkerReport
from producer.wire import dumps

if TYPE_CHECKING:
    from redis import Redis
    from redis.client import Pipeline

    from producer.wire import Result

PREFIX = "livebatch:"
BATCHES = PREFIX + "batches"
WORKERS = PREFIX + "workers"
COMMANDS = PREFIX + "commands"
DEFAULT_QUEUE = "livebatch"


def batch_key(batch_id: str) -> str:
    return f"{PREFIX}batch:{batch_id}"


def counts_key(batch_id: str) -> str:
    return f"{PREFIX}batch:{batch_id}:counts"


def ids_key(batch_id: str) -> str:
    return f"{PREFIX}batch:{batch_id}:ids"


def lines_key(batch_id: str, file: int) -> str:
    return f"{PREFIX}batch:{batch_id}:lines:{file}"


def log_key(batch_id: str) -> str:
    return f"{PREFIX}batch:{batch_id}:log"


def worker_key(name: str) -> str:
    return f"{PREFIX}worker:{name}"


def as_text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


class Serializer:
    """RQ's serializer for everything of ours: compact JSON in UTF-8, never pickle.

    ``dumps`` raises ValueError on NaN, Infinity and lone surrogates.
    """

    @staticmethod
    def dumps(value: Any) -> bytes:
        return dumps(value).encode()

    @staticmethod
    def loads(data: bytes) -> Any:
        return json.loads(data)


class Store:
    """Our side of one Redis. ``connection`` answers in bytes (redis-py's default, and RQ's need)."""

    def __init__(self, connection: Redis) -> None:
        self.connection = connection

    # The worker's side. The first three join the caller's MULTI, so a row ends in RQ and here at once.

    def log_completed(
        self,
        pipe: Pipeline,
        batch_id: str,
        job_ids: Iterable[str],
        *,
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
    ) -> None:
        """These rows ended well: their RQ jobs return their Results. Tokens are sums over the rows.

        A row that ended before (cancelled, given up as lost) keeps its first end: this call changes nothing.
        """
        rows = [part for job_id in job_ids for part in (job_id, "completed", "")]
        pipe.eval(scripts.LOG, 1, batch_key(batch_id), prompt_tokens, completion_tokens, *rows)

    def log_failed(self, pipe: Pipeline, batch_id: str, results: Iterable[Result]) -> None:
        """These rows failed, or were cancelled (code "batch_cancelled"). The Results are kept in the log."""
        rows = [part for result in results for part in (result.job_id, outcome(result), encode(result))]
        pipe.eval(scripts.LOG, 1, batch_key(batch_id), 0, 0, *rows)

    def report_worker(self, pipe: Pipeline, name: str, fields: Mapping[str, str], ttl_seconds: int) -> None:
        """What `producer status` shows of a worker until ``ttl_seconds`` from now."""
        pipe.sadd(WORKERS, name)
        pipe.hset(worker_key(name), mapping=dict(fields))
        pipe.expire(worker_key(name), ttl_seconds)

    def is_cancelled(self, batch_ids: Iterable[str]) -> set[str]:
        """Those of the batches that were cancelled: their rows must not run. One round trip."""
        wanted = list(dict.fromkeys(batch_ids))
        return {
            batch for batch, state in zip(wanted, self.states(wanted), strict=True) if state == "cancelled"
        }

    def states(self, batch_ids: Sequence[str]) -> list[State | None]:
        """None: no such batch (or it aged away). One round trip."""
        with self.connection.pipeline(transaction=False) as pipe:
            for batch_id in batch_ids:
                pipe.hget(batch_key(batch_id), "state")
            return [cast("State", as_text(state)) if state else None for state in pipe.execute()]

    def workers(self) -> list[WorkerReport]:
        """Workers that reported lately, by name. The names of those that fell silent are forgotten."""
        names = sorted(as_text(name) for name in self.connection.smembers(WORKERS))
        with self.connection.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.hgetall(worker_key(name))
            reports = dict(zip(names, pipe.execute(), strict=True))
        if silent := [name for name, fields in reports.items() if not fields]:
            self.connection.srem(WORKERS, *silent)
        return [
            WorkerReport(name, {as_text(key): as_text(value) for key, value in fields.items()})
            for name, fields in reports.items()
            if fields
        ]


def outcome(result: Result) -> str:
    """The count a result belongs to."""
    if result.failure is None:
        return "completed"
    return "cancelled" if result.failure.code == "batch_cancelled" else "failed"


def encode(result: Result) -> bytes:
    return Serializer.dumps(result.encode())
