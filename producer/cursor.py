"""Where a reader of a batch goes on: behind an entry of its log, or behind a row's place in the input.

Owns what a cursor looks like. Must not know Redis or files.
"""

from __future__ import annotations

import re

START = "0"
_PATTERN = re.compile(r"\d{1,20}(-\d{1,20})?", re.ASCII)


def is_cursor(text: object) -> bool:
    """Whether it is one that a page can have given: one number or two, each of 64 bits at most."""
    return (
        isinstance(text, str)
        and _PATTERN.fullmatch(text) is not None
        and all(int(number) < 2**64 for number in text.split("-"))
    )
