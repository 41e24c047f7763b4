"""The wire's nouns: what decode refuses, derived names and seeds, and that it is standard library only."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from producer import wire
from producer.errors import RowError, WireError

REQUEST: dict[str, Any] = {
    "v": wire.VERSION,
    "custom_id": "a",
    "batch_id": "b-1",
    "file": 0,
    "line": 3,
    "endpoint": "completions",
    "prompt": "hi",
}
RESULT: dict[str, Any] = {
    "v": wire.VERSION,
    "custom_id": "a",
    "job_id": "b-1-0-3",
    "created": 1_700_000_000,
    "endpoint": "chat",
    "model": "m",
    "seed": 2**64 - 1,
    "choices": [{"index": 0, "text": "hello", "finish_reason": "stop", "stop_reason": "\n"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 5},
}
FAILED: dict[str, Any] = {
    "v": wire.VERSION,
    "custom_id": "a",
    "job_id": "b-1-0-3",
    "created": 1,
    "failure": {"code": "worker_lost", "message": "gone"},
}
ABSENT = object()


def changed(obj: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in (obj | changes).items() if value is not ABSENT}


def test_request_decodes() -> None:
    request = wire.Request.decode(changed(REQUEST, sampling={"max_tokens": 5}, timeout_s=60, model="m"))
    assert request == wire.Request(
        custom_id="a",
        batch_id="b-1",
        file=0,
        line=3,
        endpoint="completions",
        prompt="hi",
        model="m",
        timeout_s=60.0,
        sampling=wire.Sampling(max_tokens=5),
    )
    assert request.job_id == "b-1-0-3"


@pytest.mark.parametrize(
    "obj",
    [
        None,
        [],
        "x",
        {},
        changed(REQUEST, v=wire.VERSION + 1),
        changed(REQUEST, v=True),
        changed(REQUEST, v=ABSENT),
        changed(REQUEST, v="1"),
        changed(REQUEST, custom_id=ABSENT),
        changed(REQUEST, custom_id=""),
        changed(REQUEST, custom_id=7),
        changed(REQUEST, custom_id="x" * 513),
        changed(REQUEST, custom_id="\ud83d"),
        changed(REQUEST, batch_id="a b"),
        changed(REQUEST, batch_id="x" * 65),
        changed(REQUEST, batch_id="a\n"),
        changed(REQUEST, batch_id=5),
        changed(REQUEST, file=-1),
        changed(REQUEST, file=True),
        changed(REQUEST, line=0),
        changed(REQUEST, line="3"),
        changed(REQUEST, endpoint="embeddings"),
        changed(REQUEST, endpoint=["chat"]),
        changed(REQUEST, sampling=[]),
        changed(REQUEST, sampling=None),
        changed(REQUEST, surprise=1),
    ],
)
def test_a_message_that_is_no_request(obj: Any) -> None:
    with pytest.raises(WireError):
        wire.Request.decode(obj)


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"sampling": {"temperature": 5}}, "invalid_value", "temperature"),
        ({"sampling": {"temprature": 1}}, "invalid_request", "temprature"),
        ({"sampling": {"n": 2}}, "unsupported_parameter", "n"),
        ({"sampling": {"prompt": "x"}}, "invalid_request", "prompt"),
        ({"sampling": {"min_tokens": 2, "max_tokens": 1}}, "invalid_value", "min_tokens"),
        ({"prompt": 5}, "invalid_request", "prompt"),
        ({"prompt": ABSENT}, "invalid_request", "prompt"),
        ({"messages": [{"role": "user", "content": "x"}]}, "invalid_request", "prompt"),
        ({"endpoint": "chat"}, "invalid_request", "prompt"),
        ({"timeout_s": 0}, "invalid_value", "timeout_s"),
        ({"model": ""}, "invalid_value", "model"),
    ],
)
def test_the_worker_checks_again(changes: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(RowError) as caught:
        wire.Request.decode(changed(REQUEST, **changes))
    assert (caught.value.code, caught.value.param) == (code, param)


def test_another_version_says_what_to_do() -> None:
    with pytest.raises(WireError, match=r"version 99.*run producer and worker of the same release"):
        wire.Request.decode(changed(REQUEST, v=99))


def test_results_decode() -> None:
    result = wire.Result.decode(RESULT)
    assert result.choices == (wire.Choice(0, "hello", "stop", "\n"),)
    assert result.usage == wire.Usage(3, 5)
    assert result.failure is None
    failed = wire.Result.decode(FAILED)
    assert failed.failure == wire.Failure("worker_lost", "gone", None, None)
    assert failed.choices == ()


@pytest.mark.parametrize(
    "obj",
    [
        None,
        changed(RESULT, v=0),
        changed(RESULT, job_id=ABSENT),
        changed(RESULT, created=-1),
        changed(RESULT, created=1.5),
        changed(RESULT, endpoint="x"),
        changed(RESULT, model=ABSENT),
        changed(RESULT, seed=-1),
        changed(RESULT, seed=ABSENT),
        changed(RESULT, usage=ABSENT),
        changed(RESULT, usage={"prompt_tokens": 1}),
        changed(RESULT, usage=[]),
        changed(RESULT, choices=[]),
        changed(RESULT, choices={}),
        changed(RESULT, choices=["x"]),
        changed(RESULT, choices=[{"index": 0, "text": "x", "finish_reason": "error"}]),
        changed(RESULT, choices=[{"index": 0, "text": "\ud83d", "finish_reason": "stop"}]),
        changed(RESULT, choices=[{"index": 0, "text": "x", "finish_reason": "stop", "stop_reason": 1.5}]),
        changed(RESULT, surprise=1),
        changed(FAILED, failure=None),
        changed(FAILED, failure={"code": "x"}),
        changed(FAILED, failure={"code": "", "message": "m"}),
        changed(FAILED, failure={"code": "x", "message": "m", "status_code": 200}),
        changed(FAILED, custom_id=ABSENT),
    ],
)
def test_a_message_that_is_no_result(obj: Any) -> None:
    with pytest.raises(WireError):
        wire.Result.decode(obj)


def test_failures_carry_the_status_of_their_code() -> None:
    assert wire.Failure.of("invalid_value", "m", "top_p") == wire.Failure("invalid_value", "m", "top_p", 400)
    assert wire.Failure.of("batch_cancelled", "m").status_code is None
    assert wire.Failure.of("never_heard_of", "m").status_code == 500
    assert wire.Failure.from_error(RowError("model_not_found", "m", "model")).status_code == 404


def test_job_ids() -> None:
    assert wire.parse_job_id(wire.make_job_id("a-0-1", 2, 33)) == ("a-0-1", 2, 33)
    for bad in ("", "a", "a-1", "a-1-x", "a-x-1", "a--1", "a-1-²", "a b-1-1", "a-1-1\n"):
        with pytest.raises(WireError):
            wire.parse_job_id(bad)


def test_derived_seeds_are_pinned_and_spread() -> None:
    request = wire.Request.decode(REQUEST)
    # Pinned: a resubmission under a later release must draw the same tokens.
    assert wire.derived_seed(request) == 8_840_636_066_272_008
    seeds = {wire.derived_seed(wire.Request.decode(changed(REQUEST, line=line))) for line in range(1, 2001)}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**53 for seed in seeds)
    assert max(seeds) > 2**52  # the high bits are used
    assert wire.derived_seed(wire.Request.decode(changed(REQUEST, batch_id="b"))) not in seeds


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": ABSENT, "prompt_token_ids": [1, 2, 100]}, "prompt_token_ids"),
        ({"sampling": {"stop_token_ids": [100]}}, "stop_token_ids"),
        ({"sampling": {"allowed_token_ids": [0, 100]}}, "allowed_token_ids"),
        ({"sampling": {"logit_bias": {"99": 1, "100": 1}}}, "logit_bias"),
    ],
)
def test_token_ids_outside_the_vocabulary(changes: dict[str, Any], param: str) -> None:
    request = wire.Request.decode(changed(REQUEST, **changes))
    wire.check_vocabulary(request, 101)
    with pytest.raises(RowError, match=r"vocabulary, ids 0 to 99, not 100") as caught:
        wire.check_vocabulary(request, 100)
    assert caught.value.param == param


def test_no_ids_no_complaint() -> None:
    wire.check_vocabulary(wire.Request.decode(REQUEST), 1)


def test_dumps_is_compact_and_strict() -> None:
    assert wire.dumps({"a": ["漢", 1.0]}) == '{"a":["漢",1.0]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        wire.dumps({"a": float("nan")})


def test_the_wire_needs_the_standard_library_alone() -> None:
    code = "import sys, json; import producer.wire; print(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    roots = {name.partition(".")[0] for name in json.loads(run.stdout)}
    bare = subprocess.run(
        [sys.executable, "-I", "-c", "import sys, json; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    already = {
        name.partition(".")[0] for name in json.loads(bare.stdout)
    }  # site's own, such as editable finders
    assert roots - already - sys.stdlib_module_names == {"producer"}
