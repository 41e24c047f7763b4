"""The model folder's chat template: messages in, one prompt text out, its control tokens the template's own.

The template is compiled with the control tokens it writes replaced by their secret names (vocabulary.py), so
no message, however the template cuts, trims or joins it, can spell one. Where a template puts one together
while it renders, '<|' + role + '|>', those that a message spells whole stay text, by GUARD; parts that such a
template itself makes one of do not. Must not know token ids or rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import nodes

from producer.errors import RowError, UsageError
from worker.own_files import file_within
from worker.sandbox import Sandbox

Message = Mapping[str, Any]
PROBE = "a probe"
TEMPLATE_FILE = "chat_template.jinja"
# A template is tried with these when it is loaded; a conversation it refuses is left out.
TRIALS = (("user",), ("system", "user"), ("developer", "user"), ("user", "assistant", "user"))
# Parts the letters of a control token that a message spells. A lone surrogate, which no message has
# (producer/rules.py), and one character, which no template cuts or changes.
GUARD = "\udc80"


class ChatTemplate:
    """A compiled template. ``variables``: bos_token and such; ``names``: {control token: its secret name}."""

    def __init__(self, source: str, variables: Mapping[str, str], names: Mapping[str, str]) -> None:
        self._names = names
        self._variables = {name: names.get(token, token) for name, token in variables.items()}
        self._roles = {} if "developer" in source else {"developer": "system"}  # OpenAI's newer name for it
        controls = _any_of(names)
        self._sandbox = Sandbox()
        tree = self._sandbox.parse(source)
        if controls is not None:
            self._name_controls(tree, controls)
        self._sandbox.limit(tree)
        self._sandbox.start()
        self._template = self._sandbox.from_string(tree)
        self._content: Callable[[str], Any] = str
        self._choose_content()
        composed = self._composed_controls(controls) if controls else set()
        self._composed = _any_of(composed)
        # Of so many characters at most, one is left when control tokens get their names.
        self._shrinks = max((math.ceil(len(token) / len(names[token])) for token in composed), default=1)

    def render(self, messages: Sequence[Message], limit: int) -> str:
        """The prompt, up to where the assistant begins. RowError with what the template objects to.

        A prompt of no more than ``limit`` characters is whole; a longer one may lack its end, but is longer.
        """
        if self._composed is None:
            return self._render(messages, limit)
        # A template with '<|' + role + '|>' spells control tokens only now: whole ones are its own, once
        # those in messages are taken apart.
        prompt = self._render(messages, limit * self._shrinks, self._guarded)
        return self._composed.sub(self._name, prompt).replace(GUARD, "")

    def turn(self) -> str:
        """What the template writes around one user message, the message included; "" when it refuses that."""
        return self._try(("user",), add_generation_prompt=False)

    def _render(
        self,
        messages: Sequence[Message],
        limit: int,
        change: Callable[[str], str] = str,
        add_generation_prompt: bool = True,
    ) -> str:
        """``limit``: it may stop behind so many characters, guards not counted."""
        pieces, length = [], 0
        variables = dict(self._variables, messages=[self._prepared(message, change) for message in messages])
        self._sandbox.start()
        try:
            for piece in self._template.generate(variables, add_generation_prompt=add_generation_prompt):
                pieces.append(piece)
                length += len(piece) - piece.count(GUARD)
                if length > limit:
                    break
        except Exception as error:  # whatever a template raises concerns this row alone
            reason = f"the model's chat template refuses the messages: {str(error)[:500]}"
            raise RowError("invalid_request", reason, "messages") from None
        return "".join(pieces)

    def _prepared(self, message: Message, change: Callable[[str], str]) -> dict[str, Any]:
        """The message as templates expect it: content in one piece, texts changed by ``change``."""
        prepared = {**message, "content": self._content(change(_joined(message["content"])))}
        prepared["role"] = self._roles.get(message["role"], message["role"])
        if "name" in message:
            prepared["name"] = change(message["name"])
        return prepared

    def _guarded(self, text: str) -> str:
        assert self._composed is not None
        return self._composed.sub(lambda match: "".join([letter + GUARD for letter in match[0]]), text)

    def _name(self, match: re.Match[str]) -> str:
        return self._names[match[0]]

    def _name_controls(self, tree: nodes.Template, controls: re.Pattern[str]) -> None:
        """Replaces control tokens in the template's text and string literals by their names."""
        for text in tree.find_all(nodes.TemplateData):
            text.data = controls.sub(self._name, text.data)
        for literal in tree.find_all(nodes.Const):
            if isinstance(literal.value, str):
                literal.value = controls.sub(self._name, literal.value)

    def _choose_content(self) -> None:
        """Content goes in as a string, or as a list of parts where the template writes none of a string."""
        if PROBE not in self._try(("user",)):
            self._content = _as_parts
            if PROBE not in self._try(("user",)):  # it wants more than a user's turn: strings are the rule
                self._content = str

    def _composed_controls(self, controls: re.Pattern[str]) -> set[str]:
        """Control tokens that appear under their own names all the same: put together while rendering."""
        return {found for roles in TRIALS for found in controls.findall(self._try(roles))}

    def _try(self, roles: Iterable[str], add_generation_prompt: bool = True) -> str:
        messages = [{"role": role, "content": PROBE} for role in roles]
        try:
            return self._render(messages, 2**20, add_generation_prompt=add_generation_prompt)
        except RowError:
            return ""


def template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The folder's template: chat_template.jinja, else chat_template in ``config``, tokenizer_config.json."""
    if (folder / TEMPLATE_FILE).exists():
        return file_within(folder, TEMPLATE_FILE, "the chat template").read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is not None and not isinstance(source, str):
        raise UsageError(
            f"{folder / 'tokenizer_config.json'}: chat_template is neither text nor a list of texts"
        )
    return source


def _joined(content: str | Sequence[Mapping[str, str]]) -> str:
    """Text parts become lines, as vLLM joins them."""
    return content if isinstance(content, str) else "\n".join([part["text"] for part in content])


def _as_parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _any_of(tokens: Iterable[str]) -> re.Pattern[str] | None:
    """Matches each of ``tokens``, the longest that fits; None when there are none."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
