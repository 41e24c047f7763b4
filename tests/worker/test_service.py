"""The parent's loop on a real Redis, with an engine that does what the test says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import pytest
import redis
from rq import Queue
from rq.command import send_shutdown_command, send_stop_job_command
from rq.registry import StartedJobRegistry
from rq.suspension import resume, suspend
from rq.worker import Worker as RqWorker
from rq_rows import counts, enqueue, fetch, log, request, returned, status
from service_fakes import Worker, run_burst, worker

from kernels.rows import Status
from producer.embedded import EmbeddedRedis
from producer.errors import LivebatchError, UsageError
from producer.store import COMMANDS, Serializer, Store, batch_key, worker_key
from producer.wire import Request, Result, Sampling
from waiting import wait_until
from worker.events import Died
from worker.leases import Leases
from worker.listeners import Waiter
from worker.rows import PreparedRow, RowPreparer
from worker.warden import MAX_VERDICTS

pytestmark = pytest.mark.redis


def queued(connection: redis.Redis, name: str = "q") -> list[str]:
    return list(Queue(name, connection=connection, serializer=Serializer).job_ids)


def test_a_burst_answers_every_row_and_ends(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(number) for number in range(1, 51)])
    run_burst(redis_url)
    assert counts(connection) == {"completed": 50}
    (value,) = returned(connection, "b-0-7")
    assert value["choices"][0]["text"] == "prompt 7"
    assert value["usage"] == {"prompt_tokens": 8, "completion_tokens": 9}
    assert not connection.keys("rq:execution*")
    assert not connection.exists("rq:workers")


def test_a_burst_ends_only_when_the_queues_are_empty(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a claim takes less than there is, and nobody wakes the worker again."""
    monkeypatch.setattr("worker.leases.CLAIM_BYTES", 1)
    monkeypatch.setattr(Waiter, "arm", lambda self: None)
    enqueue(connection, [request(number) for number in range(1, 10)])
    run_burst(redis_url)
    assert counts(connection) == {"completed": 9}


def test_an_idle_worker_takes_a_new_row_at_once(redis_url: str, connection: redis.Redis) -> None:
    """The promise is 50 ms on a free machine; the median of several shows what a busy one hides."""
    delays = []
    with worker(redis_url, echo=True) as made:
        wait_until(lambda: made.service._is_dry)
        for number in range(1, 16):
            time.sleep(0.05)  # idle again: nothing announces that
            enqueue(connection, [request(number)])
            begun = time.monotonic()
            wait_until(lambda number=number: status(connection, f"b-0-{number}") == "finished")
            delays.append(time.monotonic() - begun)
    print(f"queued to finished: median {sorted(delays)[7] * 1e3:.1f} ms, worst {max(delays) * 1e3:.1f} ms")
    assert sorted(delays)[7] < 0.05


def test_live_rows_do_not_keep_new_ones_waiting(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(1)])
    with worker(redis_url) as made:
        wait_until(lambda: len(made.engine.rows) == 1)
        enqueue(connection, [request(2)])
        wait_until(lambda: sorted(made.engine.prompts) == ["prompt 1", "prompt 2"])


def test_no_more_rows_are_taken_than_the_hand_holds(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(number) for number in range(1, 31)])
    with worker(redis_url, max_batch=4) as made:
        wait_until(lambda: len(made.engine.rows) == 8)
        assert len(queued(connection)) == 22
        made.engine.end(*list(made.engine.rows)[:4])
        wait_until(lambda: len(made.engine.rows) == 8)
        assert len(queued(connection)) == 18


