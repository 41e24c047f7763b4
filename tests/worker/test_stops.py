from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.stops import StopScanner


def run(
    stops: list[str], pieces: list[bytes], include: bool = False, held: int = 0
) -> tuple[str | None, int, str]:
    """(stop string found, tokens taken, text)."""
    scanner = StopScanner(stops, include)
    for taken, piece in enumerate(pieces, 1):
        if (stop := scanner.feed(piece, taken <= held)) is not None:
            return stop, taken, scanner.text.decode()
    return None, len(pieces), scanner.text.decode()


def letters(text: str) -> list[bytes]:
    return [bytes([byte]) for byte in text.encode()]


def test_across_token_borders() -> None:
    assert run(["D E F"], [b" C", b" D", b" E", b" F G", b" H"]) == ("D E F", 4, " C ")


def test_within_one_token() -> None:
    assert run(["b"], [b"abc", b"d"]) == ("b", 1, "a")


def test_included_on_demand_but_nothing_behind_it() -> None:
    assert run(["bc"], [b"ab", b"cd"], include=True) == ("bc", 2, "abc")


def test_a_beginning_that_goes_on_otherwise_stays() -> None:
    assert run(["aab"], letters("aaaab")) == ("aab", 5, "aa")
    assert run(["END"], letters("EN ENx")) == (None, 6, "EN ENx")


def test_multibyte_characters_across_tokens() -> None:
    assert run(["字"], letters("漢字x")) == ("字", 6, "漢")


@pytest.mark.parametrize("pieces", [[b"xabcdy"], letters("xabcdy"), [b"xab", b"cdy"], [b"xabc", b"dy"]])
def test_the_match_that_ends_first_wins_however_the_text_is_cut(pieces: list[bytes]) -> None:
    assert run(["abcd", "bc", "d"], pieces)[::2] == ("bc", "xa")


def test_of_those_that_end_together_the_longest_wins() -> None:
    assert run(["c", "abc", "bc"], letters("xabc"))[::2] == ("abc", "x")


def test_min_tokens_holds_stop_strings_back() -> None:
    assert run(["\n"], [b"a", b"\n", b"b", b"\n", b"c"], held=2) == ("\n", 4, "a\nb")


def test_a_match_may_begin_while_held() -> None:
    assert run(["ab"], letters("xab"), held=2) == ("ab", 3, "x")


def test_what_was_completed_while_held_never_counts() -> None:
    assert run(["ab"], letters("abc"), held=2) == (None, 3, "abc")


def test_tokens_that_write_nothing() -> None:
    assert run(["ab"], [b"a", b"", b"b", b""]) == ("ab", 3, "")


def first_match(
    stops: list[str], pieces: list[bytes], include: bool, held: int
) -> tuple[str | None, int, bytes]:
    """The formula: of all matches that do not end in a held piece the one with the least (end, start)."""
    text, ends = b"".join(pieces), [*accumulate(map(len, pieces))]
    free = ends[held - 1] if held else 0
    matches = [
        (start + len(stop.encode()), start, stop)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop.encode(), start) and start + len(stop.encode()) > free
    ]
    if not matches:
        return None, len(pieces), text
    end, start, stop = min(matches)
    taken = next(taken for taken, size in enumerate(ends, 1) if size >= end)
    return stop, taken, text[: end if include else start]


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(
        st.lists(st.sampled_from([b"a", b"b", b"c", *letters("é漢")]), max_size=4).map(b"".join),
        min_size=1,
        max_size=12,
    ),
    stops=st.lists(st.text(alphabet="abcé漢", min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
    held=st.integers(0, 12),
)
def test_same_as_searching_the_whole_text(
    pieces: list[bytes], stops: list[str], include: bool, held: int
) -> None:
    """However the text is cut into tokens, and though they cut characters."""
    held = min(held, len(pieces))
    scanner = StopScanner(stops, include)
    found = None
    for taken, piece in enumerate(pieces, 1):
        if (found := scanner.feed(piece, taken <= held)) is not None:
            break
    assert (found, taken, bytes(scanner.text)) == first_match(stops, pieces, include, held)


class Counted(bytearray):
    """Text that writes down each time it is searched, and how much of it."""

    asked, searched = 0, 0

    def endswith(self, *place: Any) -> bool:
        self.asked += 1
        return super().endswith(*place)

    def find(self, sought: bytes, start: int = 0, *end: Any) -> int:  # type: ignore[override]
        self.searched += len(self) - start
        return super().find(sought, start, *end)


def test_long_stop_strings_are_compared_once_a_byte_whatever_the_text_repeats() -> None:
    """A search of the whole reach of the stops, token by token, took 10 ms a token."""
    long = [part + end for part in ("ab" * 511, "ba" * 511) for end in "cdefghij"]
    scanner = StopScanner([*long, "c" * 1023 + "a"])
    scanner.text = text = Counted()
    for piece in [b"abab"] * 1500:
        assert scanner.feed(piece) is None
    assert (text.asked, text.searched) == (3000, 0)  # each "a" once
    assert scanner.feed(b"j") == "ab" * 511 + "j"
