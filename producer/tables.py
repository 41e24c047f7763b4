"""What `status` and `list` print: aligned columns of plain text, the same on a terminal and in a pipe.

Owns their layout. Must not know Redis.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from producer.batch import BatchStatus, WorkerReport
from producer.progress import duration

BATCH_COLUMNS = (
    "batch",
    "queue",
    "state",
    "rows",
    "completed",
    "failed",
    "cancelled",
    "waiting",
    "tokens/s",
    "age",
)
SILENT_SECONDS = 60.0  # an open batch whose producer added nothing for so long has probably lost it


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Left-aligned columns, two spaces apart; what cannot be printed becomes ``?`` (Redis is not trusted)."""
    table = [[_printable(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)
    return "\n".join(lines)


def batch_table(statuses: Sequence[BatchStatus], workers: Sequence[WorkerReport]) -> str:
    if not statuses:
        return "no batches"
    return columns(BATCH_COLUMNS, [_batch_row(status, workers) for status in statuses])


def worker_table(reports: Sequence[WorkerReport]) -> str:
    """One line a worker; the columns are whatever the workers say of themselves."""
    if not reports:
        return "no worker reports: start one with `worker run --model DIR` (it reports once it is loaded)"
    names = list(dict.fromkeys(name for report in reports for name in report.fields))
    header = ["worker", *(name.replace("_per_second", "/s").replace("_", " ") for name in names)]
    return columns(
        header, [[report.name, *(report.fields.get(name, "") for name in names)] for report in reports]
    )


def advice(status: BatchStatus) -> str:
    """What a person may want to do about a batch; empty when all is well."""
    if status.state == "open" and status.silent_seconds > SILENT_SECONDS:
        return (
            f"batch {status.id} is still being queued, but its producer has been silent for "
            f"{duration(status.silent_seconds)}: submit the same files again with --batch-id {status.id}"
        )
    return ""


def _batch_row(status: BatchStatus, workers: Sequence[WorkerReport]) -> list[str]:
    counts = (status.rows, status.completed, status.failed, status.cancelled, status.waiting)
    rate = f"{status.tokens_per_second:,.0f}" if status.tokens_per_second else "-"
    age = duration(max(0.0, time.time() - status.created))
    return [status.id, status.queue, status.phase(workers), *(f"{count:,}" for count in counts), rate, age]


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
