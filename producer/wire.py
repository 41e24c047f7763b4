"""THE CONTRACT: what travels between producer and worker. Standard library only.

Owns the nouns of a row (Sampling, Request, Result), their JSON form and VERSION.
Must not know Redis, RQ, files or models.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from producer.errors import WireError

VERSION = 1
FUNCTION = "livebatch.generate"  # the only RQ function name a worker accepts; never imported, never called

Endpoint = Literal["chat", "completions"]
Message = dict[str, Any]


def dumps(value: Any) -> str:
    """Compact JSON; non-ASCII text as itself; NaN and Infinity are errors (ValueError)."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one row is sampled. None means unset: the worker fills in its default, never the producer."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None


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
    sampling: Sampling = field(default_factory=Sampling)

    @property
    def job_id(self) -> str:
        """The RQ job id: derived, so that submitting the same line again names the same job."""
        return f"{self.batch_id}-{self.file}-{self.line}"
