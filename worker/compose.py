"""The composition root: settings -> engine (in the engine's process) and row preparer (in its parent).

Owns which parts belong together: those of the CPU, of a GPU, of the dummy. Imports are inside: each process
pays for its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from producer.errors import LivebatchError, UsageError
from worker.settings import DUMMY, EngineSettings, Settings

log = logging.getLogger(__name__)

CONNECT_SECONDS = 3.0

if TYPE_CHECKING:
    from worker.desk import Connect
    from worker.engine import Engine
    from worker.protocols import Model, Sampler
    from worker.rows import RowPreparer
    from worker.scheduler import Policy


def build_engine(settings: EngineSettings) -> Engine:
    """An engine that has run once. Raises UsageError for what the folder or this machine cannot give."""
    from worker.engine import Engine

    model, sampler = build_parts(settings)
    overlap = settings.loop == "overlapped"
    with sized_by_batch(settings):
        engine = Engine(model, sampler, build_policy(settings, model), overlap=overlap)
    warn_of_room(engine, model)
    warm_up(engine)
    if settings.gpu is not None and settings.model != DUMMY:
        compare(engine, Path(settings.model))
    return engine


def warn_of_room(engine: Engine, model: Model) -> None:
    """Says what a row can have at most where the cache holds less than the context."""
    most = engine.load.blocks * model.block_size
    if most < model.context_length:
        log.warning(
            "the KV cache holds %d tokens, so much a row can have at most; the model's context is %d",
            most,
            model.context_length,
        )


@contextmanager
def sized_by_batch(settings: EngineSettings) -> Iterator[None]:
    """What grows with the live batch is made inside; where memory lacks, UsageError names the flag."""
    try:
        yield
    except MemoryError as error:
        raise UsageError(f"--max-batch {settings.max_batch} is more than this model takes: {error}") from None


def compare(engine: Engine, folder: Path) -> None:
    """Runs the prompt whose answer the folder carries. LivebatchError where the GPU says something else."""
    from worker import reference

    stored = reference.load(folder)
    wrong = stored and stored.disagreement(reference.answer(engine, stored.prompt))
    if wrong:
        raise LivebatchError(f"{folder}: {wrong}. Weights, runtime or GPU are not what they were")


def build_policy(settings: EngineSettings, model: Model) -> Policy:
    """The scheduler's numbers for the device."""
    from worker.scheduler import Policy

    policy = Policy(max_batch=settings.max_batch)
    if settings.model == DUMMY:  # its prompts cost nothing, so none need wait
        return replace(policy, prefill_tokens=model.max_step_tokens)
    if settings.gpu is not None:
        from worker.cuda import PREFILL_LAUNCH

        share = model.max_step_tokens - settings.max_batch
        return replace(policy, prefill_tokens=share, apart=True, prefill_launch=PREFILL_LAUNCH)
    return policy


def warm_up(engine: Engine) -> None:
    """Run one token: first runs compile and allocate. Raises LivebatchError when not even that works."""
    from kernels.rows import RowParams, Status
    from worker.sequence import Row

    for output in engine.generate([Row(0, (0,), RowParams(max_tokens=1))]):
        if output.status not in (Status.EOS, Status.LENGTH):
            raise LivebatchError(f"the model cannot run: {output.message or output.status.name}")


def build_parts(settings: EngineSettings) -> tuple[Model, Sampler]:
    """The model, and the twin of the kernels for its device. UsageError naming the file or flag at fault."""
    from worker.folder import ModelFolder

    if settings.gpu is not None and settings.model != DUMMY:
        from worker.cuda import build_parts as build_cuda_parts

        folder = ModelFolder.load(Path(settings.model))
        with sized_by_batch(settings):
            return build_cuda_parts(folder, settings)
    from kernels.cpu import BatchedSampler
    from worker.engine import fit

    model = build_dummy() if settings.model == DUMMY else build_cpu_model(settings)
    fit(build_policy(settings, model), model)  # refuses sizes for which there are not even numbers
    sizes = (settings.max_batch, model.vocab_size, model.context_length)
    with sized_by_batch(settings):
        return model, BatchedSampler(*sizes, threads=settings.threads)


def build_dummy() -> Model:
    from worker.dummy import DummyModel
    from worker.dummy_folder import DummyFolder as Folder

    return DummyModel(
        vocab_size=Folder.vocab_size,
        echo_id=Folder.echo_id,
        eos_id=Folder.eos_id,
        context_length=Folder.context_length,
    )


def build_cpu_model(settings: EngineSettings) -> Model:
    from worker.folder import ModelFolder
    from worker.model import OrtModel

    return OrtModel(
        ModelFolder.load(Path(settings.model)),
        threads=settings.threads,
        kv_memory_bytes=settings.kv_bytes,
        max_batch=settings.max_batch,
    )


def build_preparer(settings: Settings) -> RowPreparer:
    """Raises UsageError naming the file of the model folder that is missing or wrong."""
    from worker.rows import Defaults, RowPreparer

    if settings.engine.model == DUMMY:
        from worker.dummy_folder import DummyFolder, dummy_tokenizer

        defaults = Defaults(max_tokens=settings.max_tokens_default)
        return RowPreparer(DummyFolder(), dummy_tokenizer(), defaults)
    from worker.folder import ModelFolder
    from worker.tokenizer import Tokenizer

    path = Path(settings.engine.model)
    folder = ModelFolder.load(path)
    defaults = Defaults.read(settings.sampling_defaults, folder.search, settings.max_tokens_default)
    return RowPreparer(folder, Tokenizer.load(path), defaults)


def connector(url: str) -> Connect:
    """Opens connections to ``url`` that fail at once instead of waiting: the worker tries again by itself.

    Raises UsageError for a URL that is none.
    """
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    from producer.connection import not_a_url

    def connect(answer_seconds: float) -> Redis:
        try:
            return Redis.from_url(
                url,
                socket_timeout=answer_seconds,
                socket_connect_timeout=CONNECT_SECONDS,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise UsageError(f"--redis: {not_a_url(url)}") from error

    return connect
