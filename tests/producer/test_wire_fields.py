"""Every field of the contract: what it takes, what it refuses, and how the refusal reads."""

from __future__ import annotations

from dataclasses import fields as dataclass_fields
from typing import Any

import pytest

from producer import fields
from producer.errors import RowError
from producer.later import LATER
from producer.wire import STATUS_CODES, Sampling

NAN, INF = float("nan"), float("inf")
DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]


def check(**given: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    fields.collect(given, fields.BODY, values)
    fields.settle(values)
    return values


GOOD: list[tuple[str, Any, Any]] = [
    ("max_tokens", 1, 1),
    ("max_tokens", 2**31 - 1, 2**31 - 1),
    ("min_tokens", 0, 0),
    ("temperature", 0, 0.0),
    ("temperature", 2, 2.0),
    ("temperature", 1e-6, 1e-6),
    ("top_p", 1, 1.0),
    ("top_p", 1e-9, 1e-9),
    ("top_k", -1, -1),
    ("top_k", 0, 0),
    ("top_k", 2147483647, 2147483647),
    ("min_p", 0, 0.0),
    ("min_p", 1, 1.0),
    ("repetition_penalty", 10, 10.0),
    ("presence_penalty", -2, -2.0),
    ("frequency_penalty", 2, 2.0),
    ("no_repeat_ngram_size", 0, 0),
    ("seed", 0, 0),
    ("seed", 2**64 - 1, 2**64 - 1),
    ("seed", -1, None),
    ("stop", "x", ("x",)),
    ("stop", ["a", "漢"], ("a", "漢")),
    ("stop", ["x" * 1024] * 16, ("x" * 1024,) * 16),
    ("stop", [], None),
    ("include_stop_str_in_output", True, True),
    ("stop_token_ids", [5, 0, 5], (5, 0)),
    ("stop_token_ids", [], None),
    ("ignore_eos", False, False),
    ("skip_special_tokens", True, True),
    ("logit_bias", {"5": 100, 7: -100.0}, ((5, 100.0), (7, -100.0))),
    ("logit_bias", {}, None),
    ("allowed_token_ids", [260, 28, 260], (260, 28)),
    ("prompt", "", ""),
    ("prompt_token_ids", [0, 0], (0, 0)),
    ("messages", [{"role": "user", "content": ""}], ({"role": "user", "content": ""},)),
    ("model", "m", "m"),
    ("timeout_s", 0.5, 0.5),
]

BAD: dict[str, list[Any]] = {
    "max_tokens": [0, -1, "16", 1.5, 16.0, True, 2**31, 10**4000, NAN, [], {}],
    "min_tokens": [-1, 0.0, False, "0"],
    "temperature": [-0.1, 2.1, "1", True, NAN, INF, -INF, 10**400, [1], {}],
    "top_p": [0, -0.5, 1.5, True, NAN, "1"],
    "top_k": [-2, 1.5, True, "5", 2**31],
    "min_p": [-0.1, 2, NAN, False],
    "repetition_penalty": [0, -1, 10.1, INF, NAN, True],
    "presence_penalty": [3, -2.1, NAN, "0"],
    "frequency_penalty": [3, -2.1, NAN, None.__class__],
    "no_repeat_ngram_size": [-1, 2.0, True],
    "seed": [-2, 2**64, 1.5, "7", True],
    "stop": ["", [""], ["a", ""], ["x"] * 17, "x" * 1025, ["a", "x" * 1025], 5, {"a": 1}, [5], ["\ud83d"]],
    "include_stop_str_in_output": [1, 0, "true"],
    "stop_token_ids": [[-1], [1.0], [True], ["1"], 5, "5", [2**31], [None], [*range(65)]],
    "ignore_eos": [1, "yes"],
    "skip_special_tokens": [0, []],
    "logit_bias": [
        {str(token): 1 for token in range(1025)},
        {"AI": -100},
        {"-1": 1},
        {"5": 500},
        {"5": "1"},
        {"05": 1},
        {"²": 1},
        {"9" * 400: 1},
        {5: 1, "5": 1},
        {True: 1},
        {"5": NAN},
        [],
        5,
    ],
    "allowed_token_ids": [[], [-1], "260", [1.5], DEEP],
    "timeout_s": [0, -1, INF, NAN, True, "60", 10**9],
    "model": ["", 5, "x" * 513],
}

BAD_PROMPTS: dict[str, list[Any]] = {
    "prompt": [5, ["a"], {}, True, "x \ud83d y"],
    "prompt_token_ids": [[], [-5], [1, "2"], "12", [True], [0.0]],
    "messages": [
        [],
        {},
        "hi",
        ["hi"],
        [{}],
        [{"role": "user"}],
        [{"role": "usr", "content": "x"}],
        [{"role": 5, "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "\udfff"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": DEEP}],
        [{"role": "user", "content": "x", "name": 5}],
        [{"role": "user", "content": "x", "name": "x" * 1025}],
    ],
}


def test_the_table_and_the_dataclass_have_the_same_fields() -> None:
    assert tuple(fields.SAMPLING) == tuple(field.name for field in dataclass_fields(Sampling))


def test_every_field_is_tested_here() -> None:
    tested = {name for name, _, _ in GOOD}
    assert tested == fields.BODY.keys() - LATER.keys()
    assert tested == BAD.keys() | BAD_PROMPTS.keys()


@pytest.mark.parametrize(("name", "given", "kept"), GOOD)
def test_takes(name: str, given: Any, kept: Any) -> None:
    values = check(**{name: given})
    assert values == {name: kept}
    assert type(values[name]) is type(kept)


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [(name, value, "invalid_value") for name, values in BAD.items() for value in values]
    + [(name, value, "invalid_request") for name, values in BAD_PROMPTS.items() for value in values],
    ids=lambda value: repr(value)[:30] if not isinstance(value, list) else "list",
)
def test_refuses(name: str, value: Any, code: str) -> None:
    with pytest.raises(RowError) as caught:
        check(**{name: value})
    error = caught.value
    assert (error.code, error.param) == (code, name)
    assert name in error.message
    assert len(error.message) < 250
    error.message.encode()


