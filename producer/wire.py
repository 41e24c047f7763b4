"""THE CONTRACT: what travels between producer and worker. Standard library only.

Owns the nouns of a row (Sampling, Request, Result), their JSON form and VERSION.
Must not know Redis, RQ, files or models; what a value may be is fields.py's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from producer import fields as table
from producer.errors import RowError, WireError
from producer.rules import Integer, OneOf, Rule, Text, refusal, show

VERSION = 1
FUNCTION = "livebatch.generate"  # the only RQ function name a worker accepts; never imported, never called

Endpoint: TypeAlias = table.Endpoint  # "chat" | "completions"
Message = dict[str, Any]
FinishReason = Literal["stop", "length"]
_JOB_ID = re.compile(f"({table.BATCH_ID.pattern})-([0-9]{{1,10}})-([0-9]{{1,10}})")

# A row's own failure carries an HTTP status; what the batch did to it has none (response: null).
STATUS_CODES: Mapping[str, int | None] = {
    "invalid_json": 400,
    "line_too_long": 400,
    "invalid_request": 400,
    "invalid_value": 400,
    "invalid_schema": 400,
    "unsupported_parameter": 400,
    "unsupported_endpoint": 400,
    "duplicate_custom_id": 400,
    "context_length_exceeded": 400,
    "no_allowed_token": 400,
    "model_not_found": 404,
    "timeout": 408,
    "invalid_logits": 500,
    "internal_error": 500,
    "batch_cancelled": None,
    "batch_expired": None,
    "worker_lost": None,
}


def dumps(value: Any) -> str:
    """Compact JSON; non-ASCII text as itself; NaN and Infinity are errors (ValueError)."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one row is sampled. None means unset: the worker fills in its default, never the producer."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: tuple[tuple[int, float], ...] | None = None  # pairs (token id, bias)
    allowed_token_ids: tuple[int, ...] | None = None

    def encode(self) -> dict[str, Any]:
        """The fields that are set; ``logit_bias`` as an object with the ids as keys."""
        encoded = _set_fields(self, _SAMPLING_NAMES)
        if self.logit_bias is not None:
            encoded["logit_bias"] = {str(token): bias for token, bias in self.logit_bias}
        return encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One row. Exactly one of ``prompt``, ``messages`` and ``prompt_token_ids`` is set."""

    custom_id: str
    batch_id: str
    file: int  # index of the input file in the batch, from 0
    line: int  # line of that file, from 1
    endpoint: Endpoint
    prompt: str | None = None
    messages: Sequence[Message] | None = None
    prompt_token_ids: Sequence[int] | None = None
    model: str | None = None
    timeout_s: float | None = None  # seconds from the moment a worker takes the row
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def job_id(self) -> str:
        """The RQ job id: derived, so that submitting the same line again names the same job."""
        return make_job_id(self.batch_id, self.file, self.line)

    @classmethod
    def build(
        cls,
        values: Mapping[str, Any],
        *,
        custom_id: str,
        batch_id: str,
        file: int,
        line: int,
        endpoint: Endpoint,
    ) -> Request:
        """A request from checked field values (fields.collect, then fields.settle) and the row's identity."""
        return cls(
            custom_id=custom_id,
            batch_id=batch_id,
            file=file,
            line=line,
            endpoint=endpoint,
            sampling=Sampling(**{name: values[name] for name in values.keys() & table.SAMPLING.keys()}),
            **{name: values[name] for name in values.keys() & _OWN_NAMES},
        )

    def encode(self) -> dict[str, Any]:
        """A JSON-safe dict with ``v``; unset fields are left out."""
        encoded = {"v": VERSION, **_set_fields(self, _REQUEST_NAMES)}
        if sampling := self.sampling.encode():
            encoded["sampling"] = sampling
        return encoded

    @classmethod
    def decode(cls, obj: Any) -> Request:
        """Inverse of encode, and the worker's check of a row: nothing in Redis is trusted.

        Raises WireError when ``obj`` is no request of this version, RowError for a value that is refused.
        After a RowError the identity in ``obj`` (custom_id, batch_id, file, line) is sound.
        """
        _check_shape(obj, "request", _REQUEST_KEYS)
        identity = _read(obj, _IDENTITY_RULES)
        sampling = obj.get("sampling", {})
        if not isinstance(sampling, dict):
            raise WireError("the request's sampling is not an object")
        values: dict[str, Any] = {}
        table.collect({name: obj[name] for name in obj.keys() & _OWN_NAMES}, table.BODY, values)
        table.collect(sampling, table.PARAMETERS, values)
        table.settle(values)
        table.check_endpoint(values, identity["endpoint"])
        return cls.build(values, **identity)


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one row; ``completion_tokens`` counts every sampled token, the ending EOS too."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. ``stop_reason``: the stop string or stop id that ended it; None for EOS and length."""

    index: int
    text: str
    finish_reason: FinishReason
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a row has no answer. ``status_code`` None: the batch's doing, the row itself may be fine."""

    code: str
    message: str
    param: str | None
    status_code: int | None

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    @classmethod
    def of(cls, code: str, message: str, param: str | None = None) -> Failure:
        """A failure with the status code that belongs to ``code``; 500 for one the table does not have."""
        return cls(code, message, param, STATUS_CODES.get(code, 500))

    @classmethod
    def from_error(cls, error: RowError) -> Failure:
        return cls.of(error.code, error.message, error.param)


