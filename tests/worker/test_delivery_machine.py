"""Delivery as a state machine on real Redis: workers' own scripts, their deaths, RQ's cleanup, cancels.

Time is not waited for: a lease that runs out is one whose end is moved into the past.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from rq.job import Job
from rq.registry import StartedJobRegistry

from producer.client import Client
from producer.store import Serializer, Store, outcome
from producer.sweep import Sweeper
from producer.wire import Choice, Failure, Result, Usage
from worker import scripts
from worker.finish import Ending, Finisher, ending
from worker.intake import CANCELLED
from worker.leases import Claim, Lease, Leases, names, recover

pytestmark = pytest.mark.redis

SIZES = {"a": 12, "b": 6}  # batches and their rows; b may be cancelled
QUEUE = "livebatch"
LEASE_SECONDS = 1000.0
SLOTS = 2  # workers at a time

WORKERS_DEEDS = ["claim", "claim", "beat", "beat", "end", "end", "keep", "flush", "hand_back", "engine_dies"]
WORKERS_DEEDS += ["hear_of_the_cancel"]
BLOWS = ["freeze", "freeze", "kill", "forget_the_dead"]
FINDERS = ["", "maintenance", "rq_cleans_up"]

slots = st.integers(0, SLOTS - 1)


@dataclass
class Parent:
    """What a worker's memory holds. A new one stands where one died."""

    name: str
    leases: Leases
    finisher: Finisher
    held: list[Claim] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)

    @property
    def all_leases(self) -> list[Lease]:
        return [*(claim.lease for claim in self.held), *(end.lease for end in self.endings)]


def result(job_id: str, failure: Failure | None = None) -> Result:
    """A row's end; its answer names the row."""
    if failure:
        return Result(custom_id=job_id, job_id=job_id, created=0, failure=failure)
    return Result(
        custom_id=job_id,
        job_id=job_id,
        endpoint="completions",
        model="m",
        created=0,
        choices=(Choice(0, job_id, "stop", None),),
        usage=Usage(1, 1),
        seed=0,
    )


