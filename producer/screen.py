"""What people read, also on a terminal: nothing in it is a command to the terminal, or ends a line.

Owns that, for words and for JSON: input files, their names and Redis are not trusted. Must not know what
is said.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO

# As they may stand in JSON: DEL, the C1 controls, and at what str.splitlines breaks a line.
UNSAFE = re.compile(r"[\x7f-\x9f\u2028\u2029]")


def printable(text: str) -> str:
    r"""``text`` with ``\x1b`` for an ESC, and so on: controls, marks of direction, lone surrogates."""
    return text if text.isprintable() else "".join(map(_shown, text))


def safe_json(text: str) -> str:
    """The same JSON, with escapes for what may stand in it raw and no reader or terminal should meet."""
    if (text.isascii() and "\x7f" not in text) or text.isprintable():  # nearly every line, and soon found out
        return text
    return UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def say(text: str, stream: TextIO | None = None) -> None:
    """One line to the person, not into the data (``stream`` None: standard error)."""
    print(printable(text), file=stream or sys.stderr, flush=True)


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