CANCELLED = Failure.of("batch_cancelled", "the batch was cancelled before this row ended")
EXPIRED = Failure.of("batch_expired", "the batch's time was over before this row ended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of one row: choices, model, usage and seed, or a failure."""

    custom_id: str
    job_id: str
    created: int  # Unix time in seconds
    endpoint: Endpoint | None = None
    model: str | None = None
    choices: tuple[Choice, ...] = ()
    usage: Usage | None = None
    seed: int | None = None
    failure: Failure | None = None

    def encode(self) -> dict[str, Any]:
        """A JSON-safe dict with ``v``; unset fields are left out."""
        encoded: dict[str, Any] = {"v": VERSION, **_set_fields(self, _RESULT_NAMES)}
        if self.failure is not None:
            return encoded | {"failure": _set_fields(self.failure, _FAILURE_NAMES)}
        encoded["choices"] = [_set_fields(choice, _CHOICE_NAMES) for choice in self.choices]
        encoded["usage"] = _set_fields(self.usage, _USAGE_NAMES)
        return encoded

    @classmethod
    def decode(cls, obj: Any) -> Result:
        """Inverse of encode. Raises WireError for anything that is no result of this version."""
        _check_shape(obj, "result", _RESULT_KEYS)
        return cls(**_read(obj, _FAILED_RULES if "failure" in obj else _ANSWERED_RULES))


def make_job_id(batch_id: str, file: int, line: int) -> str:
    return f"{batch_id}-{file}-{line}"


def parse_job_id(job_id: str) -> tuple[str, int, int]:
    """(batch id, file, line) of a job id. Raises WireError when it is none of ours."""
    match = _JOB_ID.fullmatch(job_id)
    if match is None:
        raise WireError(f"{show(job_id)} is not the id of a row")
    return match[1], int(match[2]), int(match[3])


def derived_seed(request: Request) -> int:
    """The seed of a row that gives none: the same whenever the same line of the same batch runs again.

    53 bits, not 64: results echo it, and JSON readers with numbers as doubles keep it exact.
    """
    name = f"{request.batch_id}/{request.file}/{request.line}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") >> 11


def check_vocabulary(request: Request, vocab_size: int) -> None:
    """Raise RowError for a token id the model does not have. The worker calls it: it knows the model."""
    sampling = request.sampling
    for name, code, ids in (
        ("prompt_token_ids", "invalid_request", request.prompt_token_ids),
        ("stop_token_ids", "invalid_value", sampling.stop_token_ids),
        ("allowed_token_ids", "invalid_value", sampling.allowed_token_ids),
        ("logit_bias", "invalid_value", [token for token, _ in sampling.logit_bias or ()]),
    ):
        if ids and max(ids) >= vocab_size:
            wanted = f"within the model's vocabulary, ids 0 to {vocab_size - 1}"
            raise refusal(name, wanted, max(ids), code=code)


