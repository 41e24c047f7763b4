"""Lines to rows: the shapes, custom_ids, hostile lines, and the two case files with their stated outcomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from producer import jsonl, wire
from producer.errors import RowError
from producer.jsonl import BadRow, Duplicates, Place, parse_line, parse_object, parse_text, read_rows

DATA = Path(__file__).parent.parent / "data"
PLACE = Place("batch", 0, 7)
SMOLLM2_VOCABULARY = 49152


def good(row: Any) -> wire.Request:
    parsed = parse_line(row if isinstance(row, bytes) else json.dumps(row).encode(), PLACE)
    assert isinstance(parsed, wire.Request), parsed
    return parsed


def bad(row: Any) -> BadRow:
    parsed = parse_line(row if isinstance(row, bytes) else json.dumps(row).encode(), PLACE)
    assert isinstance(parsed, BadRow), parsed
    parsed.failure.message.encode()
    assert parsed.failure.message.startswith("line 7: ")
    assert len(parsed.failure.message) < 400
    return parsed


def batch_line(**changes: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    return {name: value for name, value in (line | changes).items() if value is not ...}


# --- the three shapes


def test_openai_batch_line() -> None:
    request = good(batch_line())
    assert request == wire.Request(
        custom_id="a",
        batch_id="batch",
        file=0,
        line=7,
        endpoint="chat",
        messages=({"role": "user", "content": "hi"},),
        sampling=wire.Sampling(max_tokens=3),
    )
    completion = good(batch_line(url="/v1/completions", body={"prompt": "x", "model": "m"}))
    assert (completion.endpoint, completion.prompt, completion.model) == ("completions", "x", "m")


def test_flat_line_and_sampling_params_say_the_same() -> None:
    flat = good({"custom_id": "a", "prompt": "x", "max_tokens": 3, "seed": 5, "timeout_s": 9})
    nested = good(
        {"custom_id": "a", "prompt": "x", "timeout_s": 9, "sampling_params": {"max_tokens": 3, "seed": 5}}
    )
    assert flat == nested
    assert flat.sampling == wire.Sampling(max_tokens=3, seed=5)
    assert good({"prompt": "x", "sampling_params": None}).sampling == wire.Sampling()


def test_a_field_beside_and_inside_sampling_params() -> None:
    assert good({"prompt": "x", "top_k": 5, "sampling_params": {"top_k": 5}}).sampling.top_k == 5
    assert bad({"prompt": "x", "top_k": 5, "sampling_params": {"top_k": 6}}).failure.param == "top_k"
    assert (
        bad({"prompt": "x", "min_tokens": 5, "sampling_params": {"max_tokens": 4}}).failure.param
        == "min_tokens"
    )


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"url": ...}, "invalid_request", "url"),
        ({"url": 5}, "invalid_request", "url"),
        ({"url": "/v1/embeddings"}, "unsupported_endpoint", "url"),
        ({"url": "/v1/responses"}, "unsupported_endpoint", "url"),
        ({"method": ...}, "invalid_request", "method"),
        ({"method": "GET"}, "invalid_request", "method"),
        ({"body": ...}, "invalid_request", "body"),
        ({"body": "oops"}, "invalid_request", "body"),
        ({"body": None}, "invalid_request", "body"),
        ({"body": {}}, "invalid_request", "prompt"),
        ({"body": {"prompt": "x"}}, "invalid_request", "prompt"),
        ({"url": "/v1/completions"}, "invalid_request", "messages"),
        ({"max_tokens": 5}, "invalid_request", "max_tokens"),
        (
            {"body": {"prompt": "x", "custom_id": "b"}, "url": "/v1/completions"},
            "invalid_request",
            "custom_id",
        ),
    ],
)
def test_a_bad_batch_line(changes: dict[str, Any], code: str, param: str) -> None:
    row = bad(batch_line(**changes))
    assert (row.custom_id, row.failure.code, row.failure.param) == ("a", code, param)


@pytest.mark.parametrize(
    ("row", "param"),
    [
        ({"custom_id": "a"}, "prompt"),
        ({"custom_id": "a", "prompt": None}, "prompt"),
        ({"custom_id": "a", "prompt": "x", "input_ids": [1]}, "prompt_token_ids"),
        ({"custom_id": "a", "prompt": "x", "sampling_params": []}, "sampling_params"),
        ({"custom_id": "a", "prompt": "x", "sampling_params": {"model": "m"}}, "model"),
        ({"custom_id": "a", "prompt": "x", "sampling_params": {"prompt": "y"}}, "prompt"),
        ({"custom_id": "a", "prompt": "x", "temprature": 1}, "temprature"),
    ],
)
def test_a_bad_flat_line(row: Any, param: str) -> None:
    parsed = bad(row)
    assert (parsed.custom_id, parsed.failure.code, parsed.failure.param) == ("a", "invalid_request", param)


def test_a_python_callers_dict_is_left_alone() -> None:
    row = {"id": 5, "prompt": "x", "stop": ["a"], "sampling_params": {"top_k": 3}}
    before = json.dumps(row)
    parsed = parse_object(row, PLACE)
    assert isinstance(parsed, wire.Request)
    assert json.dumps(row) == before


# --- custom_id


@pytest.mark.parametrize("name", ["custom_id", "id", "key", "request_id"])
@pytest.mark.parametrize(
    ("given_id", "kept"), [("a", "a"), (7, "7"), (-1, "-1"), (" \n漢", " \n漢"), ("x" * 512, "x" * 512)]
)
def test_custom_ids(name: str, given_id: Any, kept: str) -> None:
    assert good({name: given_id, "prompt": "x"}).custom_id == kept


@pytest.mark.parametrize("given_id", ["", "x" * 513, 1.5, True, [], {}, "\ud83d", 10**400])
def test_a_bad_custom_id_falls_back_to_the_line(given_id: Any) -> None:
    row = bad({"custom_id": given_id, "prompt": "x"})
    assert (row.custom_id, row.failure.code, row.failure.param) == ("line-7", "invalid_value", "custom_id")


def test_two_custom_ids() -> None:
    assert good({"id": 7, "custom_id": "7", "prompt": "x"}).custom_id == "7"
    assert bad({"id": "a", "custom_id": "b", "prompt": "x"}).failure.param == "id"
    assert good({"id": None, "prompt": "x"}).custom_id == "line-7"


def test_rows_without_an_id_are_named_by_their_line() -> None:
    assert good({"prompt": "x"}).custom_id == "line-7"
    named = parse_line(b'{"prompt":"x"}', Place("batch", 1, 7, "b.jsonl"))
    assert named.custom_id == "b.jsonl:line-7"
    broken = parse_line(b"{", Place("batch", 1, 7, "b.jsonl"))
    assert isinstance(broken, BadRow)
    assert broken.failure.message.startswith("b.jsonl, line 7: not JSON")


def test_a_line_that_is_cut_short_is_told_what_is_not_closed() -> None:
    assert (
        bad_line(b'{"prompt": "no end\n') == "line 7: not JSON: Unterminated string starting at character 11"
    )
    assert bad_line(b'{"prompt": "x"\r\n') == "line 7: not JSON: Expecting ',' delimiter at character 14"


def bad_line(data: bytes) -> str:
    found = parse_line(data, Place("batch", 1, 7))
    assert isinstance(found, BadRow)
    return found.failure.message


# --- hostile lines


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b'{"prompt":"x","seed":%b}', "invalid_value", "seed"),
        (b'{"prompt":"x","seed":-%b}', "invalid_value", "seed"),
        (b'{"prompt":"x","top_p":%b}', "invalid_value", "top_p"),
        (b'{"prompt":"x","top_p":%b.5}', "invalid_value", "top_p"),
        (b'{"prompt":"x","logit_bias":{"5":%b}}', "invalid_value", "logit_bias"),
        (b'{"prompt_token_ids":[1,%b]}', "invalid_request", "prompt_token_ids"),
        (b'{"prompt":%b}', "invalid_request", "prompt"),
        (b'{"prompt":"x","id":%b}', "invalid_value", "id"),
        (b'{"prompt":"x","sampling_params":{"n":%b}}', "invalid_value", "n"),
        (b'{"prompt":"x","metadata":{"a":%b}}', "unsupported_parameter", "metadata"),
        (b"[%b]", "invalid_json", None),
    ],
)
@pytest.mark.parametrize("digits", [5000, 1_000_000])
def test_a_number_of_thousands_of_digits_is_the_fault_of_its_field(
    line: bytes, code: str, param: str | None, digits: int
) -> None:
    failure = bad(line % (b"9" * digits)).failure
    assert (failure.code, failure.param) == (code, param)
    assert len(failure.message) < 200


def test_a_number_of_thousands_of_digits_in_an_ignored_field_is_ignored() -> None:
    line = b'{"prompt":"x","user":%b}' % (b"9" * 5000)
    assert isinstance(parse_line(line, PLACE), wire.Request)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b'{"a":1}x',
        b"[1,2,3]",
        b"null",
        b'"x"',
        b"5",
        b"\xff\xfe",
        b"\x00",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt":"x","seed":' + b"9" * 5000,
        b'{"prompt":"\xed\xa0\xbd"}',
        b"nan",
        b"NaN",
    ],
    ids=lambda line: repr(line[:12]),
)
def test_a_line_that_is_no_row(line: bytes) -> None:
    row = bad(line)
    assert (row.custom_id, row.failure.code) == ("line-7", "invalid_json")


def test_depth_short_of_the_parsers_limit_is_refused_too() -> None:
    for depth in (100, 400, 900):
        nested = b"[" * depth + b"]" * depth
        assert bad(b'{"prompt":' + nested + b"}").failure.param == "prompt"
        assert bad(b'{"prompt":"x","stop":' + nested + b"}").failure.param == "stop"
        schema = b'{"items":' * depth + b"{}" + b"}" * depth
        row = bad(
            b'{"prompt":"x","response_format":{"type":"json_schema","json_schema":{"schema":'
            + schema
            + b"}}}"
        )
        assert row.failure.code in ("invalid_json", "invalid_schema")


def test_two_endless_values_for_one_field_are_a_bad_row() -> None:
    one: dict[str, Any] = {}
    other: dict[str, Any] = {"a": one}
    one["a"] = other
    parsed = parse_object({"id": "a", "metadata": one, "sampling_params": {"metadata": other}}, PLACE)
    assert isinstance(parsed, BadRow)
    assert (parsed.custom_id, parsed.failure.code) == ("a", "invalid_json")
    assert parsed.failure.message == "line 7: nested too deeply"


def test_an_endless_schema_is_refused_on_both_sides() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    row = {
        "id": "a",
        "prompt": "x",
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }
    parsed = parse_object(row, PLACE)
    assert isinstance(parsed, BadRow)
    assert (parsed.custom_id, parsed.failure.code) == ("a", "invalid_schema")
    assert parsed.failure.message == "line 7: response_format must be at most 64 deep, not an object"
    request = wire.Request(custom_id="a", batch_id="b", file=0, line=1, endpoint="completions", prompt="x")
    hostile = request.encode() | {"sampling": {"response_format": row["response_format"]}}
    with pytest.raises(RowError, match="at most 64 deep"):
        wire.Request.decode(hostile)


def test_numbers_beyond_float() -> None:
    assert bad(b'{"prompt":"x","temperature":1e999}').failure.param == "temperature"
    assert bad(b'{"prompt":"x","temperature":' + b"1" * 400 + b"}").failure.param == "temperature"


@pytest.mark.parametrize(
    ("line", "custom_id"),
    [
        (b'{"custom_id":"a","prompt":"hi"', "a"),
        (b' { "id" : 7 , "prompt": "\xff"}', "7"),
        (b'{"custom_id":"a\\"\\u6f22","prompt":', 'a"漢'),
        (b'{"custom_id":"\xff","prompt":"x"}', "line-7"),
        (b'{"custom_id":"tru', "line-7"),
        (b'{"custom_id":"","prompt":', "line-7"),
        (b'{"custom_id":"\\ud83d","prompt":', "line-7"),
        (b'{"custom_id":"\\x","prompt":', "line-7"),
        (b'{"prompt":"x","custom_id":"a"', "line-7"),
    ],
)
def test_a_broken_line_keeps_a_custom_id_that_leads_it(line: bytes, custom_id: str) -> None:
    assert bad(line).custom_id == custom_id


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [*jsonl.ID_NAMES, *jsonl.BATCH_NAMES, "sampling_params", *jsonl.fields.BODY, *jsonl.fields.ALIASES]
)
ROWS = st.dictionaries(NAMES, JSON, max_size=6) | st.builds(
    lambda row, extra: {"prompt": "x"} | row | extra,
    st.dictionaries(NAMES, st.integers(-3, 3) | st.booleans() | st.text(max_size=3), max_size=3),
    st.dictionaries(NAMES, JSON, max_size=1),
)


@given(ROWS | JSON)
def test_any_json_is_a_request_the_worker_takes_or_a_bad_row(row: Any) -> None:
    parsed = parse_line(json.dumps(row).encode(), PLACE)
    if isinstance(parsed, wire.Request):
        assert wire.Request.decode(json.loads(wire.dumps(parsed.encode()).encode())) == parsed
    else:
        assert (
            json.loads(jsonl.encode_line(jsonl.result_line(parsed.result(1))))["custom_id"]
            == parsed.custom_id
        )


@given(st.binary(max_size=60))
def test_any_bytes_are_a_request_or_a_bad_row(line: bytes) -> None:
    for parse in (parse_line, parse_text):
        parsed = parse(line, PLACE)
        encoded = parsed.encode() if isinstance(parsed, wire.Request) else parsed.result(1).encode()
        wire.dumps(encoded).encode()


# --- text


def test_text_lines_are_prompts() -> None:
    for ending in (b"", b"\n", b"\r\n"):
        row = parse_text('  {"a": 漢}\t'.encode() + ending, PLACE)
        assert row == wire.Request(
            custom_id="line-7",
            batch_id="batch",
            file=0,
            line=7,
            endpoint="completions",
            prompt='  {"a": 漢}\t',
        )
    broken = parse_text(b"a\xff", PLACE)
    assert isinstance(broken, BadRow)
    assert broken.failure.code == "invalid_json"


# --- the case files


def test_reading_cases() -> None:
    duplicates = Duplicates(["reading.jsonl"])
    rows = list(read_rows(str(DATA / "reading.jsonl"), batch_id="b"))
    failed = {row.line: row for row in rows if isinstance(row, BadRow)}
    good_rows = [row for row in rows if isinstance(row, wire.Request)]
    twice = [row for row in map(duplicates.check, good_rows) if row is not None]

    assert [row.line for row in rows] == [1, *range(4, 21)]
    assert [row.custom_id for row in good_rows] == [
        "bom",
        "crlf",
        "u2028",
        "dup",
        "dup",
        "7",
        "line-17",
        "last",
    ]
    assert good_rows[2].prompt == "a\u2028b\x85c"
    assert {line: (row.custom_id, row.failure.code) for line, row in failed.items()} == {
        5: ("line-5", "invalid_json"),
        6: ("line-6", "invalid_json"),
        7: ("line-7", "invalid_json"),
        8: ("strbody", "invalid_request"),
        10: ("lone", "invalid_request"),
        11: ("badutf8", "invalid_json"),
        12: ("nourl", "invalid_request"),
        13: ("get", "invalid_request"),
        18: ("trunc", "invalid_json"),
        19: ("both", "invalid_request"),
    }
    for line, row in failed.items():
        assert row.failure.message.startswith(f"line {line}: ")
    assert [(row.line, row.failure.code) for row in twice] == [(15, "duplicate_custom_id")]
    assert twice[0].failure.message == 'line 15: custom_id "dup" was first used on line 14, which wins'


def _worker_refusal(request: wire.Request) -> RowError | None:
    try:
        wire.check_vocabulary(request, SMOLLM2_VOCABULARY)
    except RowError as error:
        return error
    return None


def test_values_cases() -> None:
    refused: dict[str, tuple[str, str | None]] = {}
    accepted = []
    for row in read_rows(str(DATA / "values.jsonl"), batch_id="b"):
        if isinstance(row, BadRow):
            refused[row.custom_id] = (row.failure.code, row.failure.param)
        elif error := _worker_refusal(row):
            refused[row.custom_id] = (error.code, error.param)
        else:
            accepted.append(row.custom_id)

    assert accepted == ["good"]
    assert len(refused) == 42
    special = {
        "t-nan": "temperature",
        "rp-inf": "repetition_penalty",
        "n-greedy": "n",
        "min>max": "min_tokens",
        "two-max": "max_completion_tokens",
    }
    for custom_id, (code, param) in refused.items():
        assert code in ("invalid_value", "invalid_schema", "invalid_request")
        assert param == special.get(custom_id, custom_id.partition("=")[0])
    assert {custom_id for custom_id, (code, _) in refused.items() if code == "invalid_schema"} == {
        custom_id for custom_id in refused if custom_id.startswith("response_format")
    }


def test_neighbours_leaks_and_stops_read() -> None:
    refused = {}
    for name in ("neighbours.jsonl.gz", "leaks.jsonl", "stops.jsonl"):
        rows = list(read_rows(str(DATA / name), batch_id="b"))
        refused |= {row.custom_id: row.failure.code for row in rows if isinstance(row, BadRow)}
        good_rows = [row for row in rows if isinstance(row, wire.Request)]
        refused |= {row.custom_id: error.code for row in good_rows if (error := _worker_refusal(row))}
    assert refused == {
        "nomsg": "invalid_request",
        "ids-neg": "invalid_request",
        "ids-oov": "invalid_request",
        "stopid-oov": "invalid_value",
        "n4": "unsupported_parameter",
        "lp": "unsupported_parameter",
    }


# --- duplicates


def test_the_first_row_of_a_custom_id_wins() -> None:
    duplicates = Duplicates(["a.jsonl", "b.jsonl"])
    first = good({"custom_id": "a", "prompt": "x"})
    assert duplicates.check(first) is None
    assert duplicates.check(first) is None  # the same row again is no duplicate
    other = parse_line(b'{"custom_id":"a","prompt":"y"}', Place("batch", 1, 2))
    assert isinstance(other, wire.Request)
    refused = duplicates.check(other)
    assert refused is not None
    assert (refused.line, refused.file, refused.custom_id) == (2, 1, "a")
    assert refused.failure == wire.Failure(
        "duplicate_custom_id",
        'b.jsonl, line 2: custom_id "a" was first used on line 7 of a.jsonl, which wins',
        "custom_id",
        400,
    )
