"""Submit, follow, cancel: the producer without a terminal.

Owns what a batch must be (its id, its files, its queue) and the order of steps. Must not know terminals; the
keys are store.py's. Redis is first contacted by the first call that needs it; modules that need RQ or read
files are imported by the methods that use them, for `producer status` to answer at once.
"""

from __future__ import annotations

import json
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from producer import connection
from producer.batch import (
    DAY_SECONDS,
    DEFAULT_QUEUE,
    KEEP_SECONDS,
    Batch,
    BatchStatus,
    Progress,
    Record,
    WorkerReport,
)
from producer.cursor import START, is_cursor
from producer.errors import HalfQueuedError, NothingToRetryError, StoreError, UsageError
from producer.fields import BATCH_ID
from producer.rules import show
from producer.sizes import check_seconds
from producer.store import Store

if TYPE_CHECKING:
    from producer.completions import Page, Place
    from producer.jsonl import BadRow, Format
    from producer.sources import Source
    from producer.validation import Validation
    from producer.wire import Request, Result

DUPLICATE = "duplicate_custom_id"
QUEUE_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")

OnProgress = Callable[[Progress], None]
OnBad = Callable[["BadRow"], None]
OnWarning = Callable[[str], None]


def new_batch_id() -> str:
    """Sorts by time, and two producers of the same second do not meet."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def _ignore(_: object) -> None:
    """The default listener."""


class Client:
    """One Redis, as a producer sees it.

    ``url`` None: REDIS_URL, else redis://127.0.0.1:6379. ``keep_seconds``: how long Redis keeps results after
    their row's end (None: 7 days). ``on_outage`` is called again and again while a Redis that went away is
    waited for. Methods raise UsageError (what was asked cannot be done) and StoreError (Redis).
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        keep_seconds: int | None = None,
        on_outage: Callable[[], None] = lambda: None,
    ) -> None:
        self.url = url or connection.default_url()
        if keep_seconds is not None:
            check_seconds(keep_seconds, "keep_seconds", least=1)
        self._keep_seconds = keep_seconds
        self._on_outage = on_outage

    @cached_property
    def _store(self) -> Store:
        return Store(connection.connect(self.url, self._on_outage))

    def check(self) -> list[str]:
        """Warnings about the server's settings. Raises StoreError where rows would be lost."""
        store = self._store
        with connection.explained(self.url):
            return connection.check_server(store.connection)

    def submit(
        self,
        files: Sequence[str],
        *,
        queue: str = DEFAULT_QUEUE,
        batch_id: str | None = None,
        format: Format = "jsonl",
        strict: bool = False,
        max_queued_bytes: int | None = None,
        expires_in: float | None = None,
        retry_failed: str | None = None,
        on_progress: OnProgress = _ignore,
        on_bad: OnBad = _ignore,
        on_warning: OnWarning = _ignore,
    ) -> Batch:
        """Queue every row of ``files`` (paths, patterns, "-") that is not in the batch yet.

        Submitting the same files again under the same ``batch_id`` adds only what is missing. A bad line gets
        an error result; with ``strict`` a bad line refuses all (BadLinesError), ``on_bad`` seeing each.
        Input of which no line is JSON is refused, too: it is something else.
        ``max_queued_bytes`` bounds what waits of the batch in Redis: beyond it the call waits for workers.
        ``expires_in``: seconds from now after which rows that have not ended end as "batch_expired".
        ``retry_failed``: a batch that is over; only its rows without an answer are queued, bad lines left
        out. ``files`` may then be empty: those it was made of, in its format. NothingToRetryError: there are
        no such rows.
        Raises HalfQueuedError, a StoreError that names the batch, when Redis fails in the middle.
        ``on_warning`` is told of what is odd but bearable: files without rows, settings of the server, an end
        or a time to keep results that the batch does not take because it has its own.
        """
        from producer import sources
        from producer.validation import BadLinesError, require_json, validate

        if expires_in is not None:
            check_seconds(expires_in, "expires_in")
        self._check(on_warning)
        if retry_failed is not None and not files:
            retried = self._retried(retry_failed)
            files, format = _kept_files(retried), cast("Format", retried.format)
        with sources.readable_twice(sources.expand(files)) as found:
            if strict and (validation := validate(found, format, on_bad, _ignore)).bad:
                raise BadLinesError(validation)
            if format == "jsonl" and retry_failed is None:
                require_json(found)
            return self._submit(
                found,
                queue=queue,
                batch_id=batch_id,
                format=format,
                max_queued_bytes=max_queued_bytes,
                expires=None if expires_in is None else time.time() + expires_in,
                retries=retry_failed,
                on_progress=on_progress,
                on_warning=on_warning,
            )

    def submit_rows(
        self,
        rows: Iterable[Mapping[str, Any]],
        *,
        queue: str = DEFAULT_QUEUE,
        batch_id: str | None = None,
        max_queued_bytes: int | None = None,
        on_progress: OnProgress = _ignore,
        on_warning: OnWarning = _ignore,
    ) -> Batch:
        """Queue rows given as dicts, in any of the input shapes. Row n is line n of the batch."""
        from producer.sources import Source

        self._check(on_warning)
        with tempfile.NamedTemporaryFile("w", prefix="livebatch-rows-", encoding="ascii") as copy:
            for number, row in enumerate(rows, 1):
                try:
                    copy.write(json.dumps(row) + "\n")
                except (TypeError, ValueError, RecursionError) as error:
                    raise UsageError(f"row {number} cannot be written as JSON: {error}") from error
            copy.flush()
            found = [Source("rows", copy.name)]
            return self._submit(
                found,
                queue=queue,
                batch_id=batch_id,
                format="jsonl",
                max_queued_bytes=max_queued_bytes,
                on_progress=on_progress,
                on_warning=on_warning,
            )

    def validate(
        self,
        files: Sequence[str],
        *,
        format: Format = "jsonl",
        on_bad: OnBad = _ignore,
        on_warning: OnWarning = _ignore,
    ) -> Validation:
        """Check every line as ``submit`` would, without Redis. ``on_bad`` gets each bad one, in order."""
        from producer import sources
        from producer.validation import validate

        with sources.readable_twice(sources.expand(files)) as found:
            return validate(found, format, on_bad, on_warning)

    def status(self, batch_id: str) -> BatchStatus:
        """Counts, state and rates. Raises UsageError when there is no such batch."""
        store = self._store
        with connection.explained(self.url):
            return store.status(batch_id)

    def list(self, *, on_warning: OnWarning = _ignore) -> Sequence[BatchStatus]:
        """Every batch Redis still knows, newest first. ``on_warning`` is told of those that are damaged."""
        store = self._store
        with connection.explained(self.url):
            return store.statuses(store.batch_ids(), on_warning)

    def workers(self) -> Sequence[WorkerReport]:
        """Live workers, by name."""
        store = self._store
        with connection.explained(self.url):
            return store.workers()

    def pages(
        self, batch_id: str, *, follow: bool = False, ordered: bool = False, cursor: str | None = None
    ) -> Iterator[Page]:
        """Results page by page, each with the cursor to go on from; see ``results``.

        With ``follow`` an empty page comes about once a second, for its status. Cursors of an ordered reading
        and of an unordered one are of different kinds. Raises UsageError for what is no cursor.
        """
        cursor = cursor or START
        if not is_cursor(cursor):
            raise UsageError(f"{show(cursor)} is no cursor: give one as a page had it, or none to start")
        store = self._store
        with connection.explained(self.url):
            from producer import completions

            read = completions.ordered_pages if ordered else completions.pages
            yield from read(store, store.record(batch_id), cursor, follow=follow)

    def results(
        self, batch_id: str, *, follow: bool = False, ordered: bool = False, cursor: str | None = None
    ) -> Iterator[Result]:
        """Each ended row's result exactly once, in order of ending, or with ``ordered`` of input.

        ``follow``: until the batch is over. Rows that something else than a worker ended (deleted, failed or
        cancelled in RQ) come as failures "worker_lost", so this ends.
        """
        for page in self.pages(batch_id, follow=follow, ordered=ordered, cursor=cursor):
            yield from page.results

    def release(self, batch_id: str, job_ids: Sequence[str]) -> None:
        """Delete from Redis the jobs and results of ended rows, once they are read and kept elsewhere.

        The batch goes on to know that the rows were there and ended: nothing is queued or counted twice.
        """
        store = self._store
        with connection.explained(self.url):
            from producer.completions import release

            release(store, store.record(batch_id), job_ids)

    def cancel(self, batch_id: str) -> BatchStatus:
        """End every row that has not ended: queued ones here and now, claimed ones by their workers."""
        store = self._store
        with connection.explained(self.url):
            from producer.sweep import Sweeper

            record = store.record(batch_id)
            if not store.status(batch_id).is_over:
                store.set_state(batch_id, "cancelled")
                store.publish({"command": "cancel", "batch": batch_id})
                Sweeper(store, record).sweep(cancel=True)
            return store.status(batch_id)

    def _check(self, on_warning: OnWarning) -> None:
        for warning in self.check():
            on_warning(warning)

    def _retried(self, batch_id: str) -> Record:
        """A batch of which it is known what failed. Raises UsageError while it runs."""
        store = self._store
        with connection.explained(self.url):
            if not store.status(batch_id).is_over:
                raise UsageError(f"batch {batch_id} is not over yet: what failed is known at its end")
            return store.record(batch_id)

    def _failed_rows(self, retried: Record, record: Record) -> Mapping[Place, str]:
        """Where a batch's rows stand that have no answer, and why. UsageError where it had other files."""
        from producer import completions

        _require_same_files(retried, record)
        return completions.failed(self._store, retried)

    def _record(self, found: Sequence[Source], queue: str, batch_id: str, format: Format) -> Record:
        """What the batch will be, from the files as they are now."""
        from producer import sources

        _check_names(batch_id, queue)
        return Record(
            id=batch_id,
            queue=queue,
            format=format,
            created=time.time(),
            files=tuple(map(sources.digest, found)),
            keep_seconds=KEEP_SECONDS if self._keep_seconds is None else self._keep_seconds,
        )

    def _submit(
        self,
        found: Sequence[Source],
        *,
        queue: str,
        batch_id: str | None,
        format: Format,
        max_queued_bytes: int | None,
        expires: float | None = None,
        retries: str | None = None,
        on_progress: OnProgress,
        on_warning: OnWarning,
    ) -> Batch:
        from producer import sources
        from producer.validation import read_all

        progress = Progress()
        stamps = list(map(sources.stamp, found))
        record = self._record(found, queue, new_batch_id() if batch_id is None else batch_id, format)
        record = replace(record, expires=expires, retries=retries)

        def read(called: Record) -> Iterator[Request | BadRow]:
            """Rows bear the same ids whatever their files are called by now."""
            titles = [sources.title(file.path) for file in called.files]
            return read_all(found, called.id, format, on_warning, progress=progress, titles=titles)

        retry: Iterator[Request] | None = None
        if retries is not None:
            with connection.explained(self.url):
                retried = self._retried(retries)
                failed = self._failed_rows(retried, record)
            record = replace(record, files=retried.files)
            retry = _rows_to_retry(retries, read(record), failed)
        with _named(record.id), connection.explained(self.url):
            standing = self._store.create(record)
            _require_same(standing, record)
            for text in _not_taken(standing, record, self._keep_seconds):
                on_warning(text)
            rows = retry or read(standing)
            self._enqueue(standing, rows, progress, on_progress, max_queued_bytes)
            if stamps != list(map(sources.stamp, found)):
                raise UsageError(CHANGED.format(id=record.id))
            self._store.set_state(record.id, "closed")
        done = {"queued": progress.queued, "already": progress.already, "failed": progress.failed}
        return Batch(id=record.id, queue=record.queue, **done)

    def _enqueue(
        self,
        record: Record,
        rows: Iterator[Request | BadRow],
        progress: Progress,
        on_progress: OnProgress,
        max_queued_bytes: int | None,
    ) -> None:
        """Add ``rows`` to the batch; ``progress`` counts what became of them."""
        from producer.enqueue import Enqueuer, chunks

        def hold(why: str) -> None:
            progress.holding = why
            on_progress(progress)

        enqueuer = Enqueuer(self._store, record, hold, max_queued_bytes)
        for chunk in chunks(rows, max_queued_bytes):
            progress.add(enqueuer.add(chunk))
            progress.holding = ""
            on_progress(progress)


