from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import tiny_text
import tokenizers
from tokenizers import normalizers, pre_tokenizers

from worker import words as module
from worker.tokenizer import Tokenizer
from worker.vocabulary import token_bytes
from worker.words import WordEncoder, Words, encodes_words_apart


class Counted:
    """The tiny tokenizer, its calls written down."""

    def __init__(
        self, library: tokenizers.Tokenizer | None = None, names: Mapping[str, int] | None = None
    ) -> None:
        self.library = library or tiny_text.byte_level()
        self.calls: list[str] = []
        self.by_words = WordEncoder(self.encode, token_bytes(json.loads(self.library.to_str())), names or {})

    def encode(self, text: str) -> list[int]:
        self.calls.append(text)
        ids: list[int] = self.library.encode(text).ids
        return ids

    def check(self, text: str) -> list[str]:
        """Compares with the whole text's ids; returns the calls it took."""
        self.calls.clear()
        ids = self.by_words(text)
        assert ids == self.library.encode(text).ids
        return self.calls


def test_new_words_are_encoded_in_one_call_and_known_ones_in_none() -> None:
    encoder = Counted()
    assert [*map(sorted, map(str.split, encoder.check("low lowing the low thing")))] == [
        ["low", "lowing", "the", "thing"],
        ["low"],
    ]
    assert encoder.check("low thing lowing the low") == []


def test_white_space_of_more_than_a_space_is_not_cut() -> None:
    encoder = Counted()
    assert encoder.check("a  b\n 12 c") == ["a  b\n 12", " c"]
    assert encoder.check("a ½  34 \n\n d") == ["a", " ½  34 \n\n d"]


def test_a_text_that_ends_in_white_space() -> None:
    encoder = Counted()
    assert sorted(encoder.check("a b b c\n")) == [" b", " c\n", "a"]
    assert encoder.check("a b c\n") == []


@pytest.mark.parametrize("text", ["", " ", "a", " a", "a ", "a  ", "  a", "a \n", "a\u00a0 b", "\x1c \x1d a"])
def test_edges(text: str) -> None:
    Counted().check(text)


def test_long_words_are_not_remembered() -> None:
    encoder = Counted()
    long = "x" * (module.CACHED_LENGTH + 1)
    assert encoder.check(f"a {long}") == ["a", f" {long}"]
    assert encoder.check(f"a {long}") == [f" {long}"]


def size_of(words: Words) -> int:
    """Bytes it holds, each number counted as an object of its own."""
    held = sum(
        sys.getsizeof(word) + sys.getsizeof(ids) + sum(map(sys.getsizeof, ids)) for word, ids in words.items()
    )
    return held + sys.getsizeof(words)


@pytest.mark.parametrize("letters", [1, 4, 60])
def test_the_cache_is_bounded_by_bytes(letters: int) -> None:
    """Not by words: each of 60 Chinese characters takes twenty times the memory of a short English one."""
    room = 2**18
    words = Words(lambda text: [*range(1000, 1000 + 3 * len(text))], room, " ")
    largest = 0
    for number in range(0x4E00, 0x4E00 + 3000):
        words.keep({chr(number) * letters: [1000 + number] * 3 * letters})
        largest = max(largest, size_of(words) if number % 50 == 0 else 0)
        assert chr(number) * letters in words
    assert words[chr(number) * letters + "x"] == [*range(1000, 1000 + 3 * letters + 6)]
    assert room / 3 < largest <= room


def test_what_alone_is_larger_than_the_cache_is_not_kept() -> None:
    words = Words(lambda text: [len(text)], 1000, " ")
    words.keep({str(number): [number] for number in range(99)})
    assert not words
    assert words["a"] == [2]
    assert set(words) == {"a"}


def test_a_prompt_that_fills_the_cache_is_encoded_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LATER_BYTES", 1000)
    encoder = Counted()
    encoder.check("a b c d e f g")
    encoder.check("a b c h i j k")


def test_the_caches_of_a_tokenizer_take_what_they_say() -> None:
    encoder = Counted()
    for start in range(0x4E00, 0x4E00 + 4000, 4):
        encoder.check(" ".join(chr(start + i) * 60 for i in range(4)))
    caches = (encoder.by_words._first, encoder.by_words._later)
    assert 2**20 < sum(map(size_of, caches)) < 10 * 2**20


def test_words_that_the_normalizer_changes() -> None:
    library = tiny_text.byte_level()
    library.normalizer = normalizers.NFC()
    encoder = Counted(library)
    encoder.check("the cafe\u0301 \u0958 a e\u0301 b")
    encoder.check("b e\u0301 a")


def test_names_of_control_tokens_are_cut_out() -> None:
    library = tiny_text.byte_level()
    library.add_special_tokens(["<1>"])
    encoder = Counted(library, {"<1>": library.token_to_id("<1>")})
    assert sorted(encoder.check("<1>user\nthe low<1>\n<1>")) == ["", "\n", " low", "user\nthe"]
    assert encoder.check("<1>user\nthe low<1>\n<1>") == []


class TestStructure:
    def promises(self, library: tokenizers.Tokenizer) -> bool:
        return encodes_words_apart(json.loads(library.to_str()))

    def test_byte_level(self) -> None:
        assert self.promises(tiny_text.byte_level())

    def test_no_normalizer_but_nfc(self) -> None:
        library = tiny_text.byte_level()
        library.normalizer = normalizers.NFC()
        assert self.promises(library)
        library.normalizer = normalizers.Strip()
        assert not self.promises(library)

    @pytest.mark.parametrize("content", ["<|end|>", "a b"])
    def test_no_added_tokens_that_take_in_spaces(self, content: str) -> None:
        library = tiny_text.byte_level()
        library.add_tokens([tokenizers.AddedToken(content, rstrip=content == "<|end|>")])
        assert not self.promises(library)

    def test_no_undivided_text(self) -> None:
        assert not self.promises(tiny_text.sentence_piece())
        library = tiny_text.byte_level()
        library.pre_tokenizer = pre_tokenizers.ByteLevel(use_regex=False)
        assert not self.promises(library)


@pytest.fixture
def reaching() -> tokenizers.Tokenizer:
    """Its structure promises words apart, but it has a token across a space."""
    library = tiny_text.byte_level()
    library.model = tokenizers.models.BPE(
        vocab={token: i for i, token in enumerate([*tiny_text.CONTROL, *tiny_text.ALPHABET, "sĠ"])},
        merges=[("s", "Ġ")],
    )
    by_letters = pre_tokenizers.Split("q", "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [by_letters, pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    assert encodes_words_apart(json.loads(library.to_str()))
    return library


def test_a_token_across_a_space_is_no_words(reaching: tokenizers.Tokenizer) -> None:
    encoder = Counted(reaching)
    alone = [reaching.encode(word).ids for word in ("a", " is", " it")]
    assert encoder.by_words("a is it") == [token for ids in alone for token in ids]


def test_the_trial_finds_such_tokenizers_out(reaching: tokenizers.Tokenizer, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_text.write_folder(tmp_path / "m", reaching))
    assert tokenizer.encode("is it") == reaching.encode("is it").ids
