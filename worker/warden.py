"""The engine as its parent minds it: when it takes rows, when it hangs, when another start is no use.

Owns the engine's starts and what went wrong with it. Must not know Redis, text or processes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from kernels.rows import Status
from producer.errors import LivebatchError
from worker.events import Died, Outputs, Ready
from worker.logs import named
from worker.silence import Silence

if TYPE_CHECKING:
    from worker.sequence import Row

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3  # in a row
MAX_VERDICTS = 10  # rows that killed it with no completed row between them: then it is not the rows


class EngineHandle(Protocol):
    """What the parent needs of the engine's process."""

    def start(self) -> None: ...
    def send(self, rows: Sequence[Row], cancels: Sequence[int]) -> None: ...
    def progress(self) -> object: ...  # changes while the process does anything; None: there is no telling
    def kill(self) -> None: ...
    def stop(self) -> None: ...


class Warden:
    """Hears all that the engine says. Raises LivebatchError once the engine is past help."""

    def __init__(self, engine: EngineHandle, timeout_seconds: float) -> None:
        self.is_ready = False  # the engine takes rows
        self.owed = 0  # rows that it has and has not ended, those of them included that it was told to drop
        self._engine = engine
        self._timeout_seconds = timeout_seconds
        self._silence = Silence()
        self._progress: object = None
        self._is_killed = False
        self._has_run = False
        self._failed_starts = 0
        self._verdicts = 0

    def start(self) -> None:
        """Ready or Died follows."""
        self.is_ready, self.owed, self._is_killed = False, 0, False
        self._silence.broken()
        self._engine.start()

    def stop(self) -> None:
        """The end; nothing follows."""
        self._engine.stop()

    def send(self, rows: Sequence[Row], cancels: Sequence[int]) -> None:
        """Rows for an engine that is ready, and ids of those that it shall drop."""
        self.owed += len(rows)
        self._engine.send(rows, cancels)

    def ready(self, told: Ready) -> None:
        """It is built."""
        log.info("engine ready after %.1f s", told.seconds, extra=named("engine_ready", seconds=told.seconds))
        self.is_ready, self._has_run, self._failed_starts = True, True, 0

    def heard(self, told: Outputs) -> None:
        """It lives, and some of its rows have ended."""
        self._silence.broken()
        self.owed -= sum(output.status != Status.RUNNING for output in told.outputs)

    def died(self, told: Died) -> None:
        """Starts it once more, unless that is no use."""
        if not self.is_ready:
            self._start_failed(told)
        self.start()

    def _start_failed(self, told: Died) -> None:
        """Raises where another start is no use.

        The first engine that says why it cannot be built would say so again. What stops a later one may pass.
        """
        self._failed_starts += 1
        is_over = self._failed_starts >= MAX_FAILED_STARTS
        if told.error and (is_over or not self._has_run):
            raise told.error
        if is_over:
            raise LivebatchError(
                f"the engine does not start: {told.how}, {self._failed_starts} times in a row"
            )

    def condemn(self, job_id: str) -> None:
        """The row is proved to kill the engine. Raises when every row seems to: then it is not the row."""
        self._verdicts += 1
        if self._verdicts >= MAX_VERDICTS:
            raise LivebatchError(f"the engine died of {self._verdicts} rows, each alone, and completed none")
        log.error("row %s kills the engine and fails alone", job_id)

    def completed(self) -> None:
        """A row came to its end: the engine can run rows."""
        self._verdicts = 0

    def mind(self) -> None:
        """To be called every turn: kills an engine that hangs. Died follows; if not, this raises."""
        is_well = not self.owed if self.is_ready else self._has_moved()
        if is_well:
            self._silence.broken()
        elif (silent := self._silence.grow()) >= self._timeout_seconds:
            self._kill(silent)

    def _kill(self, silent: float) -> None:
        if self._is_killed:  # a call into a driver may never return, and until then nothing ends its process
            raise LivebatchError(f"the engine hangs, and is still there {silent:.0f} s after SIGKILL")
        what = "has rows and has said" if self.is_ready else "is being built and has done"
        log.error("the engine %s nothing for %.0f s: it is killed", what, silent)
        self._is_killed = True
        self._silence.broken()
        self._engine.kill()

    def _has_moved(self) -> bool:
        """Whether the process did anything since the last turn. While it is being built it says nothing."""
        before, self._progress = self._progress, self._engine.progress()
        return self._progress not in (None, before)