def _rows_to_retry(
    batch_id: str, rows: Iterable[Request | BadRow], failed: Mapping[Place, str]
) -> Iterator[Request]:
    """Those of the batch's rows that have no answer. Looks for the first before a batch is made of them.

    One whose custom_id was taken is a bad line, too: its answer would pass for the other row's.
    """
    from producer.validation import good_rows

    wanted = {place for place, code in failed.items() if code != DUPLICATE}
    found = (row for row in good_rows(rows) if (row.file, row.line) in wanted)
    first = next(found, None) if wanted else None
    if first is None:
        raise NothingToRetryError(_nothing_to_retry(batch_id, len(failed)))
    return chain([first], found)


def _nothing_to_retry(batch_id: str, bad: int) -> str:
    if not bad:
        return f"batch {batch_id} has no rows without an answer: nothing to retry, nothing was queued"
    its = "its bad line, which is" if bad == 1 else f"its {bad:,} bad lines, which are"
    return (
        f"batch {batch_id} has no rows without an answer but {its} never run again, and nothing was queued: "
        "correct them in a file of their own, and submit that (`producer validate FILES` says what is wrong)"
    )


def _kept_files(record: Record) -> list[str]:
    """The files that a batch was made of, by name. Raises UsageError where they cannot be read again."""
    from producer.sources import STDIN

    names = [file.path for file in record.files]
    if STDIN in names:
        raise UsageError(f"batch {record.id} was read from standard input: {_same_again(record, record.id)}")
    if missing := [name for name in names if not Path(name).exists()]:
        again = f"give the same input again (producer submit FILE --retry-failed {record.id})"
        raise UsageError(f"batch {record.id} was made of {missing[0]}, which is not there: {again}")
    return names


