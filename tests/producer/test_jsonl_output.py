"""Results to output lines: what a reader of OpenAI batch files expects, and bytes no reader can break at."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from producer import wire
from producer.jsonl import encode_line, flat_line, result_line

ANSWER = wire.Result(
    custom_id="a",
    job_id="b-0-3",
    created=1_700_000_000,
    endpoint="chat",
    model="m",
    choices=(wire.Choice(0, "hello", "stop", "\n"),),
    usage=wire.Usage(3, 5),
    seed=7,
)
USAGE = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


def failed(code: str, param: str | None = None) -> wire.Result:
    return wire.Result(
        custom_id="a", job_id="b-0-3", created=1, failure=wire.Failure.of(code, "because", param)
    )


def test_chat_line() -> None:
    assert result_line(ANSWER) == {
        "id": "b-0-3",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "b-0-3",
            "body": {
                "id": "chatcmpl-b-0-3",
                "object": "chat.completion",
                "created": 1_700_000_000,
                "model": "m",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "hello"},
                        "logprobs": None,
                        "finish_reason": "stop",
                        "stop_reason": "\n",
                    }
                ],
                "usage": USAGE,
                "seed": 7,
            },
        },
        "error": None,
    }


def test_completion_line() -> None:
    body = result_line(replace(ANSWER, endpoint="completions"))["response"]["body"]
    assert (body["id"], body["object"]) == ("cmpl-b-0-3", "text_completion")
    assert body["choices"] == [
        {"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": "\n"}
    ]


def test_a_rows_own_failure_is_a_response() -> None:
    assert result_line(failed("invalid_value", "top_p")) == {
        "id": "b-0-3",
        "custom_id": "a",
        "response": {
            "status_code": 400,
            "request_id": "b-0-3",
            "body": {"error": {"code": "invalid_value", "message": "because", "param": "top_p"}},
        },
        "error": None,
    }


@pytest.mark.parametrize("code", ["batch_cancelled", "batch_expired", "worker_lost"])
def test_the_batchs_doing_is_an_error_without_a_response(code: str) -> None:
    assert result_line(failed(code)) == {
        "id": "b-0-3",
        "custom_id": "a",
        "response": None,
        "error": {"code": code, "message": "because"},
    }


def test_flat_lines() -> None:
    assert flat_line(ANSWER) == {"custom_id": "a", "text": "hello", "finish_reason": "stop", "usage": USAGE}
    assert flat_line(failed("invalid_value", "top_p")) == {
        "custom_id": "a",
        "text": None,
        "finish_reason": "error",
        "usage": None,
        "error": {"code": "invalid_value", "message": "because", "param": "top_p"},
    }


def test_a_line_is_one_line_for_every_reader() -> None:
    text = "".join(map(chr, range(0x20))) + '\x7f\x85\u2028\u2029漢🦙"\\'
    line = encode_line(flat_line(replace(ANSWER, choices=(wire.Choice(0, text, "length"),))))
    assert line.endswith(b"}\n")
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line)["text"] == text
    assert "漢🦙".encode() in line


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "requests.md"


def test_the_documents_output_lines_are_what_is_written() -> None:
    """A row that completed, one that failed, one that was cancelled; then the first two as flat lines."""
    top_p = "top_p must be a number above 0 and at most 1, not 7: use 1.0 to keep every token"
    message = f"line 2: {top_p}, or temperature 0 for the likeliest"
    bad = wire.Failure.of("invalid_value", message, "top_p")
    cancelled = wire.Failure.of("batch_cancelled", "the batch was cancelled before this row ended")
    answered = wire.Result(
        custom_id="a",
        job_id="b1-0-1",
        created=1764000000,
        endpoint="chat",
        model="smollm2-135m",
        choices=(wire.Choice(0, "Hello!", "stop"),),
        usage=wire.Usage(31, 3),
        seed=5187912340023,
    )
    refused = wire.Result(custom_id="b", job_id="b1-0-2", created=1, failure=bad)
    dropped = wire.Result(custom_id="c", job_id="b1-0-3", created=1, failure=cancelled)
    text = DOCUMENT.read_text()
    shown = [
        json.loads(line)
        for block in text.split("```json\n")[1:]
        for line in block.split("```")[0].splitlines()
    ]
    assert shown == [*map(result_line, (answered, refused, dropped)), *map(flat_line, (answered, refused))]
