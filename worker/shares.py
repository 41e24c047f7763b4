"""Queues share a worker by weight, so that none starves. Numbers only; knows nothing of Redis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worker.settings import QueueShare


class Shares:
    """Splits the room of each claim; what a queue was owed and did not get by rounding it gets later."""

    def __init__(self, queues: Sequence[QueueShare]) -> None:
        self._total = sum(queue.weight for queue in queues)
        self._weights = {queue.name: queue.weight for queue in queues}
        self._owed = dict.fromkeys(self._weights, 0)  # in rows times the total weight, so that nothing rounds

    def split(self, room: int) -> list[tuple[str, int]]:
        """(queue, rows) in order of priority; together at most ``room``. Whoever is owed most comes first."""
        for name, weight in self._weights.items():
            self._owed[name] += room * weight
        order = sorted(self._owed, key=lambda name: -self._owed[name])
        quotas = {name: max(0, self._owed[name]) // self._total for name in order}
        for name in order:  # the rows that rounding left over
            if sum(quotas.values()) < room:
                quotas[name] += 1
        return [(name, quotas[name]) for name in order]

    def took(self, taken: Mapping[str, int]) -> None:
        """What each queue really gave. One that had less than its share does not save it up."""
        for name in self._owed:
            self._owed[name] -= taken.get(name, 0) * self._total
            self._owed[name] = max(-self._total, min(self._total, self._owed[name]))
