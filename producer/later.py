"""Fields that are known but not served yet: the value is checked, then the field is refused by name.

Owns that list and the values that ask for nothing (``n: 1``), which pass. An entry leaves once it is served.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from producer.rules import INT32_MAX, Integer, Rule, Strings, anything, flag, json_object, refusal

SCHEMA_TYPES = frozenset({"object", "array", "string", "number", "integer", "boolean", "null"})
MAX_SCHEMA_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Later:
    """A field that is checked by ``rule`` and refused unless its value is one of ``neutral``."""

    rule: Rule = anything
    neutral: tuple[Any, ...] = ()


def flag_or_count(value: Any, path: str) -> bool | int:
    """``logprobs``: chat rows give a boolean, completion rows a number."""
    return value if isinstance(value, bool) else Integer(0, 20)(value, path)


def response_format(value: Any, path: str) -> Mapping[str, Any]:
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in ("text", "json_object", "json_schema"):
        wanted = 'an object whose type is "text", "json_object" or "json_schema"'
        raise refusal(path, wanted, value if kind is None else kind, code="invalid_schema")
    if kind == "json_schema":
        outer = value.get("json_schema")
        schema = outer.get("schema") if isinstance(outer, Mapping) else None
        check_schema(schema, f"{path}.json_schema.schema")
    return dict(value)


def check_schema(schema: Any, path: str, depth: int = 0) -> None:
    """Refuse what no JSON Schema can be: neither object nor boolean, or of a type that does not exist."""
    if isinstance(schema, bool):
        return
    if depth > MAX_SCHEMA_DEPTH:  # the worker reads schemas too, and must not run out of stack
        raise refusal("response_format", f"at most {MAX_SCHEMA_DEPTH} deep", schema, code="invalid_schema")
    if not isinstance(schema, Mapping):
        raise refusal(path, "a JSON Schema, an object", schema, code="invalid_schema")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not isinstance(kind, str) or kind not in SCHEMA_TYPES:
            wanted = "one of " + ", ".join(sorted(SCHEMA_TYPES))
            raise refusal(f"{path}.type", wanted, kind, code="invalid_schema")
    for name, inner in _inner_schemas(schema):
        check_schema(inner, f"{path}.{name}", depth + 1)


def _inner_schemas(schema: Mapping[str, Any]) -> list[tuple[str, Any]]:
    inner = [(key, schema[key]) for key in ("items", "not", "additionalProperties") if key in schema]
    for key in ("properties", "$defs", "definitions", "patternProperties"):
        if isinstance(schema.get(key), Mapping):
            inner += [(f"{key}.{name}", value) for name, value in schema[key].items()]
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(schema.get(key), list):
            inner += [(f"{key}[{i}]", value) for i, value in enumerate(schema[key])]
    return inner


LATER: Mapping[str, Later] = {
    # Planned: the contract's own fields.
    "n": Later(Integer(1, 128), (1,)),
    "logprobs": Later(flag_or_count, (False,)),
    "top_logprobs": Later(Integer(0, 20), (0,)),
    "bad_words": Later(Strings(INT32_MAX)),
    "response_format": Later(response_format, ({"type": "text"},)),
    "structured_outputs": Later(json_object),
    "guided_json": Later(),
    "guided_regex": Later(),
    "guided_choice": Later(),
    "guided_grammar": Later(),
    "chat_template_kwargs": Later(json_object, ({},)),
    "priority": Later(Integer(-INT32_MAX), (0,)),
    "metadata": Later(json_object, ({},)),
    "truncate_prompt_tokens": Later(Integer(1)),
    # Known from other systems, refused by name.
    "stream": Later(flag, (False,)),
    "stream_options": Later(),
    "best_of": Later(Integer(1, 128), (1,)),
    "use_beam_search": Later(flag, (False,)),
    "num_beams": Later(Integer(1), (1,)),
    "length_penalty": Later(),
    "early_stopping": Later(),
    "prediction": Later(),
    "speculative": Later(),
    "echo": Later(flag, (False,)),
    "suffix": Later(),
    "tools": Later(),
    "tool_choice": Later(),
    "parallel_tool_calls": Later(),
    "functions": Later(),
    "function_call": Later(),
    "modalities": Later(),
    "audio": Later(),
    "reasoning_effort": Later(),
    "prompt_logprobs": Later(),
}
