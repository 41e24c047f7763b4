"""Jobs by somebody who can write to Redis: each is refused, recorded as failed, and costs nothing else.

What the check itself refuses is in test_claims.py; here real jobs lie in the queue between good rows, a whole
worker takes them, and RQ is asked what became of them.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis
from rq import Callback, Queue, Repeat
from rq.job import Job
from rq_rows import counts, enqueue, fetch, log, request, returned, status
from service_fakes import run_burst

from producer.store import Serializer, batch_key
from producer.wire import FUNCTION
from worker import claims

pytestmark = pytest.mark.redis

Row = dict[str, Any]
ROW = request(2).encode()  # the hostile one stands between two good ones


def payload(argument: Any) -> bytes:
    return zlib.compress(json.dumps([FUNCTION, None, [argument], {}]).encode())


def raw(text: str) -> bytes:
    """A payload whose request is this text."""
    return zlib.compress(f'["{FUNCTION}",null,[{text}],{{}}]'.encode())


def changed(**fields: Any) -> str:
    return json.dumps({**ROW, **fields})


def sampled(**fields: Any) -> str:
    return changed(sampling=fields)


def run_between_good_rows(url: str, connection: redis.Redis, spoil: Callable[[], Any]) -> None:
    """Rows 1 to 3 are queued, row 2 is made hostile; 1 and 3 end well whatever it is."""
    enqueue(connection, [request(1), request(2), request(3)])
    spoil()
    run_burst(url)
    assert status(connection, "b-0-1") == status(connection, "b-0-3") == "finished"
    assert [answer["choices"][0]["text"] for answer in returned(connection, "b-0-3")] == ["prompt 3"]
    assert not connection.exists("rq:queue:q") and not connection.exists("rq:wip:q")


def reason(connection: redis.Redis, job_id: str = "b-0-2") -> str:
    """Why RQ says that the job failed."""
    job = fetch(connection, job_id)
    assert job.get_status() == "failed"
    result = job.latest_result()
    assert result is not None
    return str(result.exc_string)


BAD_REQUESTS = {
    "a newer version": (changed(v=2), "wire version 2"),
    "no version": (json.dumps({key: value for key, value in ROW.items() if key != "v"}), "wire version null"),
    "a version that is true": (changed(v=True), "wire version true"),
    "an unknown field": (changed(__class__="os"), "__class__"),
    "no prompt": (json.dumps({key: value for key, value in ROW.items() if key != "prompt"}), "prompt"),
    "no object": ("7", "not a request"),
    "deep nesting": (changed(prompt=0).replace("0}", "[" * 900 + "]" * 900 + "}"), "prompt must be a string"),
    "deeper nesting": (changed(prompt=0).replace("0}", "[" * 200_000 + "}"), "not JSON"),
    "deep messages": (
        changed(prompt=None, messages=1).replace(": 1}", ": " + "[" * 900 + "]" * 900 + "}"),
        "",
    ),
    "a huge line": (changed(line=10**4000), "line must be"),
    "a huge number": (changed(prompt=0).replace("0}", "9" * 5000 + "}"), "not JSON"),
    "a huge seed": (sampled(seed=2**64), "seed must be an integer"),
    "a huge max_tokens": (sampled(max_tokens=10**300), "max_tokens must be an integer"),
    "max_tokens that is 1.0": (sampled(max_tokens=1.0), "max_tokens must be an integer"),
    "NaN": (sampled(temperature=float("nan")), "temperature must be a number"),
    "Infinity": (sampled(top_p=float("inf")), "top_p must be a number"),
    "a NaN bias": (sampled(logit_bias={"5": float("nan")}), "logit_bias"),
    "a bias for nothing": (sampled(logit_bias={"-1": 1}), "logit_bias"),
    "a NaN timeout": (changed(timeout_s=float("nan")), "timeout_s must be a number"),
    "a lone surrogate": (changed(prompt="\ud800"), "lone surrogate"),
    "an empty name": (changed(custom_id=""), "custom_id must be"),
    "a name of a megabyte": (changed(custom_id="x" * 2**20), "custom_id must be"),
    "a name that is a list": (changed(custom_id=["row-1"]), "custom_id must be"),
    "a name that UTF-8 cannot carry": (changed(custom_id="\udfff"), "custom_id must be"),
    "a path as batch": (changed(batch_id="../b"), "batch_id must be"),
    "a negative line": (changed(line=-2), "line must be"),
    "another line": (changed(line=3), "belongs to row b-0-3"),
    "another batch": (changed(batch_id="c"), "belongs to row c-0-2"),
    "keys given twice": ('{"line":2,' + changed(line=3)[1:], "belongs to row b-0-3"),
    "two prompts": (changed(prompt_token_ids=[1]), "prompt"),
    "ids beyond the vocabulary": (sampled(stop_token_ids=[10**6]), "vocabulary"),
    "a stop string of a megabyte": (sampled(stop=["x" * 2**20]), "stop[0] must be a string of 1 to 1024"),
    "a speaker's name of a megabyte": (
        changed(
            prompt=None,
            endpoint="chat",
            messages=[{"role": "user", "content": "x", "name": "x" * 2**20}],
        ),
        "messages[0].name must be a string of 0 to 1024",
    ),
    "another endpoint": (changed(endpoint="embeddings"), "endpoint must be"),
    "a model of its own": (changed(model="../../etc/passwd"), "this queue serves dummy"),
}


@pytest.mark.parametrize(("text", "said"), BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_requests_that_break_the_contract(
    redis_url: str, connection: redis.Redis, text: str, said: str
) -> None:
    run_between_good_rows(redis_url, connection, lambda: connection.hset("rq:job:b-0-2", "data", raw(text)))
    assert said in reason(connection)
    assert counts(connection) == {"completed": 2, "failed": 1}
    ended = log(connection)["b-0-2"]
    assert ended is not None and ended.failure is not None
    assert ended.custom_id in ("row-2", "b-0-2"), "never another row's name"


def through_rq(connection: redis.Redis, **how: Any) -> Job:
    """The row as RQ's own API queues it, with something that only RQ knows."""
    line = Queue("q", connection=connection, serializer=Serializer)
    connection.lrem(line.key, 1, "b-0-2")
    return line.enqueue(FUNCTION, ROW, job_id="b-0-2", **how)


