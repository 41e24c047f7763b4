"""`worker check`: everything a worker needs, looked at once, in the order in which it would fail.

Owns the questions and the wording of the answers. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from producer.connection import check_server, explained, redact
from producer.errors import LivebatchError
from worker import reference
from worker.compose import build_engine, build_preparer, connector
from worker.settings import DUMMY, Settings

if TYPE_CHECKING:
    from worker.engine import Engine
    from worker.rows import RowPreparer

REDIS = "redis"


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer. A fatal one means that a worker would not start."""

    subject: str
    verdict: str  # ok, note, warning or error
    text: str

    @property
    def is_fatal(self) -> bool:
        return self.verdict == "error"

    @property
    def line(self) -> str:
        return f"{self.verdict:8}{self.subject:10}{self.text}"


def examine(settings: Settings) -> Iterator[Finding]:
    """Findings as they are made; the same trouble is told once.

    Later questions are asked although an earlier answer was an error.
    """
    told = set[str]()
    for subject, question in QUESTIONS.items():
        try:
            yield from (Finding(subject, *answer) for answer in question(settings))
        except LivebatchError as error:
            if str(error) not in told:
                told.add(str(error))
                yield Finding(subject, "error", str(error))


Answers = Iterator[tuple[str, str]]


def _redis(settings: Settings) -> Answers:
    with explained(settings.redis_url):
        connection = connector(settings.redis_url)(5.0)
        warnings = check_server(connection)
        version = connection.info("server")["redis_version"]
    yield "ok", f"{redact(settings.redis_url)} answers, version {version}"
    for warning in warnings:
        yield "warning", warning


def _device(settings: Settings) -> Answers:
    if settings.engine.model == DUMMY:
        yield "ok", "the dummy model needs none"
        return
    from worker import devices

    kind, _, ordinal = settings.engine.device.partition(":")
    yield "ok", f"{devices.runtime()}, which can use the CPU"
    obstacle = devices.cuda_obstacle(int(ordinal or 0))
    if obstacle is None:
        yield "ok", f"CUDA can be used: {devices.cuda_name(int(ordinal or 0))}"
    else:
        yield ("error" if kind == "cuda" else "note"), f"CUDA cannot be used: {obstacle}"


def _model(settings: Settings) -> Answers:
    build_preparer(settings)
    yield "ok", f"{settings.engine.model}: folder and tokenizer read"
    if settings.engine.model == DUMMY:
        return
    from worker.tokenizer import Tokenizer

    if Tokenizer.load(Path(settings.engine.model)).template is None:
        yield "warning", "no chat template (tokenizer_config.json): rows with messages will fail"


def _prompt(settings: Settings) -> Answers:
    engine, preparer = build_engine(settings.engine), build_preparer(settings)
    yield "ok", f"{reference.PROMPT!r} -> {ask(engine, preparer)!r}"
    if settings.engine.model == DUMMY:
        return
    stored = reference.load(Path(settings.engine.model))
    if stored is None:
        yield "warning", f"the folder has no {reference.FILE} to compare with: build it with `worker build`"
        return
    wrong = stored.disagreement(reference.answer(engine, stored.prompt))
    if wrong is None:
        yield "ok", "the first tokens are those stored when the folder was built"
    else:
        yield "error", wrong


def ask(engine: Engine, preparer: RowPreparer) -> str:
    """The engine's greedy answer of a few tokens, run in this process. LivebatchError: there is none."""
    from producer.wire import Request, Sampling

    request = Request(
        custom_id="check",
        batch_id="check",
        file=0,
        line=1,
        endpoint="completions",
        prompt=reference.PROMPT,
        sampling=Sampling(temperature=0.0, max_tokens=reference.NUM_TOKENS),
    )
    row = preparer.prepare(request, 1)
    [output] = engine.generate([row.row])
    row.feed(output)
    result = row.result(output.status)
    if result.failure:
        raise LivebatchError(f"the model answers {result.failure.code}: {result.failure.message}")
    return result.choices[0].text


QUESTIONS: dict[str, Callable[[Settings], Answers]] = {
    REDIS: _redis,
    "device": _device,
    "model": _model,
    "prompt": _prompt,
}
