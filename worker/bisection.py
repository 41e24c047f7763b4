"""Bisection: which row makes a step fail. Knows row ids and counts of computed tokens only.

The rows of a failed step are tried alone, half by half, until one fails by itself. A half has passed once
each of its rows has ended or computed past the point where it stood when its step failed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set


class Bisection:
    """A stack of groups under suspicion; the one on top is on trial. Empty almost always."""

    def __init__(self) -> None:
        self._groups: list[dict[int, int]] = []  # row id -> computed tokens that clear it

    @property
    def on_trial(self) -> Set[int] | None:
        """Row ids that may run, None for everyone."""
        return self._groups[-1].keys() if self._groups else None

    def failed(self, marks: Mapping[int, int], num_rows: int) -> int | None:
        """Takes a failed step's rows and what clears each. The guilty row's id, if it was alone.

        ``num_rows``: of the step, those among them that have ended meanwhile.
        """
        if self._groups:
            self._groups.pop()
        if num_rows == 1:
            self._groups.clear()
            return next(iter(marks))
        ids = list(marks)
        half = len(ids) // 2
        for group in filter(None, (ids[half:], ids[:half])):
            self._groups.append({row_id: marks[row_id] for row_id in group})
        return None

    def trial_is_over(self, computed: Callable[[int], int | None]) -> bool:
        """Whether the group on trial has just passed; ``computed`` gives None for a row that has ended."""
        if not self._groups:
            return False
        standings = ((computed(row_id), mark) for row_id, mark in self._groups[-1].items())
        if any(done is not None and done < mark for done, mark in standings):
            return False
        self._groups.pop()
        return True