RQ_FEATURES: dict[str, tuple[dict[str, Any], str]] = {
    "on_success": ({"on_success": Callback("os.abort")}, "callbacks"),
    "on_failure": ({"on_failure": Callback("os.abort")}, "callbacks"),
    "on_stopped": ({"on_stopped": Callback("os.abort")}, "callbacks"),
    "repeat": ({"repeat": Repeat(times=3)}, "repeats"),
}


@pytest.mark.parametrize(("how", "said"), RQ_FEATURES.values(), ids=RQ_FEATURES.keys())
def test_what_rq_could_do_besides(
    redis_url: str, connection: redis.Redis, how: dict[str, Any], said: str
) -> None:
    run_between_good_rows(redis_url, connection, lambda: through_rq(connection, **how))
    assert said in reason(connection)


def test_a_method_of_an_object(redis_url: str, connection: redis.Redis) -> None:
    """RQ's own way to queue one is a pickle: it is not opened."""

    def spoil() -> None:
        Queue("q", connection=connection).enqueue("".join, ["a"], job_id="method")

    run_between_good_rows(redis_url, connection, spoil)
    assert "not JSON" in reason(connection, "method")


def test_dependents_are_refused_like_anybody(redis_url: str, connection: redis.Redis) -> None:
    """A row releases the jobs that wait for it; what they would run is refused when their turn comes."""
    (waits_for,) = enqueue(connection, [request(2)])
    line = Queue("q", connection=connection, serializer=Serializer)
    line.enqueue("os.abort", depends_on=waits_for, job_id="child")
    line.enqueue(FUNCTION, ROW, depends_on=waits_for, job_id="sibling")
    run_burst(redis_url)
    assert status(connection, "b-0-2") == "finished"
    run_burst(redis_url)
    assert "'os.abort' is not allowed" in reason(connection, "child")
    assert "belongs to row b-0-2" in reason(connection, "sibling")


def of_what_waits(fields: dict[str, Any] | None) -> Callable[[redis.Redis], object]:
    """The dependent "odd" is this hash; None: no hash at all."""

    def spoil(connection: redis.Redis) -> None:
        connection.sadd("rq:job:b-0-2:dependents", "odd")
        if fields is None:
            connection.set("rq:job:odd", "text")
        else:
            connection.hset("rq:job:odd", mapping=fields)

    return spoil


DEPENDENTS: dict[str, Callable[[redis.Redis], object]] = {
    "a text for a set": lambda it: it.set("rq:job:b-0-2:dependents", "x"),
    "a hash for a set": lambda it: it.hset("rq:job:b-0-2:dependents", "x", "y"),
    "names that are none": lambda it: it.sadd("rq:job:b-0-2:dependents", b"\xff\xfe", "nobody", "a:b"),
    "a text for a job": of_what_waits(None),
    "a job with only a status": of_what_waits({"status": "deferred"}),
    "a job with odd fields": of_what_waits(
        {"status": "deferred", "data": b"x", "origin": "q", "created_at": "never", "dependency_ids": "{"}
    ),
    "a queue that is none": of_what_waits(
        {"status": "deferred", "data": b"x", "origin": b"\xff", "dependency_ids": '["b-0-2"]'}
    ),
}


