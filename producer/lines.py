"""A file as numbered lines of bytes.

Owns opening (gzip, byte order marks), splitting on ``\\n`` alone, the cap on a line, and progress.
Must not know JSON, requests or standard input (sources.py copies that into a file).
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from producer.errors import UsageError

MAX_LINE_BYTES = 64 * 2**20
HEAD_BYTES = 4096  # what is kept of a line over the cap: enough to find its custom_id
REPORT_BYTES = 256 * 1024  # of text between two progress reports
UTF8_MARK = b"\xef\xbb\xbf"
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
GZIP_MAGIC = b"\x1f\x8b"

OnRead = Callable[[int, int], None]  # bytes of the file read so far, its size


@dataclass(frozen=True, slots=True)
class Line:
    """One physical line, its ``\\n`` included. ``number`` counts from 1, blank lines too."""

    number: int
    data: bytes
    over: int = 0  # bytes of a line over the cap, of which ``data`` is the beginning

    @property
    def whole(self) -> bool:
        return not self.over


def check_readable(path: str) -> None:
    """Raise UsageError when ``path`` cannot be read: asked of every file before the first row is queued."""
    if not Path(path).exists():
        raise UsageError(f"{path}: no such file")
    if Path(path).is_dir():
        raise UsageError(f"{path}: is a folder; name the files in it")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{path}: may not be read; check its permissions")


def read_lines(
    path: str,
    *,
    title: str = "",
    on_read: OnRead | None = None,
    max_line_bytes: int = MAX_LINE_BYTES,
) -> Iterator[Line]:
    """The lines of a file, or of what is packed in it by gzip, in constant memory.

    Raises UsageError, with ``title`` (else the path), when the file cannot be opened, is UTF-16, or its gzip
    data is damaged.
    """
    check_readable(path)
    title = title or path
    number = 0
    try:
        with ExitStack() as stack:
            source = _Source.open(path, stack)
            for line in _split(source.stream, max_line_bytes):
                number = line.number
                yield _without_mark(line, title) if number == 1 else line
                source.report(len(line.data), on_read)
            source.report(None, on_read)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{title}: the gzip data is damaged after line {number} ({error})") from error
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{title}: cannot be read after line {number} ({reason})") from error


@dataclass(slots=True)
class _Source:
    """An open input: the stream of text bytes, and where its file stands."""

    stream: BinaryIO
    raw: io.FileIO
    consumed: int = 0
    reported: int = 0

    @classmethod
    def open(cls, path: str, stack: ExitStack) -> _Source:
        raw = io.FileIO(path)
        buffered = stack.enter_context(io.BufferedReader(raw, 2**20))
        if buffered.peek(2)[:2] != GZIP_MAGIC:
            return cls(cast(BinaryIO, buffered), raw)
        unzipped = stack.enter_context(gzip.GzipFile(fileobj=buffered))
        return cls(cast(BinaryIO, stack.enter_context(io.BufferedReader(unzipped, 2**20))), raw)

    def report(self, num_bytes: int | None, on_read: OnRead | None) -> None:
        """Count ``num_bytes`` (None: the end) and tell ``on_read`` now and then."""
        self.consumed += num_bytes or 0
        if on_read is None or (num_bytes is not None and self.consumed - self.reported < REPORT_BYTES):
            return
        self.reported = self.consumed
        on_read(self.raw.tell(), os.fstat(self.raw.fileno()).st_size)


def _split(stream: BinaryIO, cap: int) -> Iterator[Line]:
    number = 0
    while data := stream.readline(cap + 1):
        number += 1
        if len(data) <= cap or data.endswith(b"\n"):
            yield Line(number, data)
            continue
        head, size = data[:HEAD_BYTES], len(data)
        del data  # it is as large as a line may be
        while rest := stream.readline(2**20):
            size += len(rest)
            if rest.endswith(b"\n"):
                break
        yield Line(number, head, size)


def _without_mark(line: Line, title: str) -> Line:
    if line.data.startswith(UTF16_MARKS):
        raise UsageError(f"{title}: is UTF-16; save it as UTF-8")
    return Line(line.number, line.data.removeprefix(UTF8_MARK), line.over)
