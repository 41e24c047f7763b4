"""The composition root: settings -> engine (in the engine's process) and row preparer (in its parent).

The only place where the dummy and the real model are told apart. Imports are inside: each process pays for
its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from producer.errors import LivebatchError, UsageError
from worker.settings import DUMMY, EngineSettings, Settings

CONNECT_SECONDS = 3.0

if TYPE_CHECKING:
    from worker.desk import Connect
    from worker.engine import Engine
    from worker.protocols import Model, Sampler
    from worker.rows import RowPreparer


def build_engine(settings: EngineSettings) -> Engine:
    """An engine that has run once. Raises UsageError for what the folder or this machine cannot give."""
    from worker.engine import Engine
    from worker.scheduler import Policy

    model = build_model(settings)
    policy = Policy(max_batch=settings.max_batch)
    if settings.model == DUMMY:  # its prompts cost nothing, so none need wait
        policy = replace(policy, prefill_tokens=model.max_step_tokens)
    try:
        engine = Engine(model, build_sampler(settings, model), policy)
    except (ValueError, MemoryError) as error:
        raise UsageError(f"--max-batch {settings.max_batch} is more than this model takes: {error}") from None
    warm_up(engine)
    return engine


def warm_up(engine: Engine) -> None:
    """Run one token: first runs compile and allocate. Raises LivebatchError when not even that works."""
    from kernels.rows import RowParams, Status
    from worker.sequence import Row

    for output in engine.generate([Row(0, (0,), RowParams(max_tokens=1))]):
        if output.status not in (Status.EOS, Status.LENGTH):
            raise LivebatchError(f"the model cannot run: {output.message or output.status.name}")


def build_model(settings: EngineSettings) -> Model:
    """Raises UsageError naming the file or flag that is wrong."""
    if settings.model == DUMMY:
        from worker.dummy import DummyModel
        from worker.dummy_folder import DummyFolder as Folder

        return DummyModel(
            vocab_size=Folder.vocab_size,
            echo_id=Folder.echo_id,
            eos_id=Folder.eos_id,
            context_length=Folder.context_length,
        )
    from worker.folder import ModelFolder
    from worker.model import OrtModel

    return OrtModel(
        ModelFolder.load(Path(settings.model)),
        device=settings.device,
        threads=settings.threads,
        kv_memory_bytes=settings.kv_bytes,
        max_batch=settings.max_batch,
    )


def build_sampler(settings: EngineSettings, model: Model) -> Sampler:
    """The fast twin of the kernels for the device."""
    from kernels.cpu import BatchedSampler

    return BatchedSampler(settings.max_batch, model.vocab_size, model.context_length)


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
