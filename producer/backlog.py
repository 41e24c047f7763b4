"""How many bytes of a batch wait in Redis, told from what its producer added and how many rows have ended.

Owns that sum; a look costs no walk over the queue. Must not know Redis.
"""

from __future__ import annotations

from collections import deque

ROW_BYTES = 1400  # of a waiting row beside its packed payload: RQ's hash, our entries, Redis' own (measured)


class Backlog:
    """Rows end about in the order they came: what waits are the rows added last."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, int]] = deque()  # (rows, bytes), those that came first on the left
        self._rows = 0
        self._bytes = 0

    def add(self, rows: int, payload_bytes: int) -> None:
        """These rows came, with so many bytes of payload."""
        size = payload_bytes + rows * ROW_BYTES
        self._chunks.append((rows, size))
        self._rows += rows
        self._bytes += size

    def bytes(self, waiting: int) -> int:
        """Of the last ``waiting`` rows, rounded up to whole chunks. Chunks before them are forgotten."""
        while self._chunks and self._rows - self._chunks[0][0] >= waiting:
            rows, size = self._chunks.popleft()
            self._rows -= rows
            self._bytes -= size
        return self._bytes