def _same_again(standing: Record, retries: str | None) -> str:
    """How to give an input once more of which nobody kept a copy."""
    style = "" if standing.format == "jsonl" else f" --format {standing.format}"
    batch = f"--retry-failed {retries}" if retries else f"--batch-id {standing.id}"
    return f"give the same input again (producer submit -{style} {batch} < FILE)"


# A file somebody still writes to is not what its digest says, and could never be submitted again.
CHANGED = (
    "the input changed while it was read; what was read is queued as batch {id}, which stays open. "
    "Cancel it (producer cancel {id}) and submit the finished file"
)


@contextmanager
def _named(batch_id: str) -> Iterator[None]:
    """Who did not choose the batch's id must learn it when Redis fails: else all rows are queued again."""
    try:
        yield
    except StoreError as error:
        raise HalfQueuedError(f"{error}; batch {batch_id} may hold only some of its rows") from error


def _check_names(batch_id: str, queue: str) -> None:
    if not re.fullmatch(BATCH_ID.pattern, batch_id):
        raise UsageError(f"batch id {batch_id!r}: use {BATCH_ID.wanted}")
    if not QUEUE_NAME.fullmatch(queue):
        raise UsageError(f"queue {queue!r}: use 1 to 128 letters, digits, . : - and _")


def _require_same(standing: Record, wanted: Record) -> None:
    """A batch submitted again must bring what it was made of: accepted lines are known by their numbers."""
    start, end = f"batch {wanted.id}", "or submit under a new batch id"
    if standing.queue != wanted.queue:
        raise UsageError(f"{start} is on queue {standing.queue}: say --queue {standing.queue}, {end}")
    if standing.retries != wanted.retries:
        flag = f"with --retry-failed {standing.retries}" if standing.retries else "without --retry-failed"
        raise UsageError(f"{start} was submitted {flag}: do so again, {end}")
    _require_same_files(standing, wanted)