@pytest.mark.parametrize("name", sorted(fields.BODY))
def test_null_is_unset(name: str) -> None:
    assert check(**{name: None}) == {}


@pytest.mark.parametrize(("alias", "name"), sorted(fields.ALIASES.items()))
def test_aliases(alias: str, name: str) -> None:
    good: dict[str, Any] = {"prompt": "x", "prompt_token_ids": [1], "repetition_penalty": 1.5, "stop": ["x"]}
    value = good.get(name, 1)
    assert check(**{alias: value}) == (check(**{name: value}))
    assert check(**{alias: value, name: value}) == check(**{name: value})


def test_an_alias_is_refused_under_the_name_that_was_written() -> None:
    with pytest.raises(RowError, match="max_new_tokens must be an integer from 1") as caught:
        check(max_new_tokens=0)
    assert caught.value.param == "max_new_tokens"


def test_two_names_that_differ() -> None:
    with pytest.raises(RowError) as caught:
        check(max_tokens=4, max_completion_tokens=5)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "max_completion_tokens")
    assert check(max_tokens=4, max_completion_tokens=None) == {"max_tokens": 4}


def test_the_message_says_what_was_given_and_what_is_right() -> None:
    with pytest.raises(RowError) as caught:
        check(top_p=0)
    assert caught.value.message == (
        "top_p must be a number above 0 and at most 1, not 0: "
        "use 1.0 to keep every token, or temperature 0 for the likeliest"
    )
    with pytest.raises(RowError, match=r"stop\[1\] must be a string of 1 to 1024 characters, not \"\""):
        check(stop=["a", ""])
    with pytest.raises(RowError, match=r"messages\[0\]\.name must be a string of 0 to 1024 characters, not"):
        check(messages=[{"role": "user", "content": "x", "name": "n" * 10**6}])
    with pytest.raises(RowError, match=r"messages\[0\]\.role must be one of system, .*, not \"usr\""):
        check(messages=[{"role": "usr", "content": "x"}])
    with pytest.raises(RowError, match="character 2 is the lone surrogate U\\+D83D"):
        check(prompt="x \ud83d y")
    with pytest.raises(RowError, match="at least one message, not an empty list"):
        check(messages=[])


def test_min_tokens_within_max_tokens() -> None:
    assert check(min_tokens=4, max_tokens=4) == {"min_tokens": 4, "max_tokens": 4}
    assert check(min_tokens=4) == {"min_tokens": 4}
    with pytest.raises(RowError, match="min_tokens is 9, above max_tokens, 4") as caught:
        check(min_tokens=9, max_tokens=4)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "min_tokens")


@pytest.mark.parametrize("name", ["temprature", "max_token", "stop_token_id", "random_sed", "temperature "])
def test_a_mistyped_name_gets_a_suggestion(name: str) -> None:
    with pytest.raises(RowError, match=r"unknown field .* \(did you mean") as caught:
        check(**{name: 1})
    assert (caught.value.code, caught.value.param) == ("invalid_request", name)


@pytest.mark.parametrize("name", ["frobnicate", "\ud83d", "x" * 10**6, ""])
def test_an_unknown_name_is_named_even_when_null(name: str) -> None:
    with pytest.raises(RowError, match="unknown field") as caught:
        check(**{name: None})
    assert caught.value.param is not None
    assert len(caught.value.param.encode()) <= 60


