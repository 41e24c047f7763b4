"""Rules for single values: each takes (value, path) and gives the value in its final form or raises RowError.

Owns strictness (no booleans or strings for numbers, no NaN, no lone surrogates) and the wording of refusals.
Must not know which field has which rule: that is fields.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from producer.errors import RowError

Rule = Callable[[Any, str], Any]
MAX_STOP_IDS = 64  # the sampler's room for a row's ending ids, EOS ids included, is 128
MAX_BIASES = 1024  # the sampler's room for a row's biases
MAX_CHARACTERS = 1024  # of a stop string or a name: what no context limits, and a worker holds many rows
INT32_MAX = 2**31 - 1
SHOWN_CHARACTERS = 60  # of a refused value; a result line must not carry a megabyte back


def clean(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """``text`` cut to ``limit`` characters and safe to write as UTF-8 (lone surrogates become ``?``)."""
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return cut.encode("utf-8", "replace").decode()


def show(value: Any) -> str:
    """``value`` as JSON would write it, short; containers by kind only, so that no depth can hurt."""
    if isinstance(value, str):
        return clean(json.dumps(value[: SHOWN_CHARACTERS + 1], ensure_ascii=False))
    if isinstance(value, int) and value.bit_length() > 128:  # also spares int's limit on digits to print
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float)):
        return json.dumps(value)
    if not isinstance(value, (Mapping, Sequence)):
        return f"a {type(value).__name__}"
    kind = "object" if isinstance(value, Mapping) else "list"
    return f"{'a' if value and kind == 'list' else 'an'} {'' if value else 'empty '}{kind}"


def refusal(path: str, wanted: str, value: Any, *, code: str = "invalid_value", hint: str = "") -> RowError:
    """The error for a value at ``path`` (``stop[0]``); ``param`` is the field alone (``stop``)."""
    message = f"{clean(path)} must be {wanted}, not {show(value)}"
    param = re.split(r"[.\[]", path, maxsplit=1)[0]
    return RowError(code, f"{message}: {hint}" if hint else message, clean(param))


def anything(value: Any, path: str) -> Any:
    return value


def flag(value: Any, path: str) -> bool:
    if value is not True and value is not False:
        raise refusal(path, "true or false", value)
    return bool(value)


def json_object(value: Any, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise refusal(path, "an object", value)
    return value


@dataclass(frozen=True, slots=True)
class Integer:
    """An int in [low, high]; a float such as 16.0 is refused."""

    low: int
    high: int = INT32_MAX
    code: str = "invalid_value"

    def __call__(self, value: Any, path: str) -> int:
        if type(value) is not int or not self.low <= value <= self.high:
            raise refusal(path, f"an integer from {self.low} to {self.high}", value, code=self.code)
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A finite int or float in [low, high], or in (low, high] when ``above``; returned as float."""

    low: float
    high: float
    above: bool = False
    hint: str = ""

    def __call__(self, value: Any, path: str) -> float:
        good = type(value) in (int, float) and self.low <= value <= self.high  # NaN compares false
        if not good or (self.above and value == self.low):
            bounds = "above {:g} and at most {:g}" if self.above else "from {:g} to {:g}"
            raise refusal(path, f"a number {bounds.format(self.low, self.high)}", value, hint=self.hint)
        return float(value)


@dataclass(frozen=True, slots=True)
class Seed:
    """An int in [0, 2**64), or -1, which means unset (None)."""

    def __call__(self, value: Any, path: str) -> int | None:
        if type(value) is not int or not -1 <= value < 2**64:
            raise refusal(path, "an integer from 0 to 2^64-1, or -1 or null for a derived seed", value)
        return None if value == -1 else value


