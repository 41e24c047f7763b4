"""Jobs in our hands: claim, renew, hand back, recover. Each is one script: a job is never between two owners.

Owns the calls of scripts.py and the nouns Lease and Claim. Must not know what a job asks for or how it runs.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from rq.defaults import RQ_KEY_PREFIX
from rq.utils import now as utc_now
from rq.utils import utcformat

from producer.errors import WireError
from producer.store import batch_key
from producer.wire import parse_job_id
from worker import scripts

if TYPE_CHECKING:
    from redis import Redis

Argument = str | int | float
CLAIM_BYTES = 64 << 20  # of packed prompts, after which a claim takes no more: it is one answer of Redis
RECOVER_AT_ONCE = 500  # rows of dead workers put back by one script run: a few milliseconds of Redis


@dataclass(frozen=True, slots=True)
class Lease:
    """One run of one job. Ours as long as Redis says so; every write checks."""

    queue: str
    job_id: str
    execution_id: str
    started_at: float  # unix seconds, by the worker's clock; when it ends, Redis's says

    @property
    def run(self) -> str:
        """RQ's name of the run, in its started registry and its execution keys."""
        return f"{self.job_id}:{self.execution_id}"

    @property
    def job_key(self) -> str:
        return f"{RQ_KEY_PREFIX}:job:{self.job_id}"

    @property
    def batch_id(self) -> str | None:
        """The batch of a row, by its name; None for a job that is none of ours."""
        try:
            return parse_job_id(self.job_id)[0]
        except WireError:
            return None


@dataclass(frozen=True, slots=True)
class Claim:
    """A job as it was taken: nothing of it is checked. Values are bytes, b"" where the hash has none."""

    lease: Lease
    is_started: bool  # False: no job of RQ's, or one that had ended; there is no lease
    data: bytes  # RQ's compressed payload, or its size in digits where it is larger than asked for
    status: bytes
    success_callback: bytes
    failure_callback: bytes
    stopped_callback: bytes
    webhooks: bytes
    repeats_left: bytes
    rate_limit: bytes
    result_ttl: bytes
    failure_ttl: bytes
    deaths: bytes
    enqueued_at: bytes  # RQ's text
    batch_state: bytes = b""  # of the batch its id names,
    batch_expires: bytes = b""  # and unix seconds, where that expires
    losses: int = 0  # how often it was taken before and its worker vanished


class Leases:
    """The leases of one worker on its queues. Raises redis-py's errors when Redis is away.

    ``is_dry``: whether the last claim left all queues empty. ``is_apart``: whether it came upon rows that may
    not run beside others, since they were lost so often: then no claim makes sense until all rows have ended.
    """

    def __init__(self, connection: Redis, worker_name: str, lease_seconds: float, max_bytes: int) -> None:
        self.worker_name = worker_name
        self._lease_seconds = lease_seconds
        self._max_bytes = max_bytes
        self._token = uuid.uuid4().hex[:20]  # execution ids: unlike any other process's, then counted
        self._claims = count()
        self.is_dry = False
        self.is_apart = False
        self._claim = connection.register_script(scripts.CLAIM)
        self._renew = connection.register_script(scripts.RENEW)
        self._hand_back = connection.register_script(scripts.HAND_BACK)

    def claim(self, room: int, quotas: Sequence[tuple[str, int]], is_free: bool = True) -> list[Claim]:
        """Take and lease up to ``room`` jobs: each queue's quota first, then whatever is there.

        ``is_free``: there is no row in hand, so rows that may not run beside others can be taken.

        Fewer although there are more, which ``is_dry`` then says, where prompts are huge (see CLAIM_BYTES) or
        the queues name jobs that others hold.
        """
        now = time.time()
        prefix = f"{self._token}{next(self._claims):08x}-"
        given: list[Argument] = [RQ_KEY_PREFIX, self.worker_name, prefix, utcformat(utc_now())]
        given += [self._lease_seconds, room, self._max_bytes, batch_key(""), CLAIM_BYTES]
        given += ["free" if is_free else "", len(scripts.FIELDS), *scripts.FIELDS]
        for queue, quota in quotas:
            given += [queue, quota]
        claims, is_dry, is_apart = self._claim(args=given)
        self.is_dry, self.is_apart = bool(is_dry), bool(is_apart)
        return [_claim(now, *taken) for taken in claims]

    def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """Prolong all leases in one round trip. Returns those that are lost: someone else has the job."""
        if not leases:
            return []
        given: list[Argument] = [RQ_KEY_PREFIX, self.worker_name, self._lease_seconds, *names(leases)]
        return [leases[int(index)] for index in self._renew(args=given)]

    def hand_back(self, leases: Sequence[Lease]) -> int:
        """Put the jobs back at the front of their queues, in this order. Returns how many were still ours."""
        if not leases:
            return 0
        return int(
            self._hand_back(args=[RQ_KEY_PREFIX, self.worker_name, utcformat(utc_now()), *names(leases)])
        )


def recover(connection: Redis, queue: str) -> list[str]:
    """Requeue the jobs whose worker let their lease run out. Returns their ids, at most RECOVER_AT_ONCE."""
    ids: Any = connection.eval(
        scripts.RECOVER, 0, RQ_KEY_PREFIX, queue, utcformat(utc_now()), RECOVER_AT_ONCE
    )
    return [name.decode(errors="replace") for name in reversed(ids)]


def names(leases: Iterable[Lease]) -> list[str]:
    """(queue, job id, execution id) of each, flat, as the scripts want them."""
    return [part for lease in leases for part in (lease.queue, lease.job_id, lease.execution_id)]


def _claim(now: float, queue: bytes, job_id: bytes, execution: bytes, values: list[Any]) -> Claim:
    lease = Lease(queue.decode(), job_id.decode(errors="replace"), execution.decode(), now)
    found: list[Any] = [b"" if value is None else value for value in values] or [b""] * len(scripts.FIELDS)
    return Claim(lease, bool(execution), *found)
