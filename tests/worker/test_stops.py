from __future__ import annotations

import pytest
from hypothesis import given
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


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    include=st.booleans(),
)
def test_same_as_searching_the_whole_text(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    """The formula: of all matches the one with the least (end, start), however the text is cut."""
    pieces, rest = [], text.encode()
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    matches = [
        (start + len(stop), start)
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    stop, taken, shown = run(stops, pieces, include)
    if not matches:
        assert (stop, shown) == (None, text)
        return
    end, start = min(matches)
    assert stop == text[start:end]
    assert shown == text[: end if include else start]
    assert sum(map(len, pieces[: taken - 1])) < end <= sum(map(len, pieces[:taken]))
