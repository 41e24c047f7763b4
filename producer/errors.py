"""Every exception raised on purpose. The command lines turn each into one clear line and an exit code."""

from __future__ import annotations


class LivebatchError(Exception):
    """Root of the tree. ``str(error)`` says what went wrong and what to do next."""


class RowError(LivebatchError):
    """One row is wrong; only that row fails.

    ``code`` is a stable word (``invalid_value``), ``param`` the field at fault or None.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[type[RowError], tuple[str, str, str | None]]:
        return type(self), (self.code, self.message, self.param)


class WireError(LivebatchError):
    """A message in Redis that is not ours, of another version, or damaged."""


class UsageError(LivebatchError):
    """The caller asked for something that cannot be done: a missing file, a changed file, a wrong flag."""


class OutputError(UsageError):
    """Results cannot be written where they go, a full disk mostly. They are still in Redis."""


class NothingToRetryError(UsageError):
    """Every row of the batch to be retried has its answer, bad lines apart: no batch was made."""


class StoreError(LivebatchError):
    """Redis cannot be reached, refuses, or is set up in a way that would lose work."""


class HalfQueuedError(StoreError):
    """Redis failed while rows were queued. The message names the batch: under its id the rest can follow."""
