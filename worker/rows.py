"""Between a request and the engine: the row's token ids and resolved numbers there, a Result back.

Owns defaults, the limits only a model knows (context, vocabulary, name) and the wording of a row's end. Runs
in the parent process; must not know Redis or how the engine works.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from kernels.packed import MAX_ENDERS
from kernels.rows import RowParams, Status
from producer.errors import RowError, UsageError
from producer.fields import SAMPLING
from producer.rules import MAX_STOP_IDS, Rule, flag
from producer.wire import Choice, Failure, Request, Result, Usage, check_vocabulary, derived_seed
from worker.chat import Message
from worker.claims import at_its_line
from worker.genai_config import CONFIG_FILE
from worker.sequence import Output, Row
from worker.stops import StopScanner
from worker.tokenizer import Tokenizer

Value = TypeVar("Value")

MAX_EOS_IDS = MAX_ENDERS - MAX_STOP_IDS  # of a model: a row may have as many stop ids beside them
_SEARCH: Mapping[str, Rule] = {**SAMPLING, "do_sample": flag}
LIKELY_LENGTH = 8  # characters a token; few texts that fit the context have more

ENDINGS: Mapping[Status, tuple[str, str]] = {
    Status.INVALID_LOGITS: ("invalid_logits", "the model's logits for this row hold NaN or nothing finite"),
    Status.NO_ALLOWED_TOKEN: (
        "no_allowed_token",
        "the row's allowed_token_ids, logit_bias and min_tokens leave no token to choose",
    ),
    Status.CANCELLED: ("batch_cancelled", "the row was cancelled while it ran"),
    Status.TOO_LARGE: ("context_length_exceeded", "the row does not fit the worker's KV memory"),
    Status.FAILED: ("internal_error", "the model failed on this row"),
}


class Folder(Protocol):
    """What a model folder says of the model, as far as rows care."""

    @property
    def name(self) -> str: ...
    @property
    def aliases(self) -> Sequence[str]: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What a row gets where it says nothing. ``max_tokens`` None: what is left of the context."""

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def read(
        cls,
        sampling_defaults: Literal["openai", "model"],
        search: Mapping[str, Any],
        max_tokens: int | None = None,
    ) -> Defaults:
        """OpenAI's values, or the model folder's own where ``search`` of genai_config.json gives them.

        UsageError for a value that no row may have.
        """
        if sampling_defaults == "openai":
            return cls(max_tokens=max_tokens)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "do_sample")
        told = {name: search[name] for name in names if search.get(name) is not None}
        try:
            given = {name: _SEARCH[name](value, f"search.{name}") for name, value in told.items()}
        except RowError as error:
            raise UsageError(
                f"{CONFIG_FILE}: {error.message}. Mend it, or leave --sampling-defaults model out"
            ) from error
        if not given.pop("do_sample", True):
            given["temperature"] = 0.0
        return cls(max_tokens=max_tokens, **given)


