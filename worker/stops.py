"""Stop strings, looked for in a row's bytes as its tokens come.

Owns which match counts and where the text ends. Must not know tokens' meaning, rows or the engine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class StopScanner:
    """``text`` is what the row may show so far: UTF-8, perhaps cut within a character.

    The match that ends first wins, of those that end together the longest: which tokens spell the text makes
    no difference. Each byte is looked at a bounded number of times, so the cost is linear in the output.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """``include``: a match stays in the text, otherwise none of it does."""
        self.text = bytearray()
        self._stops = [(stop, stop.encode()) for stop in stops]
        self._include = include
        self._any = re.compile(b"|".join([re.escape(sought) for _, sought in self._stops])).search
        self._reach = max(len(sought) for _, sought in self._stops) - 1  # bytes of a match before a token

    def feed(self, piece: bytes, held: bool = False) -> str | None:
        """Appends one token's bytes; returns the stop string they complete, at which ``text`` then ends.

        ``held``: no match may end in this piece (min_tokens); what it completes is ordinary text for good.
        """
        known = len(self.text)
        self.text += piece
        if held or self._any(self.text, max(0, known - self._reach)) is None:
            return None
        return self._end_at_match(known)

    def _end_at_match(self, known: int) -> str | None:
        """Ends the text at the first match that goes beyond ``known``, if there is one."""
        matches = []
        for stop, sought in self._stops:
            start = self.text.find(sought, max(0, known - len(sought) + 1))
            if start >= 0:
                matches.append((start + len(sought), start, stop))
        if not matches:  # what was found had ended before, while it was held
            return None
        end, start, stop = min(matches)
        del self.text[end if self._include else start :]
        return stop
