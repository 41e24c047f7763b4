"""The `worker` command: parse, check, run, exit code. The composition root of the parent process.

Owns flags, wording and exit codes. Everything heavy is imported by the command that uses it.
"""

from __future__ import annotations

import errno
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from producer.batch import DEFAULT_QUEUE
from producer.connection import DEFAULT_URL
from producer.errors import LivebatchError, StoreError, UsageError
from producer.screen import flushed, replace_closed_streams, say, stdout_failed

if TYPE_CHECKING:
    from redis import Redis

    from worker.settings import Settings


class Exit(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    REDIS = 3  # not reachable, or set up so that work would be lost


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: rich takes as long to import as everything else together
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

WRITING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EPIPE)  # how printing may end

MODEL_HELP = "A model folder (see `worker build`), or dummy: no model, rows come back as they are."
ModelOption = Annotated[
    str, typer.Option("--model", metavar="DIR|dummy", envvar="LIVEBATCH_MODEL", help=MODEL_HELP)
]
RedisOption = Annotated[
    str, typer.Option("--redis", metavar="URL", envvar="REDIS_URL", help="Where the queues are.")
]
DeviceOption = Annotated[
    str, typer.Option(metavar="cpu|cuda[:N]", envvar="LIVEBATCH_DEVICE", help="Where the model runs.")
]
LoopOption = Annotated[
    str | None,
    typer.Option(
        "--loop",
        metavar="plain|overlapped",
        envvar="LIVEBATCH_LOOP",
        help="Overlapped: the next step runs while the last one's tokens are read. Default on a GPU.",
    ),
]
DeterministicOption = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        envvar="LIVEBATCH_DETERMINISTIC",
        help="On a GPU: the same bits on every run, slower.",
    ),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option(envvar="LIVEBATCH_THREADS", help="Threads of the model on CPU. Default: all cores."),
]
QueueOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME[=WEIGHT]",
        envvar="LIVEBATCH_QUEUE",
        help=f"Queue to serve; again for more. Each gets its weight's share.  [default: {DEFAULT_QUEUE}]",
    ),
]
MaxBatchOption = Annotated[
    int | None,
    typer.Option(
        envvar="LIVEBATCH_MAX_BATCH", help="Most rows in the live batch. Default: 32, on a GPU 256."
    ),
]
KV_MEMORY_HELP = (
    "Memory for keys and values, such as 2G. Default: for --max-batch rows of full context, "
    "at most half of what is free; on a GPU what the model leaves."
)
KvMemoryOption = Annotated[
    str | None,
    typer.Option(metavar="SIZE", envvar="LIVEBATCH_KV_MEMORY", help=KV_MEMORY_HELP),
]
GraceOption = Annotated[
    float,
    typer.Option(
        metavar="SECONDS", envvar="LIVEBATCH_GRACE", help="How long rows in hand may go on after SIGTERM."
    ),
]
EngineTimeoutOption = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        envvar="LIVEBATCH_ENGINE_TIMEOUT",
        help="An engine that has rows and says nothing for so long hangs: it is killed and started again.",
    ),
]
DefaultsOption = Annotated[
    str,
    typer.Option(
        metavar="openai|model",
        envvar="LIVEBATCH_SAMPLING_DEFAULTS",
        help="Whose values rows get where they give none.",
    ),
]
MaxTokensOption = Annotated[
    int | None,
    typer.Option(
        envvar="LIVEBATCH_MAX_TOKENS_DEFAULT",
        help="Most output of a row that names no max_tokens. Default: what its context leaves.",
    ),
]
MetricsPortOption = Annotated[
    int | None,
    typer.Option(
        metavar="PORT", envvar="LIVEBATCH_METRICS_PORT", help="Answer Prometheus there. Default: no metrics."
    ),
]
MetricsHostOption = Annotated[
    str,
    typer.Option(metavar="ADDRESS", envvar="LIVEBATCH_METRICS_HOST", help="Where --metrics-port listens."),
]
LogFormatOption = Annotated[
    str, typer.Option(metavar="text|json", envvar="LIVEBATCH_LOG_FORMAT", help="Of the lines on stderr.")
]


def show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"livebatch {version('livebatch')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Show it and end.")
    ] = False,
) -> None:
    """Run rows of prompts from Redis queues through a model, many at a time.

    \b
    worker build model.gguf --out models/mine       a model folder from a GGUF file
    worker check --model models/mine                is everything as it should be?
    worker bench --model models/mine                how fast is it here, at which live batch?
    worker run --model models/mine                  work until SIGTERM

    \b
    Exit codes:
      0  ended as asked
      1  the engine failed; check: something is not as it should be
      2  usage, or a file or model folder that cannot be used
      3  Redis cannot be reached, or would lose rows
    """


@app.command()
def run(  # noqa: PLR0917 - Typer passes by name
    model: ModelOption,
    queue: QueueOption = None,
    redis: RedisOption = DEFAULT_URL,
    device: DeviceOption = "cpu",
    max_batch: MaxBatchOption = None,
    threads: ThreadsOption = None,
    kv_memory: KvMemoryOption = None,
    loop: LoopOption = None,
    deterministic: DeterministicOption = False,
    burst: Annotated[bool, typer.Option("--burst", help="End when the queues are empty.")] = False,
    grace: GraceOption = 30.0,
    engine_timeout: EngineTimeoutOption = 600.0,
    sampling_defaults: DefaultsOption = "openai",
    max_tokens_default: MaxTokensOption = None,
    metrics_port: MetricsPortOption = None,
    metrics_host: MetricsHostOption = "127.0.0.1",
    log_format: LogFormatOption = "text",
) -> None:
    """Work until SIGTERM or Ctrl-C.

    Rows in hand then get their --grace, the rest goes back to the front of its queue. A second
    signal hands everything back at once.

    \b
    worker run --model models/smollm2-135m-fp32
    worker run --model models/mine --queue urgent=4 --queue bulk --max-batch 64
    worker run --model dummy --burst                 try a pipeline without a model
    """
    from worker import settings

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end_now)
    with one_line_errors():
        start(
            settings.read(
                model=model,
                redis_url=redis,
                queues=queue or (),
                device=device,
                max_batch=max_batch,
                threads=threads,
                kv_memory=kv_memory,
                loop=loop,
                deterministic=deterministic,
                burst=burst,
                grace=grace,
                engine_timeout=engine_timeout,
                sampling_defaults=sampling_defaults,
                max_tokens_default=max_tokens_default,
                metrics_port=metrics_port,
                metrics_host=metrics_host,
                log_format=log_format,
            )
        )