class Delivery(RuleBasedStateMachine):
    """Rules are what may happen, invariants hold after each, ``teardown`` brings both batches to an end."""

    url: str

    @initialize()
    def start(self) -> None:
        self.connection = redis.Redis.from_url(self.url)
        self.connection.flushall()
        self.client, self.store = Client(self.url), Store(self.connection)
        self.names = count()
        self.parents = [self.new_parent() for _ in range(SLOTS)]
        self.deaths: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()
        self.begun: set[str] = set()  # rows that were taken and not handed back
        self.orphans: list[Lease] = []  # of workers that died
        for batch, size in SIZES.items():
            rows = [{"prompt": f"{batch}{index}"} for index in range(size)]
            self.client.submit_rows(rows, batch_id=batch, queue=QUEUE)

    def new_parent(self) -> Parent:
        name = f"w{next(self.names)}"
        leases = Leases(self.connection, name, LEASE_SECONDS, 1 << 20)
        return Parent(name, leases, Finisher(self.connection, name))

    # -- three rules: Hypothesis leaves rules out at random, and most of these deeds need one another

    @rule(
        slot=slots,
        deed=st.sampled_from(WORKERS_DEEDS),
        many=st.integers(1, 5),
        good=st.booleans(),
        answered=st.booleans(),
    )
    def a_worker(self, slot: int, deed: str, many: int, good: bool, answered: bool) -> None:
        match deed:
            case "claim":
                self.claim(slot, many)
            case "end":
                self.end(slot, many, good)
                self.flush(slot, answered)
            case "keep":  # Redis is away for this worker
                self.end(slot, many, good)
            case "flush":
                self.flush(slot, answered)
            case _:
                getattr(self, deed)(slot)

    @rule(slot=slots, what=st.sampled_from(BLOWS), then=st.sampled_from(FINDERS), taken=st.booleans())
    def a_blow(self, slot: int, what: str, then: str, taken: bool) -> None:
        """And who finds out; ``taken``: the other worker takes what it can at once."""
        getattr(self, what)(slot)
        if then:
            getattr(self, then)()
        if taken:
            self.claim(1 - slot, room=5)

    @rule(what=st.sampled_from(["cancel", "follow", "cancel_a_row"]), line=st.integers(1, SIZES["a"]))
    def somebody(self, what: str, line: int) -> None:
        if what == "cancel_a_row":
            self.cancel_a_row(line)
        elif what == "follow":
            for batch in SIZES:
                self.follow(batch)
        else:
            self.client.cancel("b")

    # -- what workers do

    def claim(self, slot: int, room: int) -> None:
        parent = self.parents[slot]
        is_free = not parent.all_leases
        claims = parent.leases.claim(room, [(QUEUE, room)], is_free)
        for claim in claims:
            if claim.is_started:
                assert claim.status in (b"queued", b"started"), "a row that ended runs again"
                assert int(claim.deaths or 0) == self.deaths[claim.lease.job_id]
                self.losses[claim.lease.job_id] += claim.lease.job_id in self.begun
                assert claim.losses == self.losses[claim.lease.job_id]
                self.begun.add(claim.lease.job_id)
                parent.held.append(claim)
        self.suspects_are_apart(is_free, [claim.losses for claim in claims if claim.is_started])

    def suspects_are_apart(self, is_free: bool, losses: list[int]) -> None:
        if max(losses, default=0) >= scripts.SUSPECT_LOSSES:
            assert is_free
            assert min(losses) >= scripts.SUSPECT_LOSSES
        if max(losses, default=0) >= scripts.ALONE_LOSSES:
            assert len(losses) == 1

    def beat(self, slot: int) -> None:
        parent = self.parents[slot]
        lost = set(parent.leases.renew(parent.all_leases))
        parent.held = [claim for claim in parent.held if claim.lease not in lost]

    def end(self, slot: int, many: int, good: bool) -> None:
        parent = self.parents[slot]
        ended, parent.held = parent.held[:many], parent.held[many:]
        failure = None if good else Failure.of("timeout", "late")
        parent.endings += [ending(claim, result(claim.lease.job_id, failure)) for claim in ended]

    def flush(self, slot: int, answered: bool) -> None:
        """Without an answer the worker has to write everything once more."""
        parent = self.parents[slot]
        parent.finisher.write(parent.endings)
        if answered:
            parent.endings.clear()

    def hand_back(self, slot: int) -> None:
        parent = self.parents[slot]
        self.begun -= {claim.lease.job_id for claim in parent.held if self.owns(parent, claim.lease)}
        parent.leases.hand_back([claim.lease for claim in parent.held])
        parent.held.clear()

    def engine_dies(self, slot: int) -> None:
        parent = self.parents[slot]
        given: list[str] = []
        for number, claim in enumerate(parent.held):
            deaths = int(claim.deaths or 0) + 1
            parent.held[number] = replace(claim, deaths=str(deaths).encode())
            given += [*names([claim.lease]), str(deaths)]
            if self.owns(parent, claim.lease):
                self.deaths[claim.lease.job_id] = deaths
        self.connection.eval(scripts.NOTE_DEATHS, 0, "rq", parent.name, *given)

    def hear_of_the_cancel(self, slot: int) -> None:
        if self.client.status("b").state != "cancelled":
            return
        parent = self.parents[slot]
        doomed = [claim for claim in parent.held if claim.lease.batch_id == "b"]
        parent.held = [claim for claim in parent.held if claim not in doomed]
        parent.endings += [ending(claim, result(claim.lease.job_id, CANCELLED)) for claim in doomed]
        self.flush(slot, answered=True)

    # -- what befalls them

    def kill(self, slot: int) -> None:
        self.orphans += self.parents[slot].all_leases
        self.parents[slot] = self.new_parent()

    def freeze(self, slot: int) -> None:
        """Past its leases; it knows nothing of it, and goes on as if nothing had been."""
        self.run_out(self.parents[slot].all_leases)

    def forget_the_dead(self, slot: int) -> None:
        """Time passes, and the leases of workers that died run out."""
        self.run_out(self.orphans)
        self.orphans.clear()

    def run_out(self, leases: list[Lease]) -> None:
        now = time.time()
        for lease in leases:
            self.connection.zadd(f"rq:wip:{QUEUE}", {lease.run: now - 1}, xx=True)
            self.connection.zadd(f"rq:executions:{lease.job_id}", {lease.execution_id: now + 59}, xx=True)

    def maintenance(self) -> None:
        recover(self.connection, QUEUE)

    def rq_cleans_up(self) -> None:
        StartedJobRegistry(QUEUE, connection=self.connection, serializer=Serializer).cleanup()

    # -- what producers and people do

    def follow(self, batch: str) -> None:
        is_cancelled = self.client.status(batch).state == "cancelled"
        Sweeper(self.store, self.store.record(batch)).step(cancel=is_cancelled)

    def cancel_a_row(self, line: int) -> None:
        job = Job.fetch(f"a-0-{line}", self.connection, serializer=Serializer)
        if job.get_status() in ("queued", "started"):
            job.cancel()

    # -- what always holds

    def owns(self, parent: Parent, lease: Lease) -> bool:
        status, worker = self.connection.hmget(lease.job_key, "status", "worker_name")
        is_leased = self.connection.zscore(f"rq:wip:{QUEUE}", lease.run) is not None
        return is_leased and (status, worker) == (b"started", parent.name.encode())

    @invariant()
    def nobody_shares_a_row(self) -> None:
        owned = Counter(
            lease.job_id
            for parent in self.parents
            for lease in set(parent.all_leases)
            if self.owns(parent, lease)
        )
        assert set(owned.values()) <= {1}
        waiting = Counter(job_id.decode() for job_id in self.connection.lrange(f"rq:queue:{QUEUE}", 0, -1))
        assert set(waiting.values()) <= {1}
        assert not owned.keys() & waiting.keys()
        runs = self.connection.zrangebyscore(f"rq:wip:{QUEUE}", time.time(), "+inf")
        assert set(Counter(run.split(b":")[0] for run in runs).values()) <= {1}, "two leases on one row"

    @invariant()
    def counts_are_the_log(self) -> None:
        for batch in SIZES:
            log = self.store.read_log(batch, "0", 100)
            assert len({entry.job_id for entry in log}) == len(log), "a row ended twice"
            inline = [Result.decode(Serializer.loads(entry.inline)) for entry in log if entry.inline]
            outcomes = Counter(map(outcome, inline))
            outcomes["completed"] = len(log) - len(inline)
            status = self.store.status(batch)
            told = {"completed": status.completed, "failed": status.failed, "cancelled": status.cancelled}
            assert told == {key: outcomes[key] for key in told}

    @invariant()
    def rq_has_one_result_of_what_completed(self) -> None:
        jobs = [f"{batch}-0-{line}" for batch, size in SIZES.items() for line in range(1, size + 1)]
        log = {entry.job_id: entry for batch in SIZES for entry in self.store.read_log(batch, "0", 100)}
        with self.connection.pipeline() as pipe:
            for job_id in jobs:
                pipe.xlen(f"rq:results:{job_id}")
                pipe.hmget(f"rq:job:{job_id}", "status", "livebatch_deaths", "livebatch_losses")
            found = pipe.execute()
        for job_id, results, (status, deaths, losses) in zip(jobs, found[::2], found[1::2], strict=True):
            assert results <= 1
            assert int(deaths or 0) == self.deaths[job_id]
            assert int(losses or 0) == self.losses[job_id]
            if job_id in log and log[job_id].inline is None:
                assert (results, status) == (1, b"finished")

    def teardown(self) -> None:
        """Everybody dies; one new worker runs what is left."""
        if not hasattr(self, "parents"):
            return
        self.run_out([lease for parent in self.parents for lease in parent.all_leases] + self.orphans)
        self.parents = [self.new_parent() for _ in range(SLOTS)]
        self.maintenance()
        while self.connection.exists(f"rq:queue:{QUEUE}"):
            self.claim(0, room=100)
            self.hear_of_the_cancel(0)
            self.end(0, many=100, good=True)
            self.flush(0, answered=True)
        for batch in SIZES:
            self.follow(batch)
        self.counts_are_the_log()
        self.rq_has_one_result_of_what_completed()
        for batch, size in SIZES.items():
            assert self.store.status(batch).ended == size, "a row is lost"
            said = {each.job_id: each for each in self.client.results(batch)}
            good = [each for each in said.values() if each.failure is None]
            assert all(each.choices[0].text == job_id for job_id, each in said.items() if each in good)
        assert not self.connection.exists(f"rq:queue:{QUEUE}", f"rq:wip:{QUEUE}")
        self.connection.close()


def test_each_row_ends_once_whatever_befalls_its_workers(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Delivery, "url", redis_url, raising=False)
    limits = settings(
        max_examples=18,
        stateful_step_count=50,
        deadline=None,
        derandomize=bool(os.environ.get("CI")),
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Delivery, settings=limits)
