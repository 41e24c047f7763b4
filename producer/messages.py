"""The rule for ``messages``: a conversation as chat templates take it.

Owns which roles, keys and content parts a message may have. Must not know templates or tokens.
"""

from __future__ import annotations

from typing import Any

from producer.errors import RowError
from producer.rules import MAX_CHARACTERS, Text, clean, refusal

ROLES = ("system", "developer", "user", "assistant")
KEYS = frozenset({"role", "content", "name"})
TEXT = Text(code="invalid_request")
NAME = Text(most=MAX_CHARACTERS, code="invalid_request")


def messages(value: Any, path: str) -> tuple[dict[str, Any], ...]:
    """A list of at least one message; content is a string or text parts; keys that are null are dropped."""
    if not isinstance(value, (list, tuple)) or not value:
        raise refusal(path, "a list of at least one message", value, code="invalid_request")
    return tuple([_message(message, f"{path}[{i}]") for i, message in enumerate(value)])


def _message(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refusal(path, "an object with role and content", value, code="invalid_request")
    message = {key: part for key, part in value.items() if part is not None}
    if extra := message.keys() - KEYS:
        name = clean(str(min(extra, key=str)))
        text = f"{path}.{name} is not supported: a message has role, content and optionally name"
        raise RowError("unsupported_parameter", text, "messages")
    if message.get("role") not in ROLES:
        wanted = "one of " + ", ".join(ROLES)
        raise refusal(f"{path}.role", wanted, message.get("role"), code="invalid_request")
    _content(message.get("content"), f"{path}.content")
    if "name" in message:
        NAME(message["name"], f"{path}.name")
    return message


def _content(value: Any, path: str) -> None:
    if isinstance(value, str):
        TEXT(value, path)
        return
    if not isinstance(value, (list, tuple)):
        raise refusal(path, "a string or a list of text parts", value, code="invalid_request")
    for i, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or part.keys() != {"type", "text"}:
            wanted = 'a text part, {"type": "text", "text": "..."}'
            raise refusal(f"{path}[{i}]", wanted, part, code="invalid_request")
        TEXT(part["text"], f"{path}[{i}].text")
