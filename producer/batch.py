"""The nouns of a batch: what was submitted, how far it is, who works on it. Standard library only.

Owns their shapes and their JSON. Must not know Redis, files or terminals.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from producer.errors import StoreError

State = Literal["open", "closed", "cancelled"]
Phase = Literal["queueing", "running", "waiting", "done", "cancelled"]
DAY_SECONDS = 86_400
KEEP_SECONDS = 7 * DAY_SECONDS
DEFAULT_QUEUE = "livebatch"  # of a batch, and of a worker, that is told of none


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file, known by what is in it: ``sha256`` of its bytes as they lie on disk (hex)."""

    path: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What a batch is: written once, before its first row. Submitting again must bring the same files."""

    id: str
    queue: str
    format: str
    created: float  # unix seconds
    files: tuple[SourceFile, ...]
    keep_seconds: int = KEEP_SECONDS  # how long results stay in Redis after their row ended
    expires: float | None = None  # unix seconds; rows that have not ended by then end as batch_expired
    retries: str | None = None  # the batch whose failed rows these are

    def encode(self) -> str:
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(fields, ensure_ascii=True, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str | bytes) -> Record:
        """Raises StoreError when Redis holds something that is not a batch record of ours."""
        try:
            fields = json.loads(text)
            return cls(**{**fields, "files": tuple(SourceFile(**file) for file in fields["files"])})
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StoreError(f"a batch record in Redis is damaged or of another version: {error}") from error


@dataclass(slots=True)
class Progress:
    """Rows read so far by a submission, by what became of them."""

    queued: int = 0
    already: int = 0  # an earlier submission of this batch had added them
    failed: int = 0  # bad lines, also an earlier submission's: each has an error result already
    fraction: float | None = None  # of the input's bytes; None before any is read
    holding: str = ""  # why it waits for workers just now; "": it does not

    @property
    def rows(self) -> int:
        return self.queued + self.already + self.failed

    def add(self, other: Progress) -> None:
        self.queued += other.queued
        self.already += other.already
        self.failed += other.failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a submission did, in rows; see Progress."""

    id: str
    queue: str
    queued: int
    already: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatus:
    """How far a batch is. Counts are rows; ``rows`` is final once ``state`` is not "open".

    ``state`` is what Redis keeps: open while rows are added, closed after; what people are told is ``phase``.
    """

    id: str
    queue: str
    state: State
    created: float
    rows: int
    completed: int
    failed: int
    cancelled: int
    prompt_tokens: int
    completion_tokens: int
    busy_seconds: float  # from when a worker took the first row that completed to the last such end, so far
    queued_at: float  # unix seconds of the producer's last chunk

    @property
    def ended(self) -> int:
        return self.completed + self.failed + self.cancelled

    @property
    def waiting(self) -> int:
        """Rows queued or running."""
        return self.rows - self.ended

    @property
    def is_over(self) -> bool:
        """No row will be added and none is waiting."""
        return self.state != "open" and self.waiting <= 0

    @property
    def rows_per_second(self) -> float:
        """Completed rows a second; bad lines cost no worker any time."""
        return self.completed / self.busy_seconds if self.busy_seconds > 0 else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens a second."""
        return self.completion_tokens / self.busy_seconds if self.busy_seconds > 0 else 0.0

    @property
    def silent_seconds(self) -> float:
        """Since the producer last added rows; large and "open" means that it died."""
        return max(0.0, time.time() - self.queued_at)

    def phase(self, workers: Iterable[WorkerReport]) -> Phase:
        """One word for people and JSON. "waiting": all rows are queued, and no live worker serves them."""
        if self.state == "cancelled":
            return "cancelled"
        if self.state == "open":
            return "queueing"
        if self.is_over:
            return "done"
        return "running" if any(worker.serves(self.queue) for worker in workers) else "waiting"

    def to_dict(self, workers: Iterable[WorkerReport] = ()) -> dict[str, Any]:
        """For JSON; ``state`` is the phase."""
        rates = {"rows_per_second": self.rows_per_second, "tokens_per_second": self.tokens_per_second}
        counts = {"ended": self.ended, "waiting": self.waiting}
        return {**asdict(self), "state": self.phase(workers), **counts, **rates}


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a live worker last said of itself; the field names are the worker's own."""

    name: str
    fields: Mapping[str, str]

    def serves(self, queue: str) -> bool:
        """A worker that names no queues may serve any."""
        return queue in self.fields.get("queues", queue).split(",")

    def to_dict(self) -> dict[str, Any]:
        """For JSON: what is a number is one, names of things stay text."""
        return {"name": self.name, **{key: _value(key, text) for key, text in self.fields.items()}}


_NUMBER = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")
_NAMES = frozenset({"host", "model", "queues"})


def _value(key: str, text: str) -> str | float:
    if key in _NAMES or not (number := _NUMBER.fullmatch(text)):
        return text
    return float(text) if number[1] else int(text)
