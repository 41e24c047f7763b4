"""The fields of a row: one table says which exist, what else they are called and which rule each obeys.

Both sides use it: the producer on input lines, the worker on what Redis gives. Must not know files or models.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from producer.errors import RowError
from producer.later import LATER
from producer.messages import messages
from producer.rules import (
    INT32_MAX,
    MAX_CHARACTERS,
    MAX_STOP_IDS,
    Integer,
    Matching,
    Number,
    Rule,
    Seed,
    Strings,
    Text,
    TokenIds,
    clean,
    flag,
    logit_bias,
)

Endpoint = Literal["chat", "completions"]

CUSTOM_ID = Text(1, 512)
BATCH_ID = Matching("[A-Za-z0-9_-]{1,64}", "1 to 64 letters, digits, _ or -")
PROMPTS: Mapping[str, Rule] = {
    "messages": messages,
    "prompt": Text(code="invalid_request"),
    "prompt_token_ids": TokenIds(least=1, code="invalid_request"),
}
SAMPLING: Mapping[str, Rule] = {
    "max_tokens": Integer(1),
    "min_tokens": Integer(0),
    "temperature": Number(0, 2),
    "top_p": Number(0, 1, above=True, hint="use 1.0 to keep every token, or temperature 0 for the likeliest"),
    "top_k": Integer(-1),
    "min_p": Number(0, 1),
    "repetition_penalty": Number(0, 10, above=True),
    "presence_penalty": Number(-2, 2),
    "frequency_penalty": Number(-2, 2),
    "no_repeat_ngram_size": Integer(0),
    "seed": Seed(),
    "stop": Strings(16, Text(1, MAX_CHARACTERS)),
    "include_stop_str_in_output": flag,
    "stop_token_ids": TokenIds(distinct=True, most=MAX_STOP_IDS),
    "ignore_eos": flag,
    "skip_special_tokens": flag,
    "logit_bias": logit_bias,
    "allowed_token_ids": TokenIds(least=1, distinct=True),
}
MAX_TIMEOUT_SECONDS = 30 * 24 * 3600
PARAMETERS: Mapping[str, Rule] = {**SAMPLING, **{name: later.rule for name, later in LATER.items()}}
BODY: Mapping[str, Rule] = {
    **PROMPTS,
    **PARAMETERS,
    "model": Text(1, 512),
    "timeout_s": Number(0, MAX_TIMEOUT_SECONDS, above=True),
}
ALIASES: Mapping[str, str] = {
    "input": "prompt",
    "text": "prompt",
    "input_ids": "prompt_token_ids",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "repeat_penalty": "repetition_penalty",
    "sampling_seed": "seed",
    "random_seed": "seed",
    "num_return_sequences": "n",
    "stop_sequences": "stop",
    "stop_words": "stop",
}
IGNORED = frozenset({"user", "store", "service_tier"})


def collect(given: Mapping[str, Any], table: Mapping[str, Rule], values: dict[str, Any]) -> None:
    """Check every entry of ``given`` by ``table`` and put it into ``values`` under its canonical name.

    null means unset. Raises RowError for an unknown name, a refused value, or two values for one field.
    """
    for name, value in given.items():
        field = ALIASES.get(name, name)
        rule = table.get(field)
        if rule is None:
            if name in IGNORED:
                continue
            raise unknown(name, table)
        if value is not None:
            put(values, field, rule(value, name), name)


def put(values: dict[str, Any], field: str, value: Any, name: str) -> None:
    """Set ``field``, known to the row as ``name``; the same field twice must say the same."""
    if field in values and values[field] != value:
        raise RowError("invalid_value", f"{name} differs from the other value given for {field}", name)
    values[field] = value


def settle(values: dict[str, Any]) -> None:
    """Check fields against each other; of the fields that come later drop the neutral and refuse the rest."""
    least, most = values.get("min_tokens", 0), values.get("max_tokens", INT32_MAX)
    if least > most:
        raise RowError("invalid_value", f"min_tokens is {least}, above max_tokens, {most}", "min_tokens")
    if values.get("n", 1) > 1 and values.get("temperature") == 0:
        text = f"n is {values['n']}, but at temperature 0 every sample is the same: raise temperature"
        raise RowError("invalid_value", text, "n")
    for name in sorted(values.keys() & LATER.keys()):
        if values.pop(name) not in LATER[name].neutral:
            text = f"{name} is not supported yet: take it out of the row"
            raise RowError("unsupported_parameter", text, name)


def endpoint_of(values: Mapping[str, Any]) -> Endpoint:
    """The endpoint that serves what is given: messages, prompt or prompt_token_ids, exactly one of them."""
    given = [name for name in PROMPTS if name in values]
    if not given:
        text = "no prompt: give one of messages, prompt and prompt_token_ids"
        raise RowError("invalid_request", text, "prompt")
    if len(given) > 1:
        text = f"{' and '.join(given)} are both given: a row takes exactly one prompt"
        raise RowError("invalid_request", text, given[1])
    return "chat" if given[0] == "messages" else "completions"


def check_endpoint(values: Mapping[str, Any], endpoint: Endpoint) -> None:
    """Raise RowError when ``endpoint`` does not serve the kind of prompt that is given."""
    if endpoint_of(values) != endpoint:
        wanted = "messages" if endpoint == "chat" else "prompt or prompt_token_ids"
        given = next(name for name in PROMPTS if name in values)
        raise RowError("invalid_request", f"the {endpoint} endpoint takes {wanted}, not {given}", given)


@lru_cache(maxsize=1024)  # a million rows may share one typing mistake
def suggestion(name: str, known: frozenset[str]) -> str:
    """`` (did you mean "temperature"?)`` or nothing."""
    close = difflib.get_close_matches(name[:64], known, n=1, cutoff=0.75)
    return f' (did you mean "{close[0]}"?)' if close else ""


def unknown(name: Any, table: Mapping[str, Rule]) -> RowError:
    """The error for a name no table has. A mistyped ``temprature`` must not waste a million rows."""
    known = frozenset(table) | {alias for alias, field in ALIASES.items() if field in table}
    shown = clean(str(name))
    return RowError("invalid_request", f'unknown field "{shown}"{suggestion(shown, known)}', shown)
