"""Input files before their lines are read: patterns expanded, pipes kept, contents known by their digest.

Owns finding files and saying which is missing. What stands in them is jsonl.py's.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from producer.batch import SourceFile
from producer.errors import UsageError
from producer.lines import check_readable

STDIN = "-"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True)
class Source:
    """An input file: as the batch's record names it, and where its bytes lie (a pipe's are a copy)."""

    name: str
    path: str

    @property
    def title(self) -> str:
        """As people are told of it."""
        return title(self.name)


def title(name: str) -> str:
    """What people call the file of this name."""
    return "standard input" if name == STDIN else name


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
        if name != STDIN:
            check_readable(name)
    return names


@contextmanager
def readable_twice(names: Sequence[str]) -> Iterator[list[Source]]:
    """The same files, standard input and pipes copied: a digest is taken before the first row is queued."""
    with ExitStack() as stack:
        yield [Source(name, _copy(name, stack) if is_read_once(name) else name) for name in names]


def is_read_once(name: str) -> bool:
    """Whether it is standard input or a pipe; no pattern is."""
    return name == STDIN or (Path(name).exists() and not Path(name).is_file())


def _copy(name: str, stack: ExitStack) -> str:
    """What can be read only once in a temporary file, until ``stack`` ends; that file's name."""
    with _readable(Source(name, "")), ExitStack() as opened:
        copy = stack.enter_context(tempfile.NamedTemporaryFile(prefix="livebatch-input-"))
        once = sys.stdin.buffer if name == STDIN else opened.enter_context(Path(name).open("rb"))
        shutil.copyfileobj(once, opened.enter_context(Path(copy.name).open("wb")))  # closed here: it may fail
    return copy.name


def digest(source: Source) -> SourceFile:
    """The file as the batch's record names it."""
    with _readable(source), Path(source.path).open("rb") as stream:
        return SourceFile(source.name, hashlib.file_digest(stream, "sha256").hexdigest())


def stamp(source: Source) -> tuple[int, int]:
    """Size and time of the last change: a file somebody writes to while it is read does not keep them."""
    with _readable(source):
        found = Path(source.path).stat()
    return found.st_size, found.st_mtime_ns


@contextmanager
def _readable(source: Source) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:  # reading needs none
            where = tempfile.gettempdir()
            raise UsageError(f"{source.title}: no room for its copy in {where}: set TMPDIR") from error
        raise UsageError(f"{source.title}: cannot be read ({error.strerror or error})") from error