class RowPreparer:
    """Turns requests into rows for one model. Keeps no row itself."""

    def __init__(self, folder: Folder, tokenizer: Tokenizer, defaults: Defaults) -> None:
        """UsageError for a model that has more EOS ids than rows can carry."""
        if (count := len(folder.eos_ids)) > MAX_EOS_IDS:
            raise UsageError(
                f"{CONFIG_FILE}: model.eos_token_id names {count} tokens; at most {MAX_EOS_IDS} are served"
            )
        self._folder = folder
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._names = {folder.name, *folder.aliases}

    def prepare(self, request: Request, row_id: int) -> PreparedRow:
        """The row, ready for the engine. RowError: the request asks for what this model cannot give."""
        if request.model is not None and request.model not in self._names:
            known = ", ".join(sorted(self._names))
            raise RowError("model_not_found", f"this queue serves {known}, not {request.model}", "model")
        check_vocabulary(request, self._folder.vocab_size)
        prompt = self._prompt(request)
        params = self._params(request, self._max_tokens(request, len(prompt)))
        given = request.sampling
        row = Row(row_id, prompt, params, given.stop is not None, open_ended=given.max_tokens is None)
        return PreparedRow(row, request, self._folder.name, self._tokenizer)

    def _prompt(self, request: Request) -> Sequence[int]:
        ids = self._encode(request)
        if not ids:
            reason = "the prompt is empty, and this model has no token that begins a text"
            raise RowError("invalid_request", reason, _prompt_field(request))
        if max(ids) >= self._folder.vocab_size:  # some tokenizers have tokens that their model lacks
            reason = f"the prompt needs token {max(ids)}, which the model's vocabulary does not have"
            raise RowError("invalid_request", reason, _prompt_field(request))
        return ids

    def _encode(self, request: Request) -> Sequence[int]:
        if request.prompt_token_ids is not None:
            return request.prompt_token_ids
        if request.messages is not None:
            return self._encode_chat(request.messages)
        text = request.prompt or ""
        self._check_text(text, "prompt", self._tokenizer.encode)
        return self._tokenizer.encode(text)

    def _encode_chat(self, messages: Sequence[Message]) -> Sequence[int]:
        template = self._tokenizer.template
        if template is None:
            reason = "the model has no chat template: send a prompt instead of messages"
            raise RowError("invalid_request", reason, "messages")
        self._check_fits(len(messages), "messages")  # each takes a token at least
        text = template.render(messages, self._folder.context_length * self._tokenizer.longest)
        self._check_text(text, "messages", self._tokenizer.encode_rendered)
        return self._tokenizer.encode_rendered(text)

    def _check_text(self, text: str, param: str, encode: Callable[[str], Sequence[int]]) -> None:
        """Spares the tokenizer what cannot fit: megabytes take it seconds, and the worker waits for it.

        A beginning of twice as many tokens as fit is too long for certain, wherever it was cut.
        """
        self._check_fits(math.ceil(len(text) / self._tokenizer.longest), param)
        size = LIKELY_LENGTH * self._folder.context_length
        while size < len(text):
            self._check_fits(len(encode(text[:size])) // 2, param)
            size *= 2

    def _check_fits(self, least_tokens: int, param: str) -> None:
        if least_tokens > (context := self._folder.context_length):
            reason = f"the prompt has at least {least_tokens} tokens; the model's context is {context} tokens"
            raise RowError("context_length_exceeded", reason, param)

    def _max_tokens(self, request: Request, num_prompt: int) -> int:
        """The row's max_tokens; without one what is left of the context, capped by the worker's default."""
        sampling, context = request.sampling, self._folder.context_length
        asked, room = sampling.max_tokens, context - num_prompt
        least = asked or max(1, sampling.min_tokens or 0)
        if least > room:
            output = f"max_tokens is {asked}" if asked else f"at least {least} more must fit"
            text = f"the prompt has {num_prompt} tokens and {output}; the model's context is {context} tokens"
            param = "max_tokens" if asked else _prompt_field(request)
            raise RowError("context_length_exceeded", text, param)
        return asked or min(room, max(least, self._defaults.max_tokens or room))

    def _params(self, request: Request, max_tokens: int) -> RowParams:
        given, default = request.sampling, self._defaults
        eos_ids = self._folder.eos_ids
        return RowParams(
            max_tokens=max_tokens,
            min_tokens=given.min_tokens or 0,
            temperature=_either(given.temperature, default.temperature),
            top_k=max(0, _either(given.top_k, default.top_k)),
            top_p=_either(given.top_p, default.top_p),
            min_p=_either(given.min_p, default.min_p),
            seed=derived_seed(request) if given.seed is None else given.seed,
            repetition_penalty=_either(given.repetition_penalty, default.repetition_penalty),
            presence_penalty=given.presence_penalty or 0.0,
            frequency_penalty=given.frequency_penalty or 0.0,
            no_repeat_ngram_size=given.no_repeat_ngram_size or 0,
            eos_ids=() if given.ignore_eos else eos_ids,
            held_ids=eos_ids if given.ignore_eos else (),
            stop_ids=given.stop_token_ids or (),
            logit_bias=given.logit_bias or (),
            allowed_ids=given.allowed_token_ids or (),
        )


class PreparedRow:
    """A row on its way: ``row`` for the engine; takes the engine's Outputs and makes the Result of them."""

    def __init__(self, row: Row, request: Request, model: str, tokenizer: Tokenizer) -> None:
        self.row = row
        self.request = request
        self._model = model
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._message = ""
        sampling = request.sampling
        self._skip_special = sampling.skip_special_tokens is not False
        self._include_stop = sampling.include_stop_str_in_output is True
        self._scanner = StopScanner(sampling.stop, self._include_stop) if sampling.stop else None
        self._stop: str | None = None  # the stop string that ended the row

    def again(self) -> PreparedRow:
        """The same row at its beginning, for another engine: what it had said is forgotten."""
        return PreparedRow(self.row, self.request, self._model, self._tokenizer)

    def feed(self, output: Output) -> bool:
        """Takes the row's new tokens. True, once: a stop string is complete and the engine may drop the row.

        Tokens that were sampled behind the completing one are not the row's: neither text nor usage has them.
        """
        if self._stop is not None:
            return False
        self._message = output.message
        if self._scanner is None:
            self._tokens += output.tokens
            return False
        return self._scan(self._scanner, output)

    def result(self, status: Status) -> Result:
        """What became of the row, which ended with ``status`` unless a stop string ended it before."""
        if self._stop is None and status in ENDINGS:
            code, reason = ENDINGS[status]
            failure = Failure.of(code, self._message or reason)
            return self._result(failure=at_its_line(self.request.job_id, failure))
        return self._result(
            endpoint=self.request.endpoint,
            model=self._model,
            choices=(self._choice(status),),
            usage=Usage(len(self.row.prompt), len(self._tokens)),
            seed=self.row.params.seed,
        )

    def _scan(self, scanner: StopScanner, output: Output) -> bool:
        ends_with_id = output.status in (Status.EOS, Status.STOP)  # no text that a stop string could match
        for index, token in enumerate(output.tokens, 1):
            self._tokens.append(token)
            if ends_with_id and index == len(output.tokens):
                break
            held = len(self._tokens) <= self.row.params.min_tokens
            self._stop = scanner.feed(self._tokenizer.written(token, self._skip_special), held)
            if self._stop is not None:
                return True
        return False

    def _result(self, **fields: Any) -> Result:
        request, created = self.request, int(time.time())
        return Result(custom_id=request.custom_id, job_id=request.job_id, created=created, **fields)

    def _choice(self, status: Status) -> Choice:
        if self._stop is not None and self._scanner is not None:
            return Choice(0, self._scanner.text.decode("utf-8", "replace"), "stop", self._stop)
        tokens = self._tokens
        hidden = status == Status.EOS or (status == Status.STOP and not self._include_stop)
        text = self._tokenizer.decode(tokens[:-1] if hidden else tokens, self._skip_special)
        if status == Status.LENGTH:
            return Choice(0, text, "length")
        assert status in (Status.EOS, Status.STOP), f"the row has not ended: {status!r}"
        return Choice(0, text, "stop", tokens[-1] if status == Status.STOP else None)


def _prompt_field(request: Request) -> str:
    """The field that gave the prompt."""
    fields = ("messages", "prompt", "prompt_token_ids")
    return next(name for name in fields if getattr(request, name) is not None)


def _either(given: Value | None, default: Value) -> Value:
    return default if given is None else given