def _not_taken(standing: Record, wanted: Record, keep_seconds: int | None) -> Iterator[str]:
    """What was asked of a batch that was there already, and that it does not take."""
    if standing == wanted:
        return
    start, end = f"batch {standing.id} was there already and keeps", "another needs a new batch id"
    if wanted.expires is not None:
        yield f"{start} {_end(standing)} (--expires-in): {end}"
    if keep_seconds not in (None, standing.keep_seconds):
        yield f"{start} its results for {standing.keep_seconds / DAY_SECONDS:g} days (--keep-days): {end}"


def _end(record: Record) -> str:
    if record.expires is None:
        return "having no end"
    hours = (record.expires - time.time()) / 3600
    return f"its end, in {hours:,.1f} hours" if hours > 0 else f"its end, {-hours:,.1f} hours ago"


def _require_same_files(standing: Record, wanted: Record) -> None:
    start, end = f"batch {standing.id}", "or submit under a new batch id"
    if standing.format != wanted.format:
        raise UsageError(f"{start} was read as {standing.format}: say --format {standing.format}, {end}")
    if len(standing.files) != len(wanted.files):
        names = " ".join(file.path for file in standing.files)
        raise UsageError(f"{start} was made of other files ({names}): name the same ones, {end}")
    for before, now in zip(standing.files, wanted.files, strict=True):
        if before.sha256 != now.sha256:
            raise UsageError(_another_input(standing, wanted, before.path, now.path))


def _another_input(standing: Record, wanted: Record, before: str, now: str) -> str:
    from producer.sources import STDIN, title

    end = "or submit under a new batch id" if standing.id == wanted.id else "or leave out --retry-failed"
    what = title(now)
    if before == STDIN:
        again = _same_again(standing, wanted.retries)
        return f"{what} is not the input that batch {standing.id} was made of: {again}, {end}"
    return f"{what} is not the {before} that batch {standing.id} was made of: restore it, {end}"
