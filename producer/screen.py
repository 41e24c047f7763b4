"""What people read, also on a terminal: nothing in it is a command to the terminal, or ends a line.

Owns that, for words and for JSON: input files, their names and Redis are not trusted. And what a command
does whose standard streams are closed, full, or read no more. Must not know what is said.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

# As they may stand in JSON: DEL, the C1 controls, and at what str.splitlines breaks a line.
UNSAFE = re.compile(r"[\x7f-\x9f\u2028\u2029]")
SEEN_ENOUGH, NOT_WRITTEN = 1, 2  # exit codes of both commands where standard output ends before they do


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


def replace_closed_streams() -> None:
    """Closed stdin, stdout and stderr become the null device: else the next file opened takes the number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115 - for good


def flushed(run: Callable[[], object]) -> None:
    """Run it, and let out what it printed: a full disk is met while somebody can still say so."""
    try:
        run()
    finally:
        sys.stdout.flush()


def stdout_failed(error: OSError, program: str) -> int:
    """Say that standard output, or what ``error`` names, cannot be written. Returns the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail again at exit
    if isinstance(error, BrokenPipeError):  # `head` has seen enough: as where Typer meets it
        return SEEN_ENOUGH
    say(f"{program}: {error.filename or 'standard output'}: {error.strerror or error}")
    return NOT_WRITTEN


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
