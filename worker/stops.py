"""Stop strings, looked for in a row's bytes as its tokens come.

Owns which match counts and where the text ends. Must not know tokens' meaning, rows or the engine.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """``text`` is what the row may show so far: UTF-8, perhaps cut within a character.

    The match that ends first wins, of those that end together the longest: which tokens spell the text makes
    no difference. Each byte is asked once whether a match ends with it: where it is a stop's last byte, that
    stop is compared with the text. So the cost is linear in the output, whatever it repeats: 0.5 us a token
    with two short stops, at worst 2 us a byte, with 16 stops of 1,024 characters that differ from it late.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """``include``: a match stays in the text, otherwise none of it does."""
        self.text = bytearray()
        self._include = include
        self._by_last: dict[int, tuple[bytes, ...]] = {}  # last byte: the stops that end with it
        for sought in sorted(map(str.encode, stops), key=len, reverse=True):  # longest first
            self._by_last[sought[-1]] = (*self._by_last.get(sought[-1], ()), sought)

    def feed(self, piece: bytes, held: bool = False) -> str | None:
        """Appends one token's bytes; returns the stop string they complete, at which ``text`` then ends.

        ``held``: no match may end in this piece (min_tokens); what it completes is ordinary text for good.
        """
        text, by_last = self.text, self._by_last
        end = len(text)
        text += piece
        if held:
            return None
        for byte in piece:
            end += 1
            if byte in by_last and text.endswith(by_last[byte], 0, end):
                return self._end_at(end, by_last[byte])
        return None

    def _end_at(self, end: int, longest_first: Sequence[bytes]) -> str:
        """Ends the text at the longest of these that ends at ``end``."""
        sought = next(sought for sought in longest_first if self.text.endswith(sought, 0, end))
        del self.text[end if self._include else end - len(sought) :]
        return sought.decode()
