"""Lines of a file <-> Requests and Results. A line is either good, or a BadRow that says why and where.

Owns the input shapes, custom_ids and output lines. What a field may be is fields.py's; files are lines.py's.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from producer import fields, wire
from producer.errors import RowError
from producer.lines import MAX_LINE_BYTES, Line, OnRead, read_lines
from producer.rules import clean, refusal, show
from producer.screen import safe_json

Format = Literal["jsonl", "text"]
ID_NAMES = ("custom_id", "id", "key", "request_id")
BATCH_NAMES = frozenset({"method", "url", "body"})
ENDPOINTS: Mapping[str, wire.Endpoint] = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
# The id of a line that is no JSON: good only where it stands first and whole, as every writer puts it.
LEADING_ID = re.compile(r'\s*\{\s*"(?:custom_id|id|key|request_id)"\s*:\s*("(?:[^"\\]|\\.)*"|-?\d+)\s*[,}]')
OPEN_STRING = re.compile(r'"(\w+)"\s*:\s*"(?:[^"\\]|\\.)*\\?\Z', re.DOTALL)
SURROGATE = re.compile("[\ud800-\udfff]")  # a byte of a file name that is no UTF-8
LARGE_DIGITS = 300
MAX_NAME = 400  # characters of a file's name in a custom_id


def _large_int(digits: str) -> int:
    """An integer of any length, about right; int() refuses thousands of digits, and so does every field."""
    left = len(digits) - LARGE_DIGITS
    return int(digits) if left <= 0 else int(digits[:LARGE_DIGITS]) << int(left * math.log2(10))


_decode = json.JSONDecoder().decode
_decode_large = json.JSONDecoder(
    parse_int=_large_int
).decode  # the hook would cost any row of token ids a lot


@dataclass(frozen=True, slots=True)
class BadRow:
    """A line that cannot be queued; ``failure.message`` names the line."""

    custom_id: str
    batch_id: str
    file: int
    line: int
    failure: wire.Failure

    def result(self, created: int) -> wire.Result:
        """The row's result, as if a worker had refused it; ``created`` in Unix seconds."""
        job_id = wire.make_job_id(self.batch_id, self.file, self.line)
        return wire.Result(custom_id=self.custom_id, job_id=job_id, created=created, failure=self.failure)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands. ``name``: the file's (file_names) when the batch has several, else empty."""

    batch_id: str
    file: int = 0
    line: int = 1
    name: str = ""

    @property
    def default_id(self) -> str:
        return f"{self.name}:line-{self.line}" if self.name else f"line-{self.line}"

    def bad(self, custom_id: str | None, error: RowError) -> BadRow:
        where = f"{self.name}, line {self.line}" if self.name else f"line {self.line}"
        failure = wire.Failure.of(error.code, f"{where}: {error.message}", error.param)
        return BadRow(custom_id or self.default_id, self.batch_id, self.file, self.line, failure)


