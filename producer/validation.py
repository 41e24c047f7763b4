"""All rows of all files of a batch, and what is wrong with them, without Redis.

Owns reading several files as one stream of rows, and counting the bad ones. Must not know Redis or terminals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from producer.batch import Progress
from producer.errors import UsageError
from producer.jsonl import BadRow, Duplicates, Format, file_names, has_json, read_rows
from producer.sources import Source
from producer.wire import Request

NO_BATCH = "validate"  # stands for the batch id of rows that are only looked at


@dataclass(slots=True)
class Validation:
    """What checking files without queueing them found. Blank lines are no rows."""

    rows: int = 0
    bad: int = 0
    first: BadRow | None = None
    codes: Counter[str] = field(default_factory=Counter)  # what the bad rows' failures are

    @property
    def hint(self) -> str:
        """To be put behind the counts where there are rows, and not one of them is JSON; else empty."""
        is_no_jsonl = 0 < self.rows == self.codes["invalid_json"]
        return "; is this plain text? --format text takes one prompt a line" if is_no_jsonl else ""


class BadLinesError(UsageError):
    """A strict submission was refused, or one without a line of JSON; nothing was queued."""

    def __init__(self, validation: Validation) -> None:
        first = f", the first: {validation.first.failure.message}" if validation.first else ""
        found = f"{validation.bad} of {validation.rows} rows are bad"
        super().__init__(f"nothing was queued: {found}{first}{validation.hint}")
        self.validation = validation


def good_rows(rows: Iterable[Request | BadRow]) -> Iterator[Request]:
    """Bad lines left out."""
    return (row for row in rows if not isinstance(row, BadRow))


def read_all(
    sources: Sequence[Source],
    batch_id: str,
    format: Format,
    on_warning: Callable[[str], None],
    *,
    progress: Progress | None = None,
    titles: Sequence[str] | None = None,
) -> Iterator[Request | BadRow]:
    """Every row of the files, in order; ``progress.fraction`` follows the bytes read.

    ``titles``: what the files were called when their rows got their ids, where that is not what they are now.
    ``on_warning`` is told of each file without rows.
    """
    names = file_names(titles or [source.title for source in sources])
    for index, source in enumerate(sources):
        has_rows = False

        def report(done: int, size: int, index: int = index) -> None:
            if progress is not None and size:
                progress.fraction = (index + done / size) / len(sources)

        for row in read_rows(
            source.path,
            batch_id=batch_id,
            file_index=index,
            format=format,
            name=names[index] if len(sources) > 1 else "",
            title=source.title,
            on_read=report,
        ):
            has_rows = True
            yield row
        if not has_rows:
            on_warning(f"{source.title} has no rows")


def validate(
    sources: Sequence[Source],
    format: Format,
    on_bad: Callable[[BadRow], None],
    on_warning: Callable[[str], None],
) -> Validation:
    """Read everything; ``on_bad`` gets each bad row, a custom_id's second use among them."""
    found, duplicates = Validation(), Duplicates(file_names([source.title for source in sources]))
    for row in read_all(sources, NO_BATCH, format, on_warning):
        found.rows += 1
        bad = row if isinstance(row, BadRow) else duplicates.check(row)
        if bad is not None:
            found.bad += 1
            found.first = found.first or bad
            found.codes[bad.failure.code] += 1
            on_bad(bad)
    return found


def require_json(sources: Sequence[Source]) -> None:
    """Raises BadLinesError where there are rows, and no line is JSON. Reads as far as the first that is."""
    if any(has_json(source.path, source.title) for source in sources):
        return
    found = validate(sources, "jsonl", lambda _: None, lambda _: None)
    if found.rows:
        raise BadLinesError(found)
