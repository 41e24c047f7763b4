"""Where result lines go: to standard output, or on disk, each row once, across kills.

Owns the flags that say so, OUT, and OUT.cursor beside it, which says how many bytes of OUT are settled and
where in the batch to read on; whatever stands in OUT beyond them was cut off by a crash, is dropped, and
comes again. Lines reach the disk before the cursor moves. Must not know Redis.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from producer.cursor import is_cursor
from producer.errors import OutputError, UsageError
from producer.jsonl import encode_line, flat_line, result_line
from producer.sources import STDIN
from producer.wire import Result


@dataclass(frozen=True, slots=True)
class Style:
    """What the lines look like. One file holds one style."""

    ordered: bool = False
    flat: bool = False

    def line(self, result: Result) -> bytes:
        return encode_line(flat_line(result) if self.flat else result_line(result))


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command's result lines go, and how, as its flags say."""

    out: Path | None = None  # None: standard output
    ordered: bool = False
    flat: bool = False
    errors: Path | None = None
    release: bool = False

    def check(self, inputs: Sequence[str] = ()) -> None:
        """Raises UsageError where flags do not go together, or one file would be written over by another.

        ``inputs``: the names of files that are read meanwhile.
        """
        if self.errors is not None and self.out is None:
            raise UsageError("--errors-file splits failed rows off a results file: give one with -o")
        if self.release and self.out is None:
            raise UsageError("--release needs -o OUT: what is only printed could be lost on its way")
        written = self._written()
        read = [("an input", Path("/dev/stdin" if name == STDIN else name)) for name in inputs]
        pairs = [*combinations(written, 2), *((one, other) for one in read for other in written)]
        for (role, path), (other_role, other) in pairs:
            if same_file(path, other):
                raise UsageError(f"{path} is both {role} and {other_role}: name another file")

    def _written(self) -> list[tuple[str, Path]]:
        """Every file that is written, after what it is."""
        if self.out is None:
            return []
        cursor, draft = cursor_paths(self.out)
        files = [("-o", self.out), ("the cursor of -o", cursor), ("the next cursor of -o", draft)]
        return files if self.errors is None else [*files, ("--errors-file", self.errors)]

    def flags(self) -> list[str]:
        """Those under which another command goes on with the same output."""
        words = ["-o", str(self.out)] if self.out else []
        words += ["--errors-file", str(self.errors)] if self.errors else []
        return words + ["--ordered"] * self.ordered + ["--flat"] * self.flat + ["--release"] * self.release

    def open(self, batch_id: str) -> AbstractContextManager[ResultFile | Stdout]:
        """A file that cannot be written is found here, before anything is queued."""
        style = Style(self.ordered, self.flat)
        if self.out is None:
            return nullcontext(Stdout(style))
        return ResultFile(self.out, batch_id, style, self.errors)

    @property
    def where(self) -> str:
        """`` -> results.jsonl``, for the end of a sentence; nothing for standard output."""
        where = f" -> {self.out}" if self.out else ""
        return where + (f", failed rows -> {self.errors}" if self.errors else "")


def cursor_paths(out: Path) -> tuple[Path, Path]:
    """OUT.cursor, and what replaces it."""
    return Path(f"{out}.cursor"), Path(f"{out}.cursor.new")


