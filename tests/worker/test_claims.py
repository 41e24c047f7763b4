"""The allow-list: everything that is not exactly a row of ours is refused before anything of it is used."""

from __future__ import annotations

import json
import os
import pickle
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Queue, Webhook
from rq_rows import counts, enqueue, fetch, log, request, status
from service_fakes import run_burst

from producer.store import Serializer
from producer.wire import FUNCTION, Request, Result
from worker import claims
from worker.leases import Claim, Lease


def packed(call: Any) -> bytes:
    return zlib.compress(json.dumps(call).encode())


def call(*arguments: Any, function: str = FUNCTION, instance: Any = None, **keywords: Any) -> bytes:
    return packed([function, instance, list(arguments), keywords])


GOOD = request(1)


def claim(data: bytes = b"", **fields: bytes) -> Claim:
    empty = dict.fromkeys(
        (
            "success_callback",
            "failure_callback",
            "stopped_callback",
            "webhooks",
            "repeats_left",
            "rate_limit",
            "result_ttl",
            "failure_ttl",
            "deaths",
            "enqueued_at",
        ),
        b"",
    )
    values = {**empty, "status": b"queued", **fields}
    return Claim(Lease("q", "b-0-1", "e", 0.0), True, data or call(GOOD.encode()), **values)


def refusal(read: Claim) -> str:
    result = claims.read(read)
    assert isinstance(result, Result) and result.failure is not None
    assert result.job_id == "b-0-1"
    return f"{result.failure.code}: {result.failure.message}"


def test_a_row_of_ours_is_read() -> None:
    assert claims.read(claim()) == GOOD
    assert claims.read(claim(status=b"started")) == GOOD


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (claim(call("touch", function="os.system")), "'os.system' is not allowed"),
        (claim(call(GOOD.encode(), function=FUNCTION + " ")), "is not allowed"),
        (claim(call(GOOD.encode(), instance="x")), "one request and nothing else"),
        (claim(call(GOOD.encode(), GOOD.encode())), "one request and nothing else"),
        (claim(call()), "one request and nothing else"),
        (claim(call(GOOD.encode(), extra=1)), "one request and nothing else"),
        (claim(packed([FUNCTION, None, {"0": 1}, {}])), "one request and nothing else"),
        (claim(packed("text")), "not a call"),
        (claim(packed([FUNCTION])), "not a call"),
        (claim(zlib.compress(pickle.dumps((FUNCTION, None, (1,), {})))), "not JSON"),
        (claim(zlib.compress(b"[" * 100_000)), "not JSON"),
        (claim(b"\x78\x9cgarbage"), "not JSON"),
        (claim(b"plain text"), "not JSON"),
        (claim(call(GOOD.encode())[:-6]), "cut short"),
        (claim(b"99999999999"), "99,999,999,999 bytes"),
        (claim(b"9" * 5000), "not JSON"),
        (claim(success_callback=b"a.b"), "callbacks"),
        (claim(failure_callback=b"a.b"), "callbacks"),
        (claim(stopped_callback=b"a.b"), "callbacks"),
        (claim(webhooks=b"[]"), "webhooks"),
        (claim(repeats_left=b"1"), "repeats"),
        (claim(rate_limit=b"k"), "rate limits"),
        (claim(status=b"weird\xff"), "status"),
        (claim(status=b""), "status"),
        (claim(call({**GOOD.encode(), "v": 99})), "version"),
        (claim(call({**GOOD.encode(), "surprise": 1})), "surprise"),
        (claim(call("not an object")), "refused"),
        (claim(call(replace(GOOD, line=2).encode())), "belongs to row b-0-2"),
    ],
)
def test_everything_else_is_refused(bad: Claim, reason: str) -> None:
    said = refusal(bad)
    assert said.startswith("invalid_request: line 1: refused: ")
    assert reason in said


def test_a_few_kilobytes_that_unpack_to_gigabytes_are_refused_unpacked() -> None:
    packer = zlib.compressobj(9)
    bomb = b"".join([packer.compress(b" " * (1 << 20)) for _ in range(2 * (claims.MAX_BYTES >> 20))])
    bomb += packer.flush()
    assert len(bomb) < 1 << 20
    assert "unpacks to more" in refusal(claim(bomb))


def test_a_value_the_contract_refuses_fails_the_row_under_its_own_name() -> None:
    payload = GOOD.encode()
    payload["sampling"] = {"temperature": 3.0}
    result = claims.read(claim(call(payload)))
    assert isinstance(result, Result) and result.failure is not None
    assert (result.custom_id, result.failure.code, result.failure.param) == (
        "row-1",
        "invalid_value",
        "temperature",
    )
    assert result.failure.message == "line 1: temperature must be a number from 0 to 2, not 3.0"


def test_a_payload_of_another_row_lends_it_no_name() -> None:
    result = claims.read(claim(call(replace(GOOD, line=2, custom_id="row-2").encode())))
    assert isinstance(result, Result)
    assert result.custom_id == "b-0-1"


@pytest.mark.redis
def test_hostile_jobs_cost_nothing_else(
    redis_url: str, connection: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real RQ jobs: no function runs, no module is imported, no pickle is opened, the good row is done."""
    trap = tmp_path / "trap"
    (tmp_path / "evil_module.py").write_text(f"open({str(trap)!r}, 'w')\ndef run(*a): pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {trap}",)

    line = Queue("q", connection=connection, serializer=Serializer)
    (good,) = enqueue(connection, [request(1)])
    row = request(1).encode()
    line.enqueue("os.system", f"touch {trap}", job_id="system")
    line.enqueue("evil_module.run", job_id="module")
    for name, fields in {
        "callback": {"failure_callback_name": "evil_module.run", "failure_callback_timeout": "9"},
        "success": {"success_callback_name": "evil_module.run", "success_callback_timeout": "9"},
        "pickle": {"data": zlib.compress(pickle.dumps((FUNCTION, None, (Evil(),), {})))},
        "meta": {"meta": pickle.dumps(Evil()), "status": "odd"},
        "status": {"status": "weird"},
        "dates": {"created_at": "never", "ended_at": "\x00", "data": b"junk"},
        "instance": {"data": packed(["format", "{0.__class__}", ["x"], {}])},
    }.items():
        job = line.enqueue(FUNCTION, row, job_id=name)
        connection.hset(job.key, mapping=fields)
    line.enqueue(FUNCTION, row, job_id="hook", webhooks=[Webhook("http://127.0.0.1:9/", job_status="failed")])
    assert isinstance(claims.read(claim()), Request)
    run_burst(redis_url)
    assert counts(connection) == {"completed": 1}
    assert status(connection, good.id) == "finished"
    names = ["system", "module", "callback", "success", "pickle", "meta", "status", "dates", "instance"]
    names.append("hook")
    assert {name: status(connection, name) for name in names} == dict.fromkeys(names, "failed")
    assert not trap.exists()
    assert "evil_module" not in sys.modules
    reason = fetch(connection, "system").latest_result()
    assert reason is not None and "'os.system' is not allowed" in str(reason.exc_string)
    assert list(log(connection)) == ["b-0-1"]
    assert not connection.exists("rq:queue:q") and not connection.exists("rq:wip:q")