def test_weighted_queues_share_and_none_starves(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(number, "high") for number in range(1, 61)], "high")
    enqueue(connection, [request(number, "low") for number in range(1, 61)], "low")
    with worker(redis_url, queues=["high=3", "low"], max_batch=4) as made:
        for _ in range(7):
            wait_until(lambda: len(made.engine.rows) == 8)
            made.engine.end(*list(made.engine.rows))
        wait_until(lambda: len(made.engine.rows) == 8)
        taken = {name: 60 - len(queued(connection, name)) for name in ("high", "low")}
        assert taken == {"high": 48, "low": 16}
        for _ in range(3):
            made.engine.end(*list(made.engine.rows))
            wait_until(lambda: len(made.engine.rows) == 8)
        assert 60 - len(queued(connection, "high")) == 60
        assert 60 - len(queued(connection, "low")) == 28


def test_rq_shows_the_worker_and_its_rows(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(number) for number in (1, 2, 3)])
    with worker(redis_url) as made:
        wait_until(lambda: len(made.engine.rows) == 3)
        (seen,) = RqWorker.all(connection=connection, serializer=Serializer)
        assert seen.name == made.settings.name
        assert seen.queue_names() == ["q"]
        assert {execution.job_id for execution in seen.get_current_executions()} == {
            "b-0-1",
            "b-0-2",
            "b-0-3",
        }
        assert StartedJobRegistry("q", connection=connection, serializer=Serializer).count == 3
        wait_until(lambda: connection.hget(f"rq:worker:{made.settings.name}", "state") == b"busy")
        (report,) = Store(connection).workers()
        assert report.name == made.settings.name
        wait_until(lambda: Store(connection).workers()[0].fields["waiting"] == "3")
    assert Store(connection).workers() == []


# -- rows that do not end well


def test_a_refused_row_fails_with_its_reason_and_its_neighbours_run(
    redis_url: str, connection: redis.Redis
) -> None:
    enqueue(connection, [request(1), request(2, model="another"), request(3)])
    run_burst(redis_url)
    assert counts(connection) == {"completed": 2, "failed": 1}
    result = log(connection)["b-0-2"]
    assert result is not None and result.failure is not None
    assert (result.custom_id, result.failure.code, result.failure.status_code) == (
        "row-2",
        "model_not_found",
        404,
    )
    assert "model_not_found" in str(fetch(connection, "b-0-2").latest_result().exc_string)


def test_a_rows_own_failure_names_its_line(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = RowPreparer.prepare

    def broken(self: RowPreparer, row: Request, number: int) -> PreparedRow:
        assert row.line != 8, "a bug"
        return prepare(self, row, number)

    monkeypatch.setattr(RowPreparer, "prepare", broken)
    bad = {
        2: ("model_not_found", request(2, model="another")),
        3: ("context_length_exceeded", request(3, sampling=Sampling(max_tokens=10**9))),
        4: ("invalid_request", request(4, prompt=None, messages=({"role": "user", "content": "x"},))),
        5: ("invalid_value", request(5, sampling=Sampling(temperature=9.0))),
        6: ("invalid_request", request(6)),  # spoiled below
        7: ("timeout", request(7, timeout_s=0.05)),
        8: ("internal_error", request(8)),
        9: ("invalid_value", request(9, sampling=Sampling(stop_token_ids=(10**6,)))),
    }
    enqueue(connection, [row for _, row in bad.values()])
    connection.hset("rq:job:b-0-6", "data", b"odd")
    with worker(redis_url):
        wait_until(lambda: counts(connection) == {"failed": len(bad)})
    for job_id, result in log(connection).items():
        assert result is not None and result.failure is not None
        line = int(job_id.split("-")[2])
        assert result.failure.code == bad[line][0]
        assert result.failure.message.startswith(f"line {line}: ")
        assert result.failure.message.count("line ") == 1


def test_a_row_out_of_time_is_evicted(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(1, timeout_s=0.2), request(2, timeout_s=100.0)])
    with worker(redis_url) as made:
        wait_until(lambda: status(connection, "b-0-1") == "failed")
        result = log(connection)["b-0-1"]
        assert result is not None and result.failure is not None and result.failure.code == "timeout"
        wait_until(lambda: made.engine.prompts == ["prompt 2"])
        assert len(made.engine.cancelled) == 1