@dataclass(frozen=True, slots=True)
class Text:
    """A string of ``least`` to ``most`` characters that UTF-8 can carry."""

    least: int = 0
    most: int | None = None
    code: str = "invalid_value"

    def __call__(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise refusal(path, "a string", value, code=self.code)
        if len(value) < self.least or (self.most is not None and len(value) > self.most):
            size = "that is not empty" if self.most is None else f"of {self.least} to {self.most} characters"
            raise refusal(path, f"a string {size}", value, code=self.code)
        if not value.isascii():  # isascii is O(1), so the common case costs nothing
            self._check_surrogates(value, path)
        return value

    def _check_surrogates(self, value: str, path: str) -> None:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            lone = f"U+{ord(value[error.start]):04X}"
            hint = f"character {error.start} is the lone surrogate {lone}"
            raise refusal(path, "valid Unicode text", value, code=self.code, hint=hint) from None


@dataclass(frozen=True, slots=True)
class Matching:
    """A string that a pattern matches as a whole."""

    pattern: str
    wanted: str

    def __call__(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or not re.fullmatch(self.pattern, value):
            raise refusal(path, self.wanted, value)
        return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few words."""

    words: tuple[str, ...]

    def __call__(self, value: Any, path: str) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise refusal(path, "one of " + ", ".join(self.words), value)
        return value


@dataclass(frozen=True, slots=True)
class Strings:
    """A string or a list of at most ``most`` strings, none empty; an empty list means unset (None)."""

    most: int
    item: Text = Text(least=1)

    def __call__(self, value: Any, path: str) -> tuple[str, ...] | None:
        if isinstance(value, str):
            return (self.item(value, path),)
        if not isinstance(value, (list, tuple)) or len(value) > self.most:
            raise refusal(path, f"a string or a list of at most {self.most} strings", value)
        return tuple([self.item(text, f"{path}[{i}]") for i, text in enumerate(value)]) or None


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A list of token ids >= 0. The vocabulary's end is the worker's to check: it knows the model."""

    least: int = 0
    distinct: bool = False  # ids are a set: repeats are dropped, so their number is bounded by the vocabulary
    most: int | None = None  # after repeats are dropped; None: no limit
    code: str = "invalid_value"

    def __call__(self, value: Any, path: str) -> tuple[int, ...] | None:
        if not isinstance(value, (list, tuple)) or len(value) < self.least:
            wanted = "a list of token ids" + (" that is not empty" if self.least else "")
            raise refusal(path, wanted, value, code=self.code)
        # Whole-list tests first: a prompt of 100,000 ids must not cost 100,000 Python calls.
        if set(map(type, value)) - {int} or (value and not 0 <= min(value) <= max(value) <= INT32_MAX):
            self._refuse_first_bad(value, path)
        ids = tuple(dict.fromkeys(value)) if self.distinct else tuple(value)
        if self.most is not None and len(ids) > self.most:
            raise RowError(self.code, f"{path} holds {len(ids)} ids; at most {self.most} are served", path)
        return ids or None

    def _refuse_first_bad(self, value: Sequence[Any], path: str) -> None:
        item = Integer(0, code=self.code)
        for i, token in enumerate(value):
            item(token, f"{path}[{i}]")


def logit_bias(value: Any, path: str) -> tuple[tuple[int, float], ...] | None:
    """An object from token id ("5" or 5) to a bias of -100..100; pairs (id, bias), None when empty."""
    bias, entries = Number(-100, 100), json_object(value, path).items()
    if len(entries) > MAX_BIASES:
        reason = f"{path} names {len(entries)} ids; at most {MAX_BIASES} are served"
        raise RowError("invalid_value", reason, path)
    pairs = {_token_key(key, path): bias(number, f"{path}.{key}") for key, number in entries}
    if len(pairs) != len(value):
        raise RowError("invalid_value", f"{path} names a token id twice", path)
    return tuple(pairs.items()) or None


def _token_key(key: Any, path: str) -> int:
    if isinstance(key, str) and len(key) <= 10 and key.isascii() and key.isdigit() and str(int(key)) == key:
        key = int(key)
    if type(key) is not int or not 0 <= key <= INT32_MAX:
        raise refusal(path, 'an object whose keys are token ids, like {"42": -1.5}', key)
    return key
