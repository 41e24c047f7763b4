"""The `producer` command: parse, call Client, print, exit code.

Owns commands, wording and exit codes; their flags are flags.py's. Must not know keys. redis, rq and rich are
imported by the command that uses it: `producer --help` starts without them.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from enum import IntEnum
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from producer import again
from producer.batch import DEFAULT_QUEUE
from producer.errors import (
    HalfQueuedError,
    LivebatchError,
    NothingToRetryError,
    OutputError,
    StoreError,
    UsageError,
)
from producer.flags import (
    BatchId,
    Errors,
    ExpiresIn,
    Files,
    FilesToSubmit,
    Flat,
    Format,
    Json,
    KeepDays,
    MaxQueuedBytes,
    NewBatchId,
    Ordered,
    Out,
    Redis,
    Release,
    RetryFailed,
)
from producer.following import Follower, Outage, queued_line
from producer.problems import SHOWN_PROBLEMS, Problems, problem_fields
from producer.screen import flushed, replace_closed_streams, safe_json, say, stdout_failed
from producer.sizes import check_seconds, parse_bytes

if TYPE_CHECKING:
    from producer.batch import Batch, BatchStatus, Progress
    from producer.client import Client, OnProgress
    from producer.jsonl import BadRow
    from producer.output import Output
    from producer.progress import Display


class Exit(IntEnum):
    OK = 0  # all rows completed; without --wait: all queued
    FAILED = 1  # some rows failed, were cancelled, are bad lines, or their results are gone
    USAGE = 2
    REDIS = 3  # not reachable, or not usable
    INTERRUPTED = 4  # the batch goes on


EXIT_CODES = """\b
Exit codes:
  0  all rows completed; submit without --wait: all are queued;
     results without --follow: of the rows that have ended, all completed
  1  some rows failed, were cancelled, have no result in Redis any more,
     or (validate, submit) are bad lines
  2  usage, or a file that cannot be read or written
  3  Redis cannot be reached, or would lose rows
  4  interrupted: the batch goes on, and the message says how to come back
"""


class InterruptedHereError(LivebatchError):
    """Ctrl-C; the message says how to come back."""


CTRL_C = 130  # Typer's own exit code for it, where no command had anything to add

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich takes as long to import as everything else together
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"livebatch {version('livebatch')}")
        raise typer.Exit


@app.callback(epilog=EXIT_CODES)
def about(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Queue rows of prompts for LLM workers, and collect one result per row.

    \b
    producer validate prompts.jsonl                      every bad line, with its number
    producer submit prompts.jsonl                        queue it; prints the batch id
    producer submit prompts.jsonl --wait -o out.jsonl    queue it and stay until it is done
    producer results BATCH --follow -o out.jsonl         each row as it ends; run it again to go on
    producer status                                      batches and workers
    """


@app.command()
def submit(  # noqa: PLR0917 - Typer passes by name
    files: FilesToSubmit = None,
    queue: Annotated[str, typer.Option(help="Queue whose workers serve the rows.")] = DEFAULT_QUEUE,
    batch_id: NewBatchId = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay to the end and collect the results.")] = False,
    out: Out = None,
    ordered: Ordered = False,
    flat: Flat = False,
    errors_file: Errors = None,
    strict: Annotated[bool, typer.Option("--strict", help="Queue nothing if any line is bad.")] = False,
    format: Format = "jsonl",
    max_queued_bytes: MaxQueuedBytes = None,
    expires_in: ExpiresIn = None,
    retry_failed: RetryFailed = None,
    release: Release = False,
    keep_days: KeepDays = None,
    as_json: Json = False,
    redis: Redis = None,
) -> None:
    """Queue every row of FILES.

    \b
    producer submit prompts.jsonl more/*.jsonl.gz
    producer submit prompts.jsonl --batch-id monday --wait -o results.jsonl
    cat prompts.txt | producer submit - --format text
    producer submit --retry-failed monday
    producer submit huge.jsonl --max-queued-bytes 1G --wait -o out.jsonl --release
    """
    from producer.client import Client, new_batch_id
    from producer.output import Output

    output = Output(out, ordered, flat, errors_file, release)
    _check_submit_flags(output, files or [], wait, as_json, retry_failed)
    most = None if max_queued_bytes is None else parse_bytes(max_queued_bytes, "--max-queued-bytes")
    expires_seconds = _seconds(expires_in, "--expires-in", "hours")
    keep_seconds = _seconds(keep_days, "--keep-days", "days")
    outage = Outage()
    kept = None if keep_seconds is None else round(keep_seconds)
    client = Client(redis, keep_seconds=kept, on_outage=outage.begin)
    batch_id = new_batch_id() if batch_id is None else batch_id
    options: dict[str, Any] = {"batch_id": batch_id, "queue": queue, "format": format}
    options["retry_failed"] = retry_failed
    bounds = {"max_queued_bytes": max_queued_bytes, "expires_in": expires_in, "keep_days": keep_days}
    rest = again.rest(files or [], strict, output if wait else None, redis, **options, **bounds)
    collect = again.collect(batch_id, output, redis)
    with output.open(batch_id) as sink, _display(out or not wait) as show:
        follower = Follower(client, batch_id, output, sink, show, outage=outage)
        with _interruptible(rest):
            options |= {"strict": strict, "max_queued_bytes": most, "expires_in": expires_seconds}
            gather = follower.gather if wait and out and not ordered else None
            batch = _queue(client, files or [], _progressed(show, outage, gather), options, as_json)
        if wait:
            say(f"batch {batch_id}: {queued_line(batch)}")
            with _interruptible(f"batch {batch_id} goes on; come back with: {collect}", StoreError):
                follower.run(follow=True)
    if not wait:
        _report_queued(batch, collect, as_json)
    status = client.status(batch_id)
    _say_all(follower.summary(status))
    _finish(status, follower.failed, as_json)


