"""What can happen to a worker's main loop. Everything reaches it through one inbox; nothing else wakes it.

Knows the nouns only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from producer.errors import LivebatchError
from worker.engine import Load
from worker.sequence import Output


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine's model is built and it takes rows. ``seconds``: how long that took."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Outputs:
    """What steps gave: rows that ended, and new tokens of streamed rows."""

    outputs: Sequence[Output]
    load: Load
    step_seconds: float = 0.0  # spent in all steps so far


@dataclass(frozen=True, slots=True)
class Died:
    """The engine's process is gone. ``error``: what it raised when it could not be built, else None."""

    how: str
    error: LivebatchError | None = None


@dataclass(frozen=True, slots=True)
class Wake:
    """There are rows in a queue that had run dry."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """A batch was cancelled, or (``job_id``) one row."""

    batch_id: str
    job_id: str | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody wants the worker to end. The first time it may finish what it holds, the second time not."""

    why: str


Event = Ready | Outputs | Died | Wake | Cancel | Stop
Post = Callable[[Event], None]
