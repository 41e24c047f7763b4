"""GenaiConfig: genai_config.json, asked by dotted key, with errors that name the file and the key.

Must not know which keys matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from producer.errors import UsageError
from producer.rules import INT32_MAX
from worker.own_files import REBUILD

CONFIG_FILE = "genai_config.json"


class GenaiConfig:
    """The parsed file."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path, self._values = path, values

    @classmethod
    def read(cls, path: Path) -> GenaiConfig:
        try:
            values = json.loads(path.read_bytes())
        except (ValueError, OSError, RecursionError) as error:
            raise UsageError(f"{path} cannot be read as JSON ({error}). {REBUILD}") from error
        if not isinstance(values, dict):
            raise UsageError(f"{path} is not a JSON object. {REBUILD}")
        return cls(path, values)

    def get(self, key: str) -> Any:
        """The value, or None where the config does not have it."""
        value: Any = self._values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def wrong(self, key: str, wanted: str) -> UsageError:
        value = self.get(key)
        found = "is missing" if value is None else f"is {value!r}"
        return UsageError(f"{self.path}: {key} {found}; it must be {wanted}. {REBUILD}")

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text")
        return value

    def size(self, key: str) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= INT32_MAX:
            raise self.wrong(key, f"a whole number from 1 to {INT32_MAX}")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them, as a tuple without repetitions."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [value]
        vocab_size = self.size("model.vocab_size")
        if not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise self.wrong(key, f"one or several token ids below {vocab_size}")
        return tuple(dict.fromkeys(ids))

    def section(self, key: str) -> Mapping[str, Any]:
        """An object; empty where the config does not have it."""
        value = self.get(key)
        if not isinstance(value, dict | None):
            raise self.wrong(key, "an object")
        return value or {}

    def items(self, key: str) -> list[Mapping[str, Any]]:
        """A list of objects, or an object of named ones; empty where the config does not have it."""
        value = self.get(key)
        items = list(value.values()) if isinstance(value, dict) else value or []
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise self.wrong(key, "a list of objects")
        return items

    def search(self) -> Mapping[str, Any]:
        """The ``search`` section, numbers and flags only."""
        section = self.section("search")
        for key, value in section.items():
            if not isinstance(value, int | float):
                raise self.wrong(f"search.{key}", "a number or a flag")
        return section