@app.command()
def build(
    source: Annotated[Path, typer.Argument(metavar="GGUF", help="A GGUF file of the llama family.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The model folder to write.")],
    precision: Annotated[
        Literal["fp32", "q8", "fp16"] | None,
        typer.Option(help="cpu: fp32 (default), q8 (under a third of the size). cuda: fp16."),
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="What the model will run on.")] = "cpu",
    bounds: Annotated[
        bool, typer.Option(help="cuda: without, for ONNX Runtime before 1.29 (extra cuda12); slower.")
    ] = True,
) -> None:
    """Make a model folder. Works on any machine: a cuda folder needs no GPU to be built.

    \b
    worker build SmolLM2-135M-Instruct.gguf --out models/smollm2
    worker build SmolLM2-135M-Instruct.gguf --out models/smollm2-fp16 --device cuda
    """
    from worker import reference
    from worker.build import build_model

    def record(folder: Path) -> None:
        missing = reference.record(folder) if device == "cpu" else reference.record_for_cuda(folder, source)
        if missing is not None:
            say(f"{out} gets no {reference.FILE}: {missing}", sys.stdout)

    with one_line_errors():
        build_model(source, out, precision, device, bounds=bounds, finish=record)
        flag = " --device cuda" if device == "cuda" else ""
        say(f"{out} is ready: worker run --model {out}{flag}", sys.stdout)


@app.command()
def check(
    model: ModelOption,
    redis: RedisOption = DEFAULT_URL,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """Look at everything a worker needs, and run one prompt. Exit code 0 when rows could be worked on.

    What comes after an error is looked at all the same; the exit code is then the first error's.

    \b
    worker check --model models/mine --redis redis://queue:6379
    """
    from worker import doctor, settings

    with one_line_errors():
        found = doctor.examine(
            settings.read(model=model, redis_url=redis, device=device, threads=threads, max_batch=1)
        )
        wrong = []
        for finding in found:
            say(finding.line, sys.stdout)
            if finding.is_fatal:
                wrong.append(finding.subject)
    if wrong:
        raise SystemExit(Exit.REDIS if wrong[0] == doctor.REDIS else Exit.FAILED)


@app.command()
def bench(  # noqa: PLR0917 - Typer passes by name
    model: ModelOption,
    device: DeviceOption = "cpu",
    max_batch: MaxBatchOption = None,
    threads: ThreadsOption = None,
    kv_memory: KvMemoryOption = None,
    loop: LoopOption = None,
    deterministic: DeterministicOption = False,
) -> None:
    """Measure the engine alone, without Redis.

    Tokens a second at 1, 8, 32, ... live rows up to --max-batch.

    \b
    worker bench --model models/mine --max-batch 64
    """
    from worker import settings

    with one_line_errors():
        told = settings.read(
            model=model,
            redis_url=DEFAULT_URL,
            device=device,
            max_batch=max_batch,
            threads=threads,
            kv_memory=kv_memory,
            loop=loop,
            deterministic=deterministic,
        )
        from worker.bench import HEADER, rates

        print(HEADER)
        for rate in rates(told.engine):
            print(rate.line, flush=True)


def end_now(number: int, frame: object) -> None:
    """What a signal does before there is a service to hear it: no row is in hand yet."""
    raise SystemExit(Exit.OK)


def start(settings: Settings) -> None:
    """Check Redis and the model folder, then work. Raises LivebatchError."""
    from producer.connection import explained
    from worker import logs, metrics
    from worker.compose import build_preparer, connector
    from worker.engine_process import EngineProcess
    from worker.service import Service

    logs.set_up(settings.engine.log_format)
    connect = connector(settings.redis_url)
    with explained(settings.redis_url):
        warn_of(connect(5.0))
    preparer = build_preparer(settings)
    with explained(settings.redis_url), metrics.serving(settings) as measured:
        service = Service(
            settings, preparer, connect, lambda post: EngineProcess(settings.engine, post), measured
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, frame: service.stop(signal.Signals(number).name))
        service.run()


def warn_of(connection: Redis) -> None:
    """Refuse a Redis that loses rows, warn of one that might. Raises StoreError."""
    from producer.connection import check_server

    for warning in check_server(connection):
        logging.getLogger("worker").warning("%s", warning)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Every error we raise on purpose becomes one line on stderr and an exit code."""
    try:
        yield
    except LivebatchError as error:
        say(f"worker: {error}")
        code = {UsageError: Exit.USAGE, StoreError: Exit.REDIS}.get(type(error), Exit.FAILED)
        raise SystemExit(code) from None


def main() -> None:
    """Entry point of the console script."""
    replace_closed_streams()
    try:
        flushed(app)
    except OSError as error:
        if error.errno not in WRITING:  # not of a stream: a fault of ours, told with its traceback
            raise
        raise SystemExit(stdout_failed(error, "worker")) from None


if __name__ == "__main__":
    main()
