"""Token ids of text, word by word from a cache: a fraction of what the library takes for whole texts.

Owns where a text may be cut and what is remembered. Right only for tokenizers that encode words independently
of one another: ``encodes_words_apart`` says which may, a trial with PROBE which do. Must not know files,
templates or rows. Measured by benchmarks/parent_cost.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain, filterfalse

from worker.vocabulary import Description, parts

Encode = Callable[[str], Sequence[int]]

# One space between two words: every byte-level pre-tokenizer in use begins the second word with it. Longer
# white space is not cut: whether its last space joins the word depends on the tokenizer and on the word.
WORD_SPACE = re.compile(r" (?<=\S )(?=\S)")
PROBE = (
    " It's 12,345 x\n   y =  7.5 [a_b].\n\n (été) 漢字 ½ \U0001f469\u200d\U0001f467 \t<b> I'm\r\n !\u00a0 . "
)
# Together 10 MB: some 30,000 words of English, or 1,200 of sixty Chinese characters.
LATER_BYTES, FIRST_BYTES = 8 * 2**20, 2 * 2**20  # few words are the first: of a prompt, of a turn
ID_BYTES, SLOT_BYTES = 32, 104  # a number; a word's share of a dict that has just grown
CACHED_LENGTH = 64  # characters; what is longer is hardly met twice


class Words(dict[str, Sequence[int]]):
    """Ids of words met before, each encoded with ``before`` in front of it. Full, it starts afresh.

    It is full with ``room`` bytes: how many words that is depends on their length, and on how many tokens one
    has, which may be a hundred where the vocabulary lacks its script.
    """

    def __init__(self, encode: Encode, room: int, before: str = "") -> None:
        super().__init__()
        self._encode, self._before = encode, before
        self._room, self._taken = room, 0

    def __missing__(self, word: str) -> Sequence[int]:
        ids = self._encode(self._before + word)
        if len(word) <= CACHED_LENGTH:
            self.keep({word: ids})
        return ids

    def keep(self, words: Mapping[str, Sequence[int]]) -> None:
        size = sum([_bytes_of(word, ids) for word, ids in words.items()])
        if self._taken + size > self._room:
            self.clear()
            self._taken = 0
        if size <= self._room:
            self.update(words)
            self._taken += size


class WordEncoder:
    """``written``: by id, the bytes it stands for; ``names``: control tokens' ids by secret name."""

    def __init__(self, encode: Encode, written: Sequence[bytes], names: Mapping[str, int]) -> None:
        self._encode, self._written, self._names = encode, written, names
        self._name = re.compile(f"({'|'.join(map(re.escape, names)) or '(?!)'})")
        self._first, self._later = Words(encode, FIRST_BYTES), Words(encode, LATER_BYTES, " ")

    def __call__(self, text: str) -> list[int]:
        segment, *rest = self._name.split(text)
        ids = self._segment(segment)
        for name, segment in zip(rest[::2], rest[1::2], strict=True):
            ids.append(self._names[name])
            ids += self._segment(segment)
        return ids

    def _segment(self, text: str) -> list[int]:
        first, *later = WORD_SPACE.split(text)
        if unknown := dict.fromkeys(filterfalse(self._later.__contains__, later)):
            self._learn(unknown)
        return [*self._first[first], *chain.from_iterable(map(self._later.__getitem__, later))]

    def _learn(self, unknown: Iterable[str]) -> None:
        """Encodes words in one call, a third of the time of a call each; bytes tell whose ids are whose."""
        words = [word for word in unknown if len(word) <= CACHED_LENGTH and not word[-1].isspace()]
        if len(words) < 2:  # a word alone is encoded when it is looked up
            return
        text = "".join([" " + word for word in words])
        ids = self._encode(text)
        pieces = [self._written[token_id] for token_id in ids]
        if b"".join(pieces) != text.encode():  # the normalizer changes it: let each word be encoded alone
            return
        tokens_before = {size: count for count, size in enumerate(accumulate(map(len, pieces)), 1)}
        learned, start, size = {}, 0, 0
        for word in words:
            size += 1 + len(word.encode())
            if (end := tokens_before.get(size)) is None:  # a token reaches into the next word
                return
            learned[word] = ids[start:end]
            start = end
        self._later.keep(learned)


def _bytes_of(word: str, ids: Sequence[int]) -> int:
    """What it takes to remember a word."""
    return sys.getsizeof(word) + sys.getsizeof(ids) + ID_BYTES * len(ids) + SLOT_BYTES


def encodes_words_apart(description: Description) -> bool:
    """Whether tokenizer.json promises nothing that reaches across the space between two words."""
    normalizer = description["normalizer"]
    steps = {part["type"]: part for part in parts(description["pre_tokenizer"])}
    divided = "ByteLevel" in steps and (steps["ByteLevel"]["use_regex"] or "Split" in steps)
    greedy = any(
        token["lstrip"] or token["rstrip"] or " " in token["content"] for token in description["added_tokens"]
    )
    return divided and not greedy and (normalizer is None or normalizer["type"] == "NFC")