def same_file(one: Path, other: Path) -> bool:
    """Also through ``./``, symbolic and hard links; neither need exist."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    with suppress(OSError):
        return one.samefile(other)
    return False


class Stdout:
    """Result lines on standard output."""

    cursor: str | None = None

    def __init__(self, style: Style) -> None:
        self._style = style

    def expect(self, created: float) -> None:
        """Nothing: what was printed before is not known here."""

    def write(self, results: Sequence[Result], cursor: str) -> None:
        for result in results:
            sys.stdout.buffer.write(self._style.line(result))
        sys.stdout.buffer.flush()


@dataclass(slots=True)
class Checkpoint:
    """OUT.cursor, as JSON."""

    batch: str
    ordered: bool
    flat: bool
    errors_file: str | None  # seen from OUT's folder: both may move, and be named from elsewhere
    cursor: str | None = None  # of Client.pages; None: nothing written yet
    bytes: int = 0  # of OUT that are settled
    error_bytes: int = 0  # of the errors file
    errors_begun: bool = False  # whether what stands in the errors file can be ours
    created: float | None = None  # when the batch was; tells it from a later one of the same name

    def checked(self) -> Checkpoint:
        """Itself. Raises ValueError where the file says what we never write."""
        for size in (self.bytes, self.error_bytes):
            if type(size) is not int or not 0 <= size < 2**63 or (size and self.cursor is None):
                raise ValueError(f"{size!r} settled bytes at cursor {self.cursor!r}")
        if self.cursor is not None and not is_cursor(self.cursor):
            raise ValueError(f"cursor {self.cursor!r}")
        if self.errors_file is not None and not isinstance(self.errors_file, str):
            raise ValueError(f"errors file {self.errors_file!r}")
        return self


class ResultFile:
    """An output of one batch; a context manager. ``cursor`` is where to read on.

    Opening raises UsageError when OUT cannot be written, is in use, or holds something else.
    """

    def __init__(self, path: Path, batch_id: str, style: Style, errors: Path | None = None) -> None:
        self._path = path
        self._style = style
        self._errors_path = errors
        self._cursor_path, self._draft_path = cursor_paths(path)
        self._stack = ExitStack()
        errors_file = _seen_from(path.parent, errors) if errors else None
        wanted = Checkpoint(batch_id, style.ordered, style.flat, errors_file)
        try:
            self._rows = self._open(path)
            self._errors = self._open(errors) if errors else None
            self._checkpoint = self._resume(wanted)
        except BaseException:
            self.close()
            raise

    @property
    def cursor(self) -> str | None:
        return self._checkpoint.cursor

    def expect(self, created: float) -> None:
        """Say when the batch was made. Raises UsageError when OUT is of an earlier one of its name."""
        if self._checkpoint.created not in (None, created):
            raise UsageError(
                f"{self._path} holds results of an earlier batch {self._checkpoint.batch}, which Redis has "
                f"forgotten: collect with `producer results {self._checkpoint.batch} --follow -o ANOTHER`"
            )
        self._checkpoint.created = created

    def write(self, results: Sequence[Result], cursor: str) -> None:
        """Append a page and move the cursor behind it. A kill at any point loses and doubles nothing.

        Raises OutputError when that fails; the caller knows the command that goes on.
        """
        if not results:
            return
        for stream, path in ((self._rows, self._path), (self._errors, self._errors_path)):
            if stream and path and not _is_at(stream, path):  # a released result would be nowhere
                raise OutputError(f"{path} was removed or replaced while it was written")
        try:
            self._write(results, cursor)
        except OSError as error:  # a full disk, mostly
            why = error.strerror or error
            raise OutputError(f"{self._path} cannot be written: {why}. Nothing is lost: make room") from error

    def _write(self, results: Sequence[Result], cursor: str) -> None:
        has_errors = self._errors is not None and any(result.failure for result in results)
        if self._checkpoint.cursor is None or (has_errors and not self._checkpoint.errors_begun):
            self._checkpoint.errors_begun |= has_errors
            self._save()  # from the first byte on, a file is known as ours
        for result in results:
            stream = self._errors if self._errors and result.failure else self._rows
            stream.write(self._style.line(result))
        self._checkpoint.cursor = cursor
        self._checkpoint.bytes = _settle(self._rows)
        self._checkpoint.error_bytes = _settle(self._errors) if self._errors else 0
        self._save()

    def close(self) -> None:
        """Harmless when closed. A file that was made for nothing is not left behind."""
        with suppress(OSError):  # what a failed write left in the buffer, and told already
            self._stack.close()

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, path: Path) -> BinaryIO:
        """The file at its end, ours alone: what is seen or done before the lock may be another producer's."""
        while True:
            is_new = not path.exists()
            stream = _locked(path)
            if _is_at(stream, path):
                break
            stream.close()  # its maker had nothing to write, and has removed it
        self._stack.enter_context(stream)
        if is_new:
            self._stack.callback(_remove_if_empty, path)
        stream.seek(0, os.SEEK_END)
        return stream

    def _resume(self, wanted: Checkpoint) -> Checkpoint:
        """Go on where OUT.cursor says, or start, if there is nothing yet."""
        has_rows, has_errors = self._rows.tell() > 0, self._errors is not None and self._errors.tell() > 0
        saved = self._load()
        if not has_rows and not has_errors:
            if saved is None and os.path.lexists(self._cursor_path):
                raise UsageError(f"{self._cursor_path} is no cursor of ours: name another file, or delete it")
            return wanted
        if has_errors and not has_rows and (saved is None or saved.errors_file != wanted.errors_file):
            raise self._foreign_errors()
        if saved is None:
            raise UsageError(
                f"{self._path} is not empty and has no readable {self._cursor_path.name} beside it: "
                "name another file, or delete it"
            )
        self._require_same(saved, wanted, self._path if has_rows else self._errors_path)
        if has_errors and not (saved.errors_begun or saved.error_bytes):
            raise self._foreign_errors()
        self._cut(self._rows, saved.bytes, self._path)
        if self._errors and self._errors_path:
            self._cut(self._errors, saved.error_bytes, self._errors_path)
        return saved

    def _foreign_errors(self) -> UsageError:
        """What another output has in an errors file must not be cut off as the rest of a crash of ours."""
        return UsageError(
            f"{self._errors_path} is not empty, and {self._cursor_path} does not say that failed rows of "
            f"{self._path} stand there: name another --errors-file, or delete it"
        )

    def _require_same(self, saved: Checkpoint, wanted: Checkpoint, holder: Path | None) -> None:
        """Raises UsageError where the cursor tells of another output; ``holder`` is a file with its lines."""
        if saved.batch != wanted.batch:
            raise UsageError(
                f"{holder} holds results of batch {saved.batch}: name another file, or go on with that "
                f"batch: producer results {saved.batch} --follow and the same flags"
            )
        if saved.errors_file != wanted.errors_file:
            errors = saved.errors_file and self._path.parent / saved.errors_file
            begun = f"with --errors-file {errors}" if errors else "without --errors-file"
            raise UsageError(f"{self._path} was begun {begun}: do the same, or delete it")
        if (saved.ordered, saved.flat) != (wanted.ordered, wanted.flat):
            raise UsageError(
                f"{holder} was begun with other --ordered or --flat flags: use the same, or delete it"
            )

    def _cut(self, stream: BinaryIO, size: int, path: Path) -> None:
        """Drop what stands beyond ``size``. Raises UsageError where there is less."""
        if stream.tell() < size:
            files = map(str, filter(None, (self._path, self._cursor_path, self._errors_path)))
            raise UsageError(
                f"{path} is shorter than {self._cursor_path} says: it was changed. "
                f"To start over delete {' and '.join(files)}"
            )
        stream.truncate(size)
        stream.seek(size)

    def _load(self) -> Checkpoint | None:
        """What OUT.cursor says; None where there is none that can be read."""
        try:
            return Checkpoint(**json.loads(self._cursor_path.read_text())).checked()
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def _save(self) -> None:
        with self._draft_path.open("w") as stream:
            json.dump(asdict(self._checkpoint), stream)
            stream.flush()
            os.fsync(stream.fileno())
        self._draft_path.replace(self._cursor_path)


def _locked(path: Path) -> BinaryIO:
    """Opened to append. Raises UsageError where it is no file, cannot be written or another one has it."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(
            f"{path} is no file: results go on after a kill only in one. Leave -o out for stdout"
        )
    try:
        stream = path.open("ab")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {_reason(error, path)}") from error
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        stream.close()
        raise UsageError(f"{path} is being written by another producer") from None
    return stream


def _is_at(stream: BinaryIO, path: Path) -> bool:
    """Whether the open file is the one of this name: it may have been removed meanwhile."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _seen_from(folder: Path, path: Path) -> str:
    return os.path.relpath(os.path.realpath(path), os.path.realpath(folder))


def _reason(error: OSError, path: Path) -> str:
    if isinstance(error, FileNotFoundError):
        return f"folder {path.parent} does not exist"
    return error.strerror or str(error)


def _settle(stream: BinaryIO) -> int:
    """Everything written so far on the disk; its size."""
    stream.flush()
    os.fsync(stream.fileno())
    return stream.tell()


def _remove_if_empty(path: Path) -> None:
    if path.exists() and path.stat().st_size == 0:
        Path(os.path.realpath(path)).unlink()  # not a link to it, which was there before