def test_rows_end_when_their_batch_expires(redis_url: str, connection: redis.Redis) -> None:
    """Those that run, though they have more time of their own, and those that are taken later."""
    enqueue(connection, [request(1), request(2, timeout_s=100.0)])
    connection.hset(batch_key("b"), "expires", repr(time.time() + 0.5))
    with worker(redis_url) as made:
        wait_until(lambda: len(made.engine.rows) == 2)
        wait_until(lambda: counts(connection) == {"failed": 2})
        wait_until(lambda: sorted(made.engine.cancelled) == [1, 2])
        enqueue(connection, [request(3)])
        wait_until(lambda: counts(connection) == {"failed": 3})
    for found in log(connection).values():
        assert found is not None and found.failure is not None
        assert (found.failure.code, found.failure.status_code) == ("batch_expired", None)


@pytest.mark.parametrize("expires", ["", "soon", "nan", "inf", "1e999"])
def test_a_batch_that_says_nonsense_does_not_expire(
    redis_url: str, connection: redis.Redis, expires: str
) -> None:
    enqueue(connection, [request(1)])
    connection.hset(batch_key("b"), "expires", expires)
    run_burst(redis_url)
    assert counts(connection) == {"completed": 1}


def test_a_stop_string_ends_a_row_and_frees_its_place(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(1, sampling=Sampling(stop=("END",)))])
    with worker(redis_url) as made:
        wait_until(lambda: len(made.engine.rows) == 1)
        (number,) = made.engine.rows
        made.engine.say(number, "so far E")
        made.engine.say(number, "ND and more")
        wait_until(lambda: status(connection, "b-0-1") == "finished")
        (value,) = returned(connection, "b-0-1")
        assert value["choices"][0] | {"index": 0} == {
            "index": 0,
            "text": "so far ",
            "finish_reason": "stop",
            "stop_reason": "END",
        }
        wait_until(lambda: made.engine.cancelled == [number])


