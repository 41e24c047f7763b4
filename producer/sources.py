"""Input files before their lines are read: patterns expanded, stdin kept, contents known by their digest.

Owns finding files and saying which is missing. What stands in them is jsonl.py's.
"""

from __future__ import annotations

import glob
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from producer.batch import SourceFile
from producer.errors import UsageError
from producer.lines import STDIN, check_readable


def expand(patterns: Sequence[str]) -> list[str]:
    """File names in the order given, a pattern's matches sorted. Raises UsageError for what is missing."""
    names: list[str] = []
    for pattern in patterns:
        is_plain = pattern == STDIN or Path(pattern).exists() or not glob.has_magic(pattern)
        found = [pattern] if is_plain else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207 - absolute too
        if not found:
            raise UsageError(f"{pattern}: no file matches")
        names += found
    if not names:
        raise UsageError("no input file given")
    if STDIN in names and len(names) > 1:
        raise UsageError("- (standard input) stands alone: name either it or files")
    for name in names:
        check_readable(name)
    return names


@contextmanager
def readable_twice(names: Sequence[str]) -> Iterator[list[str]]:
    """The same files, stdin copied to a temporary one: its digest is taken before its first row is queued."""
    if list(names) != [STDIN]:
        yield list(names)
        return
    with tempfile.NamedTemporaryFile(prefix="livebatch-stdin-") as copy:
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.flush()
        yield [copy.name]


def digest(name: str, path: str) -> SourceFile:
    """The file at ``path`` as the batch's record names it."""
    try:
        with Path(path).open("rb") as stream:
            return SourceFile(name, hashlib.file_digest(stream, "sha256").hexdigest())
    except OSError as error:
        raise UsageError(f"{name}: cannot be read ({error.strerror or error})") from error


def stamp(path: str) -> tuple[int, int]:
    """Size and time of the last change: a file somebody writes to while it is read does not keep them."""
    try:
        found = Path(path).stat()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from error
    return found.st_size, found.st_mtime_ns