def test_an_unhandy_key_from_a_python_caller_is_named() -> None:
    with pytest.raises(RowError, match='unknown field "5"'):
        fields.collect({5: 1}, fields.BODY, {})  # type: ignore[dict-item]


def test_what_is_tolerated_is_ignored() -> None:
    assert check(user="u", store=True, stream=False, service_tier="flex") == {}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, later in LATER.items() for v in later.neutral])
def test_a_later_field_that_asks_for_nothing_passes(name: str, value: Any) -> None:
    assert check(**{name: value}) == {}


LATER_ASKED: dict[str, Any] = {
    "n": 2,
    "logprobs": True,
    "top_logprobs": 5,
    "bad_words": ["x"],
    "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    "structured_outputs": {"regex": "x"},
    "chat_template_kwargs": {"enable_thinking": False},
    "priority": 5,
    "metadata": {"a": "b"},
    "truncate_prompt_tokens": 5,
    "stream": True,
    "best_of": 2,
    "use_beam_search": True,
    "num_beams": 4,
    "echo": True,
}


@pytest.mark.parametrize("name", sorted(LATER))
def test_a_later_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(RowError) as caught:
        check(**{name: LATER_ASKED.get(name, "x")})
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", name)
    assert f"{name} is not supported yet" in caught.value.message


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("n", 0, "invalid_value"),
        ("n", 129, "invalid_value"),
        ("logprobs", 21, "invalid_value"),
        ("logprobs", "x", "invalid_value"),
        ("top_logprobs", 21, "invalid_value"),
        ("bad_words", [""], "invalid_value"),
        ("chat_template_kwargs", [], "invalid_value"),
        ("stream", "no", "invalid_value"),
        ("response_format", "json", "invalid_schema"),
        ("response_format", {"type": "nope"}, "invalid_schema"),
        ("response_format", {"type": "json_schema"}, "invalid_schema"),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": 5}}, "invalid_schema"),
    ],
)
def test_a_later_field_is_checked_first(name: str, value: Any, code: str) -> None:
    with pytest.raises(RowError) as caught:
        check(**{name: value})
    assert (caught.value.code, caught.value.param) == (code, name)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "nope"},
        {"type": ["string", "nope"]},
        {"type": 5},
        {"properties": {"a": {"type": "nope"}}},
        {"items": {"type": "nope"}},
        {"anyOf": [True, {"type": "nope"}]},
        {"$defs": {"a": {"items": {"type": "nope"}}}},
        {"items": 5},
    ],
)
def test_a_schema_that_is_none(schema: Any) -> None:
    with pytest.raises(RowError) as caught:
        check(response_format={"type": "json_schema", "json_schema": {"schema": schema}})
    assert (caught.value.code, caught.value.param) == ("invalid_schema", "response_format")


def test_many_samples_of_a_greedy_row() -> None:
    with pytest.raises(RowError) as caught:
        check(n=2, temperature=0)
    assert (caught.value.code, caught.value.param) == ("invalid_value", "n")


def test_messages() -> None:
    kept = check(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": "hi", "name": "ann", "refusal": None, "tool_calls": None},
        ]
    )["messages"]
    assert kept[1] == {"role": "user", "content": "hi", "name": "ann"}
    assert kept[0]["content"] == [{"type": "text", "text": "Be brief."}]
    with pytest.raises(RowError, match=r"messages\[0\]\.tool_calls is not supported") as caught:
        check(messages=[{"role": "assistant", "content": "x", "tool_calls": [{}]}])
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "messages")


@pytest.mark.parametrize(
    ("values", "endpoint"),
    [
        ({"messages": ()}, "chat"),
        ({"prompt": ""}, "completions"),
        ({"prompt_token_ids": (1,)}, "completions"),
    ],
)
def test_the_prompt_decides_the_endpoint(values: dict[str, Any], endpoint: fields.Endpoint) -> None:
    assert fields.endpoint_of(values) == endpoint
    fields.check_endpoint(values, endpoint)
    with pytest.raises(RowError, match="endpoint takes"):
        fields.check_endpoint(values, "chat" if endpoint == "completions" else "completions")


@pytest.mark.parametrize(
    "values", [{}, {"prompt": "a", "messages": ()}, {"prompt": "a", "prompt_token_ids": (1,)}]
)
def test_exactly_one_prompt(values: dict[str, Any]) -> None:
    with pytest.raises(RowError) as caught:
        fields.endpoint_of(values)
    assert caught.value.code == "invalid_request"


def test_every_code_raised_here_has_a_status() -> None:
    raised = {"invalid_value", "invalid_request", "invalid_schema", "unsupported_parameter"}
    assert raised <= STATUS_CODES.keys()