def _set_fields(noun: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(noun, name)) is not None}


def _check_shape(obj: Any, noun: str, keys: Set[str]) -> None:
    if not isinstance(obj, dict):
        raise WireError(f"not a {noun}, but {show(obj)}")
    if type(version := obj.get("v")) is not int or version != VERSION:
        text = f"a {noun} of wire version {show(version)}, but this side speaks version {VERSION}"
        raise WireError(f"{text}: run producer and worker of the same release")
    if extra := obj.keys() - keys:
        raise WireError(f"a {noun} with the unknown field {show(min(extra, key=str))}")


def _read(
    obj: Any, required: Mapping[str, Rule], optional: Mapping[str, Rule] | None = None
) -> dict[str, Any]:
    if not isinstance(obj, dict):
        raise WireError(f"expected an object, found {show(obj)}")
    try:
        values = {name: rule(obj[name], name) for name, rule in required.items()}
        return values | {
            name: rule(obj[name], name) for name, rule in (optional or {}).items() if name in obj
        }
    except KeyError as error:
        raise WireError(f"the field {error} is missing") from None
    except RowError as error:
        raise WireError(error.message) from None


def _usage(value: Any, path: str) -> Usage:
    return Usage(**_read(value, _USAGE_RULES))


def _choices(value: Any, path: str) -> tuple[Choice, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise refusal(path, "a list of at least one choice", value)
    return tuple([Choice(**_read(choice, _CHOICE_RULES, {"stop_reason": _stop_reason})) for choice in value])


def _stop_reason(value: Any, path: str) -> str | int:
    return value if isinstance(value, str) else Integer(0)(value, path)


def _failure(value: Any, path: str) -> Failure:
    absent = {"param": None, "status_code": None}
    return Failure(**absent | _read(value, {"code": Text(1), "message": Text()}, _FAILURE_OPTIONAL))


_OWN_NAMES = frozenset({"prompt", "messages", "prompt_token_ids", "model", "timeout_s"})
_SAMPLING_NAMES = tuple(field.name for field in fields(Sampling))
_REQUEST_NAMES = tuple(field.name for field in fields(Request) if field.name != "sampling")
_REQUEST_KEYS = frozenset({"v", "sampling", *_REQUEST_NAMES})
_IDENTITY_RULES: Mapping[str, Rule] = {
    "custom_id": table.CUSTOM_ID,
    "batch_id": table.BATCH_ID,
    "file": Integer(0),
    "line": Integer(1),
    "endpoint": OneOf(("chat", "completions")),
}
_RESULT_NAMES = ("custom_id", "job_id", "created", "endpoint", "model", "seed")
_CHOICE_NAMES = tuple(field.name for field in fields(Choice))
_USAGE_NAMES = tuple(field.name for field in fields(Usage))
_FAILURE_NAMES = tuple(field.name for field in fields(Failure))
_USAGE_RULES: Mapping[str, Rule] = {"prompt_tokens": Integer(0), "completion_tokens": Integer(0)}
_CHOICE_RULES: Mapping[str, Rule] = {
    "index": Integer(0),
    "text": Text(),
    "finish_reason": OneOf(("stop", "length")),
}
_FAILURE_OPTIONAL: Mapping[str, Rule] = {"param": Text(), "status_code": Integer(400, 599)}
_RESULT_RULES: Mapping[str, Rule] = {
    "custom_id": table.CUSTOM_ID,
    "job_id": Text(1),
    "created": Integer(0, 2**63 - 1),
}
_FAILED_RULES: Mapping[str, Rule] = {**_RESULT_RULES, "failure": _failure}
_ANSWERED_RULES: Mapping[str, Rule] = {
    **_RESULT_RULES,
    "endpoint": _IDENTITY_RULES["endpoint"],
    "model": Text(),
    "choices": _choices,
    "usage": _usage,
    "seed": Integer(0, 2**64 - 1),
}
_RESULT_KEYS = frozenset({"v", *_ANSWERED_RULES, *_FAILED_RULES})