@pytest.mark.parametrize("spoil", DEPENDENTS.values(), ids=DEPENDENTS.keys())
def test_odd_dependents_hold_up_no_row(
    redis_url: str, connection: redis.Redis, spoil: Callable[[redis.Redis], object]
) -> None:
    run_between_good_rows(redis_url, connection, lambda: spoil(connection))
    assert status(connection, "b-0-2") == "finished"
    assert counts(connection) == {"completed": 3}


def test_a_payload_that_is_missing(redis_url: str, connection: redis.Redis) -> None:
    run_between_good_rows(redis_url, connection, lambda: connection.hdel("rq:job:b-0-2", "data"))
    assert status(connection, "b-0-2") == "failed"
    said = connection.hget("rq:job:b-0-2", "exc_info")  # RQ itself reads no job without a payload
    assert said is not None and b"it has no payload" in zlib.decompress(said)
    assert counts(connection) == {"completed": 2, "failed": 1}


def test_a_payload_that_is_too_large(redis_url: str, connection: redis.Redis) -> None:
    """It never leaves Redis: the claim brings its size."""
    size = claims.MAX_BYTES + 1
    run_between_good_rows(
        redis_url, connection, lambda: connection.setrange("large", size - 1, "x") and grow(connection)
    )
    assert f"its payload of {size:,} bytes is larger than the {claims.MAX_BYTES:,} allowed" in reason(
        connection
    )


def grow(connection: redis.Redis) -> None:
    script = "redis.call('HSET', 'rq:job:b-0-2', 'data', redis.call('GETDEL', 'large'))"
    connection.eval(script, 0)


def test_fields_of_a_megabyte(redis_url: str, connection: redis.Redis) -> None:
    fields = dict.fromkeys(("meta", "description", "exc_info", "dependency_ids", "worker_name"), "x" * 2**20)
    run_between_good_rows(redis_url, connection, lambda: connection.hset("rq:job:b-0-2", mapping=fields))
    assert counts(connection) == {"completed": 3}


@pytest.mark.parametrize("kind", ["set", "rpush", "sadd", "xadd"])
def test_a_job_that_is_no_hash(redis_url: str, connection: redis.Redis, kind: str) -> None:
    """There is no job to fail: the row is dropped, and whoever follows the batch is told that it is gone."""

    def spoil() -> None:
        connection.delete("rq:job:b-0-2")
        values = ["*", "field", "value"] if kind == "xadd" else ["value"]
        connection.execute_command(kind, "rq:job:b-0-2", *values)

    run_between_good_rows(redis_url, connection, spoil)
    assert counts(connection) == {"completed": 2}


def test_keys_of_a_batch_that_are_something_else(redis_url: str, connection: redis.Redis) -> None:
    def spoil() -> None:
        connection.delete(batch_key("b"))
        connection.sadd(batch_key("b"), "odd")

    run_between_good_rows(redis_url, connection, spoil)
    assert status(connection, "b-0-2") == "finished"


def test_a_row_nobody_submitted_ends_in_no_batch(redis_url: str, connection: redis.Redis) -> None:
    """Sound payloads under ids of a batch that never had those rows, and of one there never was."""

    def spoil() -> None:
        line = Queue("q", connection=connection, serializer=Serializer)
        for forged in (replace(request(2), line=99), replace(request(2), batch_id="none")):
            line.enqueue(FUNCTION, forged.encode(), job_id=forged.job_id)

    run_between_good_rows(redis_url, connection, spoil)
    assert status(connection, "b-0-99") == status(connection, "none-0-2") == "finished"
    assert counts(connection) == {"completed": 3}
    assert set(log(connection)) == {"b-0-1", "b-0-2", "b-0-3"}
    assert not connection.keys("livebatch:batch:none*")


def test_a_row_that_ended_is_not_run_again_under_its_name(redis_url: str, connection: redis.Redis) -> None:
    """Somebody queues an ended row's id anew, with another prompt: the batch keeps the first end."""
    enqueue(connection, [request(1)])
    run_burst(redis_url)
    line = Queue("q", connection=connection, serializer=Serializer)
    line.enqueue(FUNCTION, request(1, prompt="forged").encode(), job_id="b-0-1")
    run_burst(redis_url)
    assert counts(connection) == {"completed": 1}
    assert set(log(connection)) == {"b-0-1"}


def test_a_queue_that_is_no_list_costs_the_others_nothing(redis_url: str, connection: redis.Redis) -> None:
    enqueue(connection, [request(1)], queue="r")
    connection.set("rq:queue:q", "not a list")
    run_burst(redis_url, queues=["q", "r"])
    assert counts(connection) == {"completed": 1}