def _queue(
    client: Client, files: Sequence[str], on_progress: OnProgress, options: Mapping[str, Any], as_json: bool
) -> Batch:
    bad = Problems().add
    try:
        return client.submit(files, **options, on_progress=on_progress, on_bad=bad, on_warning=_warn)
    except NothingToRetryError as nothing:
        if as_json:
            _print_json({"id": None, "queue": options["queue"], "queued": 0, "already": 0, "failed": 0})
        say(str(nothing))
        raise typer.Exit(Exit.OK) from None


def _progressed(show: Display, outage: Outage, gather: Callable[[], None] | None) -> OnProgress:
    """After each chunk show how far it is, and ``gather`` what has ended: into a file, not twice."""

    def progressed(progress: Progress) -> None:
        outage.end()
        show.queueing(progress)
        if gather:
            gather()

    return progressed


@app.command()
def results(  # noqa: PLR0917 - Typer passes by name
    batch: BatchId,
    out: Out = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until the batch is over.")] = False,
    ordered: Ordered = False,
    flat: Flat = False,
    errors_file: Errors = None,
    release: Release = False,
    redis: Redis = None,
) -> None:
    """Print the result of each row that has ended, or write it to OUT.

    With -o the command may be killed and run again: it goes on where OUT.cursor says, each row once.

    \b
    producer results BATCH --follow -o results.jsonl
    producer results BATCH --flat | head
    """
    from producer.client import Client
    from producer.output import Output

    output = Output(out, ordered, flat, errors_file, release)
    output.check()
    outage = Outage()
    client = Client(redis, on_outage=outage.begin)
    client.status(batch)  # no such batch: no output file
    collect = again.collect(batch, output, redis)
    with (
        _interruptible(f"batch {batch} goes on; come back with: {collect}", StoreError),
        output.open(batch) as sink,
        _display(out) as show,
    ):
        follower = Follower(client, batch, output, sink, show, outage=outage)
        follower.run(follow=follow)
    status = client.status(batch)
    _say_all(follower.summary(status))
    if status.waiting and not follow:
        say(f"{status.waiting:,} rows have not ended yet: add --follow to wait for them")
    _finish(status, follower.failed)


@app.command()
def status(
    batch: Annotated[str | None, typer.Argument(metavar="[BATCH]", help="One batch; default: all.")] = None,
    as_json: Json = False,
    redis: Redis = None,
) -> None:
    """Show how far batches are, and which workers are live.

    \b
    producer status
    producer status BATCH --json
    """
    from producer import tables
    from producer.client import Client

    client = Client(redis)
    batches = [client.status(batch)] if batch else client.list(on_warning=_warn)
    workers = client.workers()
    if as_json:
        found = [status.to_dict(workers) for status in batches]
        shown = {"batch": found[0]} if batch else {"batches": found}
        _print_json({**shown, "workers": [worker.to_dict() for worker in workers]})
        return
    print(tables.batch_table(batches, workers), tables.worker_table(workers), sep="\n\n")
    for advice in filter(None, map(tables.advice, batches)):
        say(advice)


@app.command(name="list")
def list_batches(as_json: Json = False, redis: Redis = None) -> None:
    """List the batches Redis knows, newest first."""
    from producer import tables
    from producer.client import Client

    client = Client(redis)
    batches, workers = client.list(on_warning=_warn), client.workers()
    if as_json:
        _print_json([status.to_dict(workers) for status in batches])
    else:
        print(tables.batch_table(batches, workers))


