"""Whatever the contract allows crosses the wire unchanged, through JSON bytes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from producer import fields, wire

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
NAME = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
IDS = st.integers(0, 2**31 - 1)
DISTINCT_IDS = st.lists(IDS, min_size=1, max_size=8, unique=True).map(tuple)
BIASES = st.dictionaries(IDS, st.floats(-100, 100), min_size=1, max_size=5).map(
    lambda bias: tuple(bias.items())
)

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(1000, 2**31 - 1),
    "min_tokens": st.integers(0, 1000),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0, 10, exclude_min=True),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "no_repeat_ngram_size": st.integers(0, 100),
    "seed": st.integers(0, 2**64 - 1),
    "stop": st.lists(NAME, min_size=1, max_size=16).map(tuple),
    "include_stop_str_in_output": st.booleans(),
    "stop_token_ids": DISTINCT_IDS,
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "logit_bias": BIASES,
    "allowed_token_ids": DISTINCT_IDS,
}
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant"]),
        "content": TEXT
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}), max_size=3),
    },
    optional={"name": TEXT},
)
PROMPTS = st.one_of(
    st.fixed_dictionaries({"messages": st.lists(MESSAGE, min_size=1, max_size=4).map(tuple)}),
    st.fixed_dictionaries({"prompt": TEXT}),
    st.fixed_dictionaries({"prompt_token_ids": st.lists(IDS, min_size=1).map(tuple)}),
)


@st.composite
def requests(draw: st.DrawFn) -> wire.Request:
    prompt = draw(PROMPTS)
    return wire.Request(
        custom_id=draw(NAME),
        batch_id=draw(st.from_regex("[A-Za-z0-9_-]{1,64}", fullmatch=True)),
        file=draw(st.integers(0, 1000)),
        line=draw(st.integers(1, 10**9)),
        endpoint="chat" if "messages" in prompt else "completions",
        model=draw(st.none() | NAME),
        timeout_s=draw(st.none() | st.floats(0, fields.MAX_TIMEOUT_SECONDS, exclude_min=True)),
        sampling=wire.Sampling(**draw(st.fixed_dictionaries({}, optional=VALUES))),
        **prompt,
    )


CHOICES = st.builds(
    wire.Choice,
    index=st.integers(0, 128),
    text=TEXT,
    finish_reason=st.sampled_from(["stop", "length"]),
    stop_reason=st.none() | TEXT | IDS,
)
ANSWERED = st.builds(
    wire.Result,
    custom_id=NAME,
    job_id=NAME,
    created=st.integers(0, 2**40),
    endpoint=st.sampled_from(["chat", "completions"]),
    model=NAME,
    choices=st.lists(CHOICES, min_size=1, max_size=3).map(tuple),
    usage=st.builds(wire.Usage, IDS, IDS),
    seed=st.integers(0, 2**64 - 1),
)
FAILED = st.builds(
    wire.Result,
    custom_id=NAME,
    job_id=NAME,
    created=st.integers(0, 2**40),
    failure=st.builds(wire.Failure, NAME, TEXT, st.none() | TEXT, st.none() | st.integers(400, 599)),
)


def through_json(obj: dict[str, Any]) -> Any:
    return json.loads(wire.dumps(obj).encode())


def test_every_sampling_field_is_drawn() -> None:
    assert VALUES.keys() == fields.SAMPLING.keys()


@given(requests())
def test_requests(request: wire.Request) -> None:
    assert wire.Request.decode(through_json(request.encode())) == request
    assert wire.Request.decode(request.encode()) == request  # without JSON between, too


@given(requests())
def test_unset_stays_off_the_wire(request: wire.Request) -> None:
    encoded = request.encode()
    assert None not in encoded.values()
    assert encoded.get("sampling", {}).keys() == {
        name for name in VALUES if getattr(request.sampling, name) is not None
    }


@given(ANSWERED | FAILED)
def test_results(result: wire.Result) -> None:
    assert wire.Result.decode(through_json(result.encode())) == result