def read_rows(
    path: str,
    *,
    batch_id: str,
    file_index: int = 0,
    format: Format = "jsonl",
    name: str = "",
    title: str = "",
    on_read: OnRead | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[wire.Request | BadRow]:
    """Every line of ``path`` that is not blank, in order, as a Request or a BadRow; constant memory.

    ``format`` text: each line is a prompt. ``name``: of its rows' file, see Place. ``title``: what people
    call the file, where that is not its path.
    Raises UsageError when the file cannot be read (lines.read_lines).
    """
    parse = parse_text if format == "text" else parse_line
    for line in read_lines(path, title=title, on_read=on_read, max_line_bytes=max_line_bytes):
        if not line.data or line.data.isspace():
            continue
        place = Place(batch_id, file_index, line.number, name)
        yield parse(line.data, place) if line.whole else _too_long(line, place, max_line_bytes)


def file_names(paths: Sequence[str]) -> list[str]:
    """What the files of a batch are called in custom_ids and messages: different files differently.

    A path need not be Unicode, a custom_id must be, and at most 512 characters. Where that makes two names
    the same, each bears its file's number; a file that is given twice is one file.
    """
    places = {path: number for number, path in reversed([*enumerate(paths, 1)])}
    names = {path: clean(SURROGATE.sub("\ufffd", path), MAX_NAME) for path in places}
    if len({*names.values()}) < len(names):
        names = {path: f"{name} (file {places[path]})" for path, name in names.items()}
    return [names[path] for path in paths]


def has_json(path: str, title: str) -> bool:
    """Whether any line of the file is JSON, good or bad; one too long to tell counts as such."""
    return any(not line.whole or _is_json(line.data) for line in read_lines(path, title=title))


def _is_json(data: bytes) -> bool:
    try:
        _load(data)
    except RowError:
        return False
    return True


def parse_line(data: bytes, place: Place) -> wire.Request | BadRow:
    """One JSONL line."""
    try:
        row = _load(data)
    except RowError as error:
        return place.bad(_leading_id(data), error)
    return parse_object(row, place)


def parse_text(data: bytes, place: Place) -> wire.Request | BadRow:
    """One line of a text file: a prompt."""
    try:
        prompt = _text(data.removesuffix(b"\n").removesuffix(b"\r"))
    except RowError as error:
        return place.bad(None, error)
    return _build({"prompt": prompt}, place.default_id, "completions", place)


def parse_object(row: Any, place: Place) -> wire.Request | BadRow:
    """A row in any of the three input shapes, already out of JSON (a Python caller's dict)."""
    custom_id = None
    try:
        if not isinstance(row, dict):
            raise RowError("invalid_json", f"a row is one JSON object, but this is {show(row)}")
        custom_id = _custom_id(row)
        values, endpoint = _values({name: value for name, value in row.items() if name not in ID_NAMES})
    except RowError as error:
        return place.bad(custom_id, error)
    except RecursionError:
        return place.bad(custom_id, _too_deep())
    return _build(values, custom_id or place.default_id, endpoint, place)


def _build(values: Mapping[str, Any], custom_id: str, endpoint: wire.Endpoint, place: Place) -> wire.Request:
    return wire.Request.build(
        values,
        custom_id=custom_id,
        batch_id=place.batch_id,
        file=place.file,
        line=place.line,
        endpoint=endpoint,
    )


def _values(row: Mapping[str, Any]) -> tuple[dict[str, Any], wire.Endpoint]:
    """The checked fields of a row without its id, and the endpoint that serves it."""
    values: dict[str, Any] = {}
    if BATCH_NAMES.isdisjoint(row):
        _collect_flat(row, values)
        fields.settle(values)
        return values, fields.endpoint_of(values)
    endpoint = _batch_endpoint(row)
    fields.collect(_object(row, "body"), fields.BODY, values)
    fields.settle(values)
    fields.check_endpoint(values, endpoint)
    return values, endpoint


def _collect_flat(row: Mapping[str, Any], values: dict[str, Any]) -> None:
    if row.get("sampling_params") is not None:
        fields.collect(_object(row, "sampling_params"), fields.PARAMETERS, values)
    fields.collect({name: row[name] for name in row if name != "sampling_params"}, fields.BODY, values)


def _batch_endpoint(row: Mapping[str, Any]) -> wire.Endpoint:
    """The endpoint of an OpenAI batch line, whose keys are checked too."""
    for name in row:
        if name not in BATCH_NAMES:
            text = f'"{clean(str(name))}" stands beside method, url and body: parameters belong into body'
            raise RowError("invalid_request", text, clean(str(name)))
    if row.get("method") != "POST":
        raise refusal("method", '"POST"', row.get("method"), code="invalid_request")
    url = row.get("url")
    if not isinstance(url, str):
        raise refusal("url", " or ".join(ENDPOINTS), url, code="invalid_request")
    if url not in ENDPOINTS:
        raise refusal("url", " or ".join(ENDPOINTS), url, code="unsupported_endpoint")
    return ENDPOINTS[url]


def _object(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    if not isinstance(value, dict):
        raise refusal(name, "an object", value, code="invalid_request")
    return value


def _custom_id(row: Mapping[str, Any]) -> str | None:
    """The row's id under any of its names; an integer becomes a string; None when there is none."""
    found: dict[str, Any] = {}
    for name in ID_NAMES:
        if (value := row.get(name)) is not None:
            if type(value) is int and value.bit_length() < 1024:
                value = str(value)
            fields.put(found, "custom_id", fields.CUSTOM_ID(value, name), name)
    return found.get("custom_id")


def _load(data: bytes) -> Any:
    text = _text(data.rstrip(b"\r\n"))  # of a string that is not closed it would be the fault
    try:
        return _parse(text)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise RowError("invalid_json", f"not JSON: {what} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep() from None


def _parse(text: str) -> Any:
    try:
        return _decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError:  # a number of thousands of digits, which the rule of its field refuses
        return _decode_large(text)


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        text = f"byte {error.start} is 0x{data[error.start]:02x}, which is not UTF-8: save the file as UTF-8"
        raise RowError("invalid_json", text) from None


def _leading_id(data: bytes) -> str | None:
    """The custom_id of a line that is not JSON, when it stands first in the line and is sound."""
    match = LEADING_ID.match(data[:4096].decode("utf-8", "replace"))
    if match is None or "\ufffd" in match[1]:
        return None
    try:
        return _custom_id({"custom_id": _decode(match[1])})
    except (ValueError, RowError):
        return None


def _too_deep() -> RowError:
    return RowError("invalid_json", "nested too deeply")


def _too_long(line: Line, place: Place, max_line_bytes: int) -> BadRow:
    """Of such a line only the head is known; the string that is still open at its end is what is so long."""
    field = OPEN_STRING.search(line.data.decode("utf-8", "replace"))
    name = clean(field[1]) if field else None
    text = f"{line.over:,} bytes, and a row may have {max_line_bytes:,}"
    text += f': "{name}" is too long' if name else ""
    return place.bad(_leading_id(line.data), RowError("line_too_long", text, name))


class Duplicates:
    """Which custom_ids a batch has used: the first row of an id wins. For checks without a store.

    ``names``: of the batch's files, as people are told of them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._first: dict[str, str] = {}

    def check(self, row: wire.Request) -> BadRow | None:
        """Remember ``row``, or say that its custom_id is taken."""
        first = self._first.setdefault(row.custom_id, row.job_id)
        return None if first == row.job_id else duplicate_row(row, first, self._names)


def duplicate_row(row: wire.Request, first_job_id: str, names: Sequence[str]) -> BadRow:
    """The failure of ``row``, whose custom_id belongs to the row with ``first_job_id``.

    ``names``: of the batch's files; told where there are several.
    """
    _, file, line = wire.parse_job_id(first_job_id)
    other = names[file] if file < len(names) else f"file {file + 1}"  # that nobody submitted: it is forged
    first = f"line {line}" if file == row.file else f"line {line} of {other}"
    text = f"custom_id {show(row.custom_id)} was first used on {first}, which wins"
    return refused_row(row, RowError("duplicate_custom_id", text, "custom_id"), names)


def refused_row(row: wire.Request, error: RowError, names: Sequence[str]) -> BadRow:
    """The failure of a row that is sound in itself; ``names`` as above."""
    name = names[row.file] if len(names) > 1 else ""
    return Place(row.batch_id, row.file, row.line, name).bad(row.custom_id, error)


def result_line(result: wire.Result) -> dict[str, Any]:
    """The OpenAI batch output line of a result."""
    line: dict[str, Any] = {"id": result.job_id, "custom_id": result.custom_id}
    failure = result.failure
    if failure is not None and failure.status_code is None:
        return line | {"response": None, "error": {"code": failure.code, "message": failure.message}}
    status_code = 200 if failure is None else failure.status_code
    body = _body(result) if failure is None else {"error": _error(failure)}
    return line | {
        "response": {"status_code": status_code, "request_id": result.job_id, "body": body},
        "error": None,
    }


def flat_line(result: wire.Result) -> dict[str, Any]:
    """The short output line: the first choice's text; a failed row has finish_reason error and its error."""
    line: dict[str, Any] = {"custom_id": result.custom_id}
    if result.failure is not None:
        ended = {"text": None, "finish_reason": "error", "usage": None}
        return line | ended | {"error": _error(result.failure)}
    choice = result.choices[0]
    answer = {"text": choice.text, "finish_reason": choice.finish_reason}
    return line | answer | {"usage": _usage(result.usage)}


def encode_line(line: Mapping[str, Any]) -> bytes:
    """An output line as bytes: ``\\n`` at its end, and nowhere else anything a reader might split at."""
    return safe_json(wire.dumps(line)).encode() + b"\n"


def _body(result: wire.Result) -> dict[str, Any]:
    """A chat.completion or text_completion body."""
    chat = result.endpoint == "chat"
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{result.job_id}",
        "object": "chat.completion" if chat else "text_completion",
        "created": result.created,
        "model": result.model,
        "choices": [_choice(choice, chat) for choice in result.choices],
        "usage": _usage(result.usage),
        "seed": result.seed,
    }


def _choice(choice: wire.Choice, chat: bool) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": choice.text}} if chat else {"text": choice.text}
    ended = {"logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
    return {"index": choice.index, **said, **ended}


def _usage(usage: wire.Usage | None) -> dict[str, int]:
    assert usage is not None, "an answered row has its usage"
    total = usage.prompt_tokens + usage.completion_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": total,
    }


def _error(failure: wire.Failure) -> dict[str, Any]:
    return {"code": failure.code, "message": failure.message, "param": failure.param}
