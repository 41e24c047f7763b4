"""Which rows may share the engine after it died: suspects are run apart, halved, until one dies alone.

Integers only. Knows nothing of processes, Redis or tokens.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

SUSPECT_DEATHS = 2  # an engine can die once by accident
GUILTY_DEATHS = 2  # with no other row in it; those in company prove nothing, many rows shared them


class Quarantine:
    """Rows by number, and how many engine deaths each was in.

    Empty groups: the engine takes everybody. Otherwise the first group alone may run, all others wait.
    ``choose`` says who may be sent; ``died`` and ``left`` move the state on.
    """

    def __init__(self) -> None:
        self._groups: deque[set[int]] = deque()
        self._newest_first = False  # which half is tried first
        self._alone: Counter[int] = Counter()  # deaths of each row with no other in the engine

    @property
    def is_active(self) -> bool:
        return bool(self._groups)

    def choose(self, waiting: Iterable[int], running: Collection[int]) -> list[int]:
        """Those of the waiting rows that may join the running ones in the engine now, in their order."""
        if not self._groups:
            return list(waiting)
        group = self._groups[0]
        return [row for row in waiting if row in group] if group.issuperset(running) else []

    def arrive(self, suspects: Iterable[int]) -> None:
        """Rows that come with deaths from an earlier life (claimed after a hand-back): they run apart."""
        if group := set(suspects):
            self._groups.append(group)

    def died(self, running: Sequence[int], deaths: Sequence[int]) -> int | None:
        """The engine died with these rows in it, ``deaths`` counting this one too.

        Returns the row that is proved guilty: it died alone, and not for the first time.
        """
        if self._groups and not self._groups[0].isdisjoint(running):
            self._groups.popleft()
        suspects = [row for row, count in zip(running, deaths, strict=True) if count >= SUSPECT_DEATHS]
        alone = running[0] if len(running) == 1 else None
        if alone is not None:
            self._alone[alone] += 1
        if alone is not None and self._alone[alone] >= GUILTY_DEATHS:
            self._groups.clear()  # the others were in bad company: free until the engine dies again
            self._newest_first = not self._newest_first  # its neighbours may be like it, others are not
            return alone
        half = (len(suspects) + 1) // 2
        halves = [suspects[half:], suspects[:half]]
        if self._newest_first:
            halves.reverse()
        self._groups.extendleft(set(part) for part in halves if part)  # the last one is tried first
        return None

    def left(self, row: int) -> None:
        """The row is no longer in our hands: it ended, was cancelled or was handed back."""
        self._alone.pop(row, None)
        for group in self._groups:
            group.discard(row)
        self._groups = deque(group for group in self._groups if group)