def test_our_own_bug_costs_one_row(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row breaks the tokeniser, one breaks its result; the worker and their neighbour live."""
    prepare, result = RowPreparer.prepare, PreparedRow.result

    def broken_prepare(self: RowPreparer, row: Request, number: int) -> PreparedRow:
        assert row.line != 1, "a bug"
        return prepare(self, row, number)

    def broken_result(self: PreparedRow, status: Status) -> Result:
        if self.request.line == 2:
            raise KeyError("another bug")
        return result(self, status)

    monkeypatch.setattr(RowPreparer, "prepare", broken_prepare)
    monkeypatch.setattr(PreparedRow, "result", broken_result)
    enqueue(connection, [request(number) for number in (1, 2, 3)])
    run_burst(redis_url)
    assert counts(connection) == {"completed": 1, "failed": 2}
    for job_id in ("b-0-1", "b-0-2"):
        entry = log(connection)[job_id]
        assert entry is not None and entry.failure is not None
        assert (entry.failure.code, "bug" in entry.failure.message) == ("internal_error", True)


# -- cancelling


def cancel_batch(connection: redis.Redis, batch: str = "b") -> None:
    """As the producer does: the state first, then word to the workers."""
    connection.hset(f"livebatch:batch:{batch}", "state", "cancelled")
    connection.publish(COMMANDS, f'{{"command":"cancel","batch":"{batch}"}}')


def await_listening(connection: redis.Redis, made: Worker) -> None:
    """Until the worker hears commands; what is said before, it finds out at its next beat."""
    channel = f"rq:pubsub:{made.settings.name}"
    wait_until(lambda: dict(connection.pubsub_numsub(channel))[channel.encode()] == 1)


def test_a_cancelled_batch_leaves_the_live_batch_at_once(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(1), request(2)])
    enqueue(connection, [request(3, "c")])
    with worker(redis_url) as made:
        wait_until(lambda: len(made.engine.rows) == 3)
        await_listening(connection, made)
        begun = time.monotonic()
        cancel_batch(connection)
        wait_until(lambda: made.engine.prompts == ["prompt 3"])
        wait_until(lambda: counts(connection) == {"cancelled": 2})
        print(f"cancelled rows out and logged after {(time.monotonic() - begun) * 1e3:.0f} ms")
        assert time.monotonic() - begun < 1
    assert status(connection, "b-0-1") == "canceled"
    result = log(connection)["b-0-1"]
    assert result is not None and result.failure is not None and result.failure.code == "batch_cancelled"


def test_rows_of_a_cancelled_batch_are_not_started(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(1), request(2)])
    enqueue(connection, [request(3, "c")])
    connection.hset("livebatch:batch:b", "state", "cancelled")
    run_burst(redis_url)
    assert counts(connection) == {"cancelled": 2}
    assert counts(connection, "c") == {"completed": 1}


def test_a_cancel_nobody_heard_is_found_at_the_next_beat(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(1)])
    with worker(redis_url, beat_seconds=0.1) as made:
        wait_until(lambda: len(made.engine.rows) == 1)
        connection.hset("livebatch:batch:b", "state", "cancelled")
        wait_until(lambda: counts(connection) == {"cancelled": 1})
        wait_until(lambda: not made.engine.rows)


def test_rqs_own_commands_reach_the_right_row(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(number) for number in (1, 2, 3)])
    with worker(redis_url) as made:
        wait_until(lambda: len(made.engine.rows) == 3)
        await_listening(connection, made)
        send_stop_job_command(connection, "b-0-2", serializer=Serializer)
        wait_until(lambda: sorted(made.engine.prompts) == ["prompt 1", "prompt 3"])
        made.engine.end(*list(made.engine.rows))
        send_shutdown_command(connection, made.settings.name)
        made.join()
    assert counts(connection) == {"completed": 2, "cancelled": 1}


def test_a_row_cancelled_or_deleted_in_rq_is_dropped_without_a_result(
    redis_url: str, connection: redis.Redis
) -> None:
    enqueue(connection, [request(number) for number in (1, 2, 3)])
    with worker(redis_url, beat_seconds=0.1) as made:
        wait_until(lambda: len(made.engine.rows) == 3)
        fetch(connection, "b-0-1").cancel()
        fetch(connection, "b-0-2").delete()
        wait_until(lambda: made.engine.prompts == ["prompt 3"])
    assert status(connection, "b-0-1") == "canceled"
    assert status(connection, "b-0-2") is None
    assert log(connection) == {}


def test_a_suspended_worker_takes_nothing_and_a_resumed_one_does(
    redis_url: str, connection: redis.Redis
) -> None:
    suspend(connection)
    with worker(redis_url, echo=True) as made:
        wait_until(lambda: connection.hget(f"rq:worker:{made.settings.name}", "state") == b"suspended")
        enqueue(connection, [request(1)])
        assert queued(connection) == ["b-0-1"]
        resume(connection)
        wait_until(lambda: counts(connection) == {"completed": 1})


# -- stopping


def test_a_stop_lets_rows_end_and_hands_the_rest_back_in_order(
    redis_url: str, connection: redis.Redis
) -> None:
    enqueue(connection, [request(number) for number in range(1, 21)])
    with worker(redis_url, max_batch=4, grace=0.3) as made:
        wait_until(lambda: len(made.engine.rows) == 8)
        made.stop()
        made.engine.end(made.engine.number("prompt 2"))
        made.join()
        assert made.engine.is_stopped
    assert counts(connection) == {"completed": 1}
    assert queued(connection) == [f"b-0-{number}" for number in range(1, 21) if number != 2]
    assert fetch(connection, "b-0-1").retries_left == 10**6
    assert status(connection, "b-0-1") == "queued"
    assert not connection.exists("rq:wip:q")


def test_a_stop_ends_as_soon_as_the_hand_is_empty(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(1)])
    with worker(redis_url, grace=1000.0) as made:
        wait_until(lambda: len(made.engine.rows) == 1)
        made.stop()
        enqueue(connection, [request(2)])
        made.engine.end(*list(made.engine.rows))
        made.join()
    assert queued(connection) == ["b-0-2"], "nothing new is taken"


def test_a_second_stop_does_not_wait(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(1)])
    with worker(redis_url, grace=1000.0) as made:
        wait_until(lambda: len(made.engine.rows) == 1)
        made.stop()
        made.stop()
        made.join()
    assert queued(connection) == ["b-0-1"]


# -- the engine dies


def test_rows_of_a_dead_engine_run_again(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(number) for number in (1, 2, 3)])
    with worker(redis_url) as made:
        wait_until(lambda: len(made.engine.rows) == 3)
        made.engine.die()
        wait_until(lambda: made.engine.starts == 2 and len(made.engine.rows) == 3)
        made.engine.end(*list(made.engine.rows))
        wait_until(lambda: counts(connection) == {"completed": 3})
        assert connection.hget("rq:job:b-0-1", "livebatch_deaths") == b"1"


def test_rows_that_run_again_start_at_their_beginning_and_are_not_tokenised_again(
    redis_url: str, connection: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, prepared = RowPreparer.prepare, []

    def counting(self: RowPreparer, row: Request, number: int) -> PreparedRow:
        prepared.append(row.line)
        return prepare(self, row, number)

    monkeypatch.setattr(RowPreparer, "prepare", counting)
    enqueue(connection, [request(1, sampling=Sampling(stop=("END",))), request(2)])
    with worker(redis_url) as made:
        wait_until(lambda: len(made.engine.rows) == 2)
        made.engine.say(made.engine.number("prompt 1"), "of the first run E")
        made.engine.die()
        wait_until(lambda: made.engine.starts == 2 and len(made.engine.rows) == 2)
        made.engine.say(made.engine.number("prompt 1"), "ND of the second")
        made.engine.say(made.engine.number("prompt 1"), " END")
        wait_until(lambda: status(connection, "b-0-1") == "finished")
    assert returned(connection, "b-0-1")[0]["choices"][0]["text"] == "ND of the second "
    assert sorted(prepared) == [1, 2]


def test_a_row_that_kills_the_engine_fails_alone(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(number) for number in range(1, 9)])
    with worker(redis_url) as made:
        wait_until(lambda: len(made.engine.rows) == 8)
        send, deaths = made.engine.send, 0

        def deadly(rows: object, cancels: object) -> None:
            nonlocal deaths
            send(rows, cancels)  # type: ignore[arg-type]
            if "prompt 5" in made.engine.prompts:
                deaths += 1
                made.engine.die()
            elif made.engine.rows:
                made.engine.end(*list(made.engine.rows))

        made.engine.send = deadly  # type: ignore[method-assign]
        made.engine.die()
        wait_until(lambda: counts(connection) == {"completed": 7, "failed": 1})
    result = log(connection)["b-0-5"]
    assert result is not None and result.failure is not None
    assert (result.failure.code, result.failure.status_code) == ("worker_lost", None)
    assert [len(returned(connection, f"b-0-{n}")) for n in range(1, 9) if n != 5] == [1] * 7
    assert deaths <= 5


def test_an_engine_that_dies_of_every_row_ends_the_worker_and_not_the_queue(
    redis_url: str, connection: redis.Redis
) -> None:
    """Each start succeeds. What the last verdict would fail goes back, with its record and all others."""
    with pytest.raises(LivebatchError, match="completed none"), worker(redis_url) as made:
        made.engine.send = lambda rows, cancels: made.engine.die() if rows else None  # type: ignore[method-assign]
        enqueue(connection, [request(number) for number in range(1, 13)])
        made.thread.join(60)
    assert counts(connection) == {"failed": MAX_VERDICTS - 1}
    assert len(queued(connection)) == 13 - MAX_VERDICTS
    deaths = [
        int(connection.hget(f"rq:job:{job_id}", "livebatch_deaths") or 0) for job_id in queued(connection)
    ]
    assert max(deaths) >= 2


def test_suspects_keep_their_record_across_workers(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(1), request(2)])
    connection.hset("rq:job:b-0-1", "livebatch_deaths", 2)
    with worker(redis_url) as made:
        for starts in (1, 2):
            wait_until(lambda: made.engine.prompts == ["prompt 1"])
            assert made.engine.starts == starts
            made.engine.die()
        wait_until(lambda: counts(connection) == {"failed": 1})
        wait_until(lambda: made.engine.prompts == ["prompt 2"])


def test_an_engine_that_cannot_be_built_ends_the_worker_with_its_reason(redis_url: str) -> None:
    for error, starts in (
        (UsageError("genai_config.json is missing"), 1),
        (LivebatchError("weights are not what they were"), 1),
        (None, 3),
    ):
        made = Worker(redis_url)
        made.engine.on_start = lambda made=made, error=error: made.engine.post(Died("exit code 1", error))
        made.thread.start()
        with pytest.raises(LivebatchError) as raised:
            made.join()
        assert raised.value is error or "does not start: exit code 1, 3 times" in str(raised.value)
        assert (made.engine.starts, made.engine.is_stopped) == (starts, True)


def test_an_engine_killed_while_it_first_starts_is_started_again(redis_url: str) -> None:
    made = Worker(redis_url, burst=True)
    made.engine.on_start = lambda: made.engine.die() if made.engine.starts == 1 else made.engine.ready()
    made.thread.start()
    made.join()
    assert made.engine.starts == 2


def test_a_hung_engine_is_killed_and_its_rows_run_again(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(1)])
    with worker(redis_url, engine_timeout_seconds=0.2) as made:
        wait_until(lambda: made.engine.starts == 2 and len(made.engine.rows) == 1)
        assert connection.hget("rq:job:b-0-1", "livebatch_deaths") == b"1"
        made.engine.end(*list(made.engine.rows))
        wait_until(lambda: counts(connection) == {"completed": 1})


def test_an_engine_that_hangs_costs_the_rows_it_has_their_time_and_not_the_queue(
    redis_url: str, connection: redis.Redis
) -> None:
    """Rows that run out of time leave our hands, but nobody knows that they left the engine."""
    with worker(redis_url, echo=True, max_batch=4, engine_timeout_seconds=1.0) as made:
        made.engine.is_hung = True
        enqueue(connection, [request(number, timeout_s=0.4) for number in range(1, 41)])
        wait_until(lambda: made.engine.starts == 2)
        wait_until(lambda: sum(counts(connection).values()) == 40)
    assert counts(connection) == {"completed": 32, "failed": 8}


def test_an_engine_that_hangs_while_it_is_built_is_killed_and_started_again(
    redis_url: str, connection: redis.Redis
) -> None:
    """The first one, and one that is to replace a dead one: its rows shall not wait for ever."""
    made = Worker(redis_url, engine_timeout_seconds=0.3)

    def start() -> None:
        made.engine.is_hung = made.engine.starts in (1, 3)
        if not made.engine.is_hung:
            made.engine.ready()

    made.engine.on_start = start
    enqueue(connection, [request(1)])
    made.thread.start()
    try:
        wait_until(lambda: made.engine.starts == 2 and len(made.engine.rows) == 1)
        made.engine.die()
        wait_until(lambda: made.engine.starts == 4 and len(made.engine.rows) == 1)
        made.engine.end(*list(made.engine.rows))
        wait_until(lambda: counts(connection) == {"completed": 1})
    finally:
        made.stop()
        made.stop()
        made.join()


def test_rows_of_an_engine_that_not_even_sigkill_ends_go_back(
    redis_url: str, connection: redis.Redis
) -> None:
    enqueue(connection, [request(1)])
    with (
        pytest.raises(LivebatchError, match="after SIGKILL"),
        worker(redis_url, engine_timeout_seconds=0.2) as made,
    ):
        made.engine.kill = lambda: None  # type: ignore[method-assign]
        made.thread.join(20)
    assert made.engine.is_stopped
    assert queued(connection) == ["b-0-1"]


def test_an_engine_without_rows_may_be_silent(redis_url: str) -> None:
    with worker(redis_url, engine_timeout_seconds=0.1) as made:
        wait_until(lambda: made.service._is_open)
        made.service._warden.mind()
        time.sleep(0.2)
        made.service._warden.mind()
        assert made.engine.starts == 1


def test_an_engine_that_does_not_start_again_hands_its_rows_back(
    redis_url: str, connection: redis.Redis
) -> None:
    enqueue(connection, [request(1)])
    with pytest.raises(LivebatchError, match="does not start: killed"), worker(redis_url) as made:
        wait_until(lambda: len(made.engine.rows) == 1)
        made.engine.on_start = made.engine.die
        made.engine.die()
        made.thread.join(20)
    assert queued(connection) == ["b-0-1"]


# -- Redis goes away


def test_results_outlive_an_outage(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as connection:
        enqueue(connection, [request(number) for number in (1, 2, 3)])
        with worker(server.url, beat_seconds=0.2) as made:
            wait_until(lambda: len(made.engine.rows) == 3)
            server.kill()
            made.engine.end(*list(made.engine.rows))
            wait_until(lambda: made.service._link.is_away and len(made.service._desk.endings) == 3)
            server.start()
            wait_until(lambda: counts(connection) == {"completed": 3})
            enqueue(connection, [request(9)])
            wait_until(lambda: made.engine.prompts == ["prompt 9"])
    said = [record.getMessage() for record in caplog.records if record.name == "worker.link"]
    assert len([line for line in said if line.startswith("worker: Redis does not serve")]) == 1
    assert len([line for line in said if line.startswith("worker: Redis is back")]) == 1


def test_a_redis_that_is_away_when_the_engine_is_ready_is_waited_for() -> None:
    with EmbeddedRedis() as server, redis.Redis.from_url(server.url) as connection:
        enqueue(connection, [request(number) for number in (1, 2, 3)])
        made = Worker(server.url, echo=True)

        def start() -> None:
            server.kill()
            made.engine.ready()

        made.engine.on_start = start
        made.thread.start()
        try:
            wait_until(lambda: made.service._link.is_away or made.error is not None)
            server.start()
            wait_until(lambda: counts(connection) == {"completed": 3})
            wait_until(lambda: len(RqWorker.all(connection=connection, serializer=Serializer)) == 1)
            (seen,) = RqWorker.all(connection=connection, serializer=Serializer)
            assert (seen.name, seen.queue_names()) == (made.settings.name, ["q"])
            assert seen.birth_date is not None
        finally:
            made.stop()
            made.stop()
            made.join()


@pytest.fixture
def full(connection: redis.Redis) -> Iterator[Callable[[], None]]:
    """Call it, and Redis is above its maxmemory, until the test ends."""
    yield lambda: connection.config_set("maxmemory", 1)
    connection.config_set("maxmemory", 0)


def test_a_full_redis_is_drained_and_no_row_runs_twice(
    redis_url: str, connection: redis.Redis, full: Callable[[], None]
) -> None:
    """Leases are renewed there, deaths noted, rows taken and ended."""
    enqueue(connection, [request(number) for number in range(1, 41)])
    settings = {"lease_seconds": 1.0, "beat_seconds": 0.2, "maintenance_seconds": 0.1}
    with (
        worker(redis_url, max_batch=4, **settings) as made,
        worker(redis_url, max_batch=4, **settings) as other,
    ):
        wait_until(lambda: len(made.engine.rows) == len(other.engine.rows) == 8)
        full()
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            connection.set("more", "x")
        held = [dict(each.engine.rows) for each in (made, other)]
        time.sleep(1.5)  # past the lease
        assert held == [dict(each.engine.rows) for each in (made, other)]
        made.engine.die()
        wait_until(lambda: made.engine.starts == 2 and len(made.engine.rows) == 8)
        for each in (made, other):
            each.engine.echo = True
            each.engine.end(*list(each.engine.rows))
        wait_until(lambda: counts(connection) == {"completed": 40})
    assert made.service._link.is_away is other.service._link.is_away is False
    assert [len(returned(connection, f"b-0-{number}")) for number in range(1, 41)] == [1] * 40


def test_a_full_redis_shows_its_workers(
    redis_url: str, connection: redis.Redis, full: Callable[[], None]
) -> None:
    """Those that report to it, and one that has just come."""
    with worker(redis_url) as made:
        wait_until(lambda: len(Store(connection).workers()) == 1)
        full()
        connection.delete(worker_key(made.settings.name), f"rq:worker:{made.settings.name}")
        with worker(redis_url) as other:
            names = sorted([made.settings.name, other.settings.name])
            wait_until(lambda: [report.name for report in Store(connection).workers()] == names)
            seen = RqWorker.all(connection=connection, serializer=Serializer)
            assert sorted(each.name for each in seen) == names


def test_a_row_that_others_wait_for_holds_up_no_row_of_a_full_redis(
    redis_url: str, connection: redis.Redis, full: Callable[[], None]
) -> None:
    """There is no room for those others. The row keeps its lease and its result until there is."""
    enqueue(connection, [request(number) for number in range(1, 21)])
    settings = {"lease_seconds": 1.0, "beat_seconds": 0.2, "maintenance_seconds": 0.1}
    with worker(redis_url, max_batch=4, **settings) as made:
        wait_until(lambda: len(made.engine.rows) == 8)
        line = Queue("other", connection=connection, serializer=Serializer)
        line.enqueue("some.function", depends_on=fetch(connection, "b-0-2"), job_id="child")
        full()
        made.engine.echo = True
        made.engine.end(*list(made.engine.rows))
        wait_until(lambda: counts(connection) == {"completed": 19})
        time.sleep(1.5)  # past the lease
        assert (status(connection, "b-0-2"), line.job_ids) == ("started", [])
        connection.config_set("maxmemory", 0)
        wait_until(lambda: counts(connection) == {"completed": 20})
        wait_until(lambda: line.job_ids == ["child"])
        assert made.service._intake._number == 20, "no row was taken twice"
    assert len(returned(connection, "b-0-2")) == 1


def test_rows_that_wait_for_room_are_handed_back_at_the_end(
    redis_url: str, connection: redis.Redis, full: Callable[[], None]
) -> None:
    enqueue(connection, [request(1), request(2)])
    with worker(redis_url) as made:
        wait_until(lambda: len(made.engine.rows) == 2)
        line = Queue("other", connection=connection, serializer=Serializer)
        line.enqueue("some.function", depends_on=fetch(connection, "b-0-1"), job_id="child")
        full()
        made.engine.end(made.engine.number("prompt 1"))
        wait_until(lambda: len(made.service._desk.endings) == 1)
    assert queued(connection) == ["b-0-1", "b-0-2"]


def test_an_idle_worker_of_a_full_redis_finds_rows_that_come_back(
    redis_url: str, connection: redis.Redis, full: Callable[[], None]
) -> None:
    enqueue(connection, [request(1)])
    Leases(connection, "dead", 2.0, 1 << 20).claim(1, [("q", 1)])
    with worker(redis_url, echo=True, maintenance_seconds=0.1):
        full()
        wait_until(lambda: counts(connection) == {"completed": 1})


def test_rows_of_a_dead_worker_run_on_the_living_one(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(number) for number in (1, 2, 3)])
    Leases(connection, "dead", 0.05, 1 << 20).claim(3, [("q", 3)])
    with worker(redis_url, echo=True, maintenance_seconds=0.1):
        wait_until(lambda: counts(connection) == {"completed": 3})
