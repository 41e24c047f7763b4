"""Bad lines as a person is told of them: the first ones in words, the others counted.

Owns that, and their form in JSON. Must not know what makes a line bad.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from producer.screen import say

if TYPE_CHECKING:
    from producer.jsonl import BadRow

SHOWN_PROBLEMS = 20  # bad lines printed before they are only counted


class Problems:
    """Bad lines as they are found, printed up to ``most`` of them, then counted."""

    def __init__(self, most: int = SHOWN_PROBLEMS, stream: TextIO | None = None) -> None:
        self._left = most
        self._more = 0
        self._stream = stream

    def add(self, bad: BadRow) -> None:
        """Print it, or count it."""
        if self._left:
            self._left -= 1
            say(f"{bad.failure.message} ({bad.failure.code})", self._stream)
        else:
            self._more += 1

    def tell_rest(self, how: str) -> None:
        """How many were not printed, and ``how`` to see them."""
        if self._more:
            say(f"... and {self._more:,} more ({how})", self._stream)


def problem_fields(bad: BadRow) -> dict[str, Any]:
    """One as JSON."""
    return {"file": bad.file, "line": bad.line, "custom_id": bad.custom_id, **asdict(bad.failure)}