@app.command()
def cancel(batch: BatchId, as_json: Json = False, redis: Redis = None) -> None:
    """End every row of a batch that has not ended.

    Queued rows end now, those in a worker's hands in its next step.

    \b
    producer cancel BATCH
    """
    from producer.client import Client

    client = Client(redis)
    was_over = client.status(batch).is_over
    status = client.cancel(batch)
    if as_json:
        _print_json(status.to_dict())
        return
    over = " was over already" if was_over or status.state != "cancelled" else ""
    rows = f"{status.waiting:,} rows in workers' hands are"
    rows = "1 row in a worker's hands is" if status.waiting == 1 else rows
    held = f", {rows} being stopped" if status.waiting else ""
    counts = f"{status.completed:,} completed, {status.failed:,} failed, {status.cancelled:,} cancelled"
    say(f"batch {batch}{over}: {counts}{held}")


@app.command()
def validate(
    files: Files,
    format: Format = "jsonl",
    show_all: Annotated[
        bool, typer.Option("--all", help=f"Print every bad line, not {SHOWN_PROBLEMS} at most.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Check every line as submit would, without Redis.

    Exit code 1 when any line is bad.

    \b
    producer validate prompts.jsonl
    """
    from producer.client import Client

    problems = Problems(sys.maxsize if show_all else SHOWN_PROBLEMS, sys.stdout)
    listed: list[BadRow] = []
    on_bad = listed.append if as_json else problems.add
    checked = Client().validate(files, format=format, on_bad=on_bad, on_warning=_warn)
    if as_json:
        shown = list(map(problem_fields, listed))
        _print_json({"rows": checked.rows, "bad": checked.bad, "problems": shown})
    else:
        problems.tell_rest("--all prints every one")
        say(f"{checked.rows:,} rows, {checked.bad:,} bad{checked.hint}")
    raise typer.Exit(Exit.FAILED if checked.bad else Exit.OK)


def main() -> NoReturn:
    """The console entry point: every error is one line that says what to do."""
    replace_closed_streams()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: it says how to come back
    try:
        flushed(app)
    except LivebatchError as error:
        say(f"producer: {error}")
        sys.exit(_code(error))
    except OSError as error:  # of standard input or output: what has a name is explained where it is used
        sys.exit(stdout_failed(error, "producer"))
    except SystemExit as done:
        sys.exit(Exit.INTERRUPTED if done.code == CTRL_C else done.code)
    sys.exit(Exit.OK)


def _code(error: LivebatchError) -> Exit:
    from producer.validation import BadLinesError

    if isinstance(error, BadLinesError):
        return Exit.FAILED
    if isinstance(error, InterruptedHereError):
        return Exit.INTERRUPTED
    return Exit.REDIS if isinstance(error, StoreError) else Exit.USAGE


def _display(stdout_is_free: object) -> Display:
    """A live bar would be torn by result lines on the same terminal."""
    from producer.progress import display

    return display(live=bool(stdout_is_free) or not sys.stdout.isatty())


@contextmanager
def _interruptible(hint: str, broken: type[StoreError] = HalfQueuedError) -> Iterator[None]:
    """Whatever ends it in the middle, ``hint`` says how to go on; where Redis did, if it is ``broken``."""
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedHereError(f"interrupted; {hint}") from None
    except (broken, OutputError) as error:
        raise type(error)(f"{error}; {hint}") from error


def _seconds(value: float | None, flag: str, unit: str) -> float | None:
    return None if value is None else check_seconds(value, flag, unit=unit)


def _check_submit_flags(
    output: Output, files: Sequence[str], wait: bool, as_json: bool, retry_failed: str | None
) -> None:
    from producer.sources import expand

    if not files and not retry_failed:
        raise UsageError('name the files to submit, "-" for standard input, or --retry-failed BATCH')
    if not wait and (output.out or output.errors):
        raise UsageError(
            "-o and --errors-file need --wait; without it collect with: producer results BATCH -o OUT"
        )
    if wait and output.ordered and output.release:
        raise UsageError(
            "--release with --ordered makes no room before all is queued: leave out --ordered, or --wait, "
            "and collect meanwhile with: producer results BATCH --follow --ordered --release -o OUT"
        )
    if wait and as_json and not output.out:
        raise UsageError("--wait --json needs -o OUT: the results would mix with the JSON on standard output")
    output.check(expand(files) if files and output.out else ())


def _finish(status: BatchStatus, read_as_failed: int, as_json: bool = False) -> NoReturn:
    if as_json:
        _print_json(status.to_dict())
    raise typer.Exit(Exit.FAILED if status.failed or status.cancelled or read_as_failed else Exit.OK)


def _report_queued(batch: Batch, come_back: str, as_json: bool) -> NoReturn:
    if as_json:
        _print_json(asdict(batch))
    else:
        print(batch.id)
        say(f"{queued_line(batch)}. Collect with: {come_back}")
    raise typer.Exit(Exit.FAILED if batch.failed else Exit.OK)


def _say_all(lines: Iterable[str]) -> None:
    for line in lines:
        say(line)


def _warn(text: str) -> None:
    say(f"warning: {text}")


def _print_json(value: Any) -> None:
    print(safe_json(json.dumps(value, ensure_ascii=False)))


if __name__ == "__main__":
    main()
