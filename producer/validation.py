"""All rows of all files of a batch, and what is wrong with them, without Redis.

Owns reading several files as one stream of rows, and counting the bad ones. Must not know Redis or terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from producer.batch import Progress
from producer.errors import UsageError
from producer.jsonl import BadRow, Duplicates, Format, read_rows
from producer.wire import Request

NO_BATCH = "validate"  # stands for the batch id of rows that are only looked at


@dataclass(slots=True)
class Validation:
    """What checking files without queueing them found. Blank lines are no rows."""

    rows: int = 0
    bad: int = 0
    first: BadRow | None = None


class BadLinesError(UsageError):
    """A strict submission was refused; nothing was queued."""

    def __init__(self, validation: Validation) -> None:
        first = f", the first: {validation.first.failure.message}" if validation.first else ""
        super().__init__(f"nothing was queued: {validation.bad} of {validation.rows} rows are bad{first}")
        self.validation = validation


def read_all(
    paths: Sequence[str], batch_id: str, format: Format, progress: Progress | None = None
) -> Iterator[Request | BadRow]:
    """Every row of the files, in order; ``progress.fraction`` follows the bytes read."""
    for index, path in enumerate(paths):

        def report(done: int, size: int | None, index: int = index) -> None:
            if progress is not None and size:
                progress.fraction = (index + done / size) / len(paths)

        yield from read_rows(
            path,
            batch_id=batch_id,
            file_index=index,
            format=format,
            many_files=len(paths) > 1,
            progress=report,
        )


def validate(paths: Sequence[str], format: Format, on_bad: Callable[[BadRow], None]) -> Validation:
    """Read everything; ``on_bad`` gets each bad row, a custom_id's second use among them."""
    found, duplicates = Validation(), Duplicates()
    for row in read_all(paths, NO_BATCH, format):
        found.rows += 1
        bad = row if isinstance(row, BadRow) else duplicates.check(row)
        if bad is not None:
            found.bad += 1
            found.first = found.first or bad
            on_bad(bad)
    return found
