"""Flags of the `producer` command as Typer wants them: those that commands share, or that need words.

Owns their names and help. Must not know what the commands do with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from producer.connection import DEFAULT_URL

FILES_HELP = 'JSONL files, patterns, .gz, or "-" for standard input.'
Files = Annotated[list[str], typer.Argument(metavar="FILES...", help=FILES_HELP)]
FilesToSubmit = Annotated[
    list[str] | None, typer.Argument(metavar="FILES...", help=FILES_HELP, show_default=False)
]
NewBatchId = Annotated[
    str | None,
    typer.Option(
        "--batch-id", help="Name of the batch, else a new one; submitting again adds only what is missing."
    ),
]
MaxQueuedBytes = Annotated[
    str | None,
    typer.Option(
        "--max-queued-bytes",
        metavar="SIZE",
        help="Most of the batch that waits in Redis at a time, such as 512M.",
    ),
]
ExpiresIn = Annotated[
    float | None,
    typer.Option(
        "--expires-in",
        metavar="HOURS",
        min=0.0,
        help="Rows not done within so many hours end as batch_expired.",
    ),
]
KeepDays = Annotated[
    float | None,
    typer.Option(
        "--keep-days", metavar="DAYS", min=0.01, help="How long Redis keeps a row's result. Default: 7."
    ),
]
RetryFailed = Annotated[
    str | None,
    typer.Option(
        "--retry-failed",
        metavar="BATCH",
        help="Queue what failed or was cancelled in that batch, bad lines left out, as a new one.",
    ),
]
BatchId = Annotated[str, typer.Argument(metavar="BATCH", help="A batch id, as submit and list print it.")]
Redis = Annotated[
    str | None,
    typer.Option("--redis", metavar="URL", help=f"Default: REDIS_URL, else {DEFAULT_URL}."),
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Format = Annotated[
    Literal["jsonl", "text"], typer.Option("--format", help="text: each line is a prompt, as it stands.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "-o", "--out", metavar="OUT", help="Results file; OUT.cursor beside it remembers how far it is."
    ),
]
Ordered = Annotated[bool, typer.Option("--ordered", help="Input order instead of order of completion.")]
Flat = Annotated[bool, typer.Option("--flat", help="Short lines: custom_id, text, finish_reason, usage.")]
Errors = Annotated[
    Path | None,
    typer.Option("--errors-file", metavar="FILE", help="Failed rows go there instead of OUT."),
]
Release = Annotated[
    bool, typer.Option("--release", help="Delete each row from Redis once its result is in OUT.")
]
