"""The rows of every case, the same for every peer: prompts and sampling numbers. Knows no engine, no clock.

All rows ignore EOS: no peer may win by ending early.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kernels.rows import RowParams
from worker.sequence import Row

BATCHES = (1, 8, 32, 128, 256)
DISTINCT = "all different"
MIXES: dict[str, Callable[[int], dict[str, Any]]] = {
    DISTINCT: lambda i: {
        "temperature": 0.7 + i % 256 / 500,
        "top_k": 20 + i % 64,
        "top_p": 0.9 + i % 256 / 3000,
        "seed": i,
    },
    "greedy": lambda i: {"temperature": 0.0},
    "one setting": lambda i: {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "seed": i},
}
OFFLINE_TOKENS = 144_294  # output tokens of ``offline``, for whoever compares with another program's
TAIL_SHORT, TAIL_LONG = 2_000, 20
TEXT_TOKENS = 64  # output tokens of a row of ``texts``
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "it", "rains", "today")


def decode(
    mix: str, count: int, vocab: int, *, prompt: int = 128, output: int = 256, seed: int = 0
) -> list[Row]:
    """(a): equal lengths."""
    ids = np.random.default_rng(seed).integers(3, vocab, (count, prompt)).tolist()
    return [Row(i, ids[i], RowParams(max_tokens=output, **MIXES[mix](i))) for i in range(count)]


def offline(vocab: int, count: int = 256) -> list[Row]:
    """(b): nano-vllm's bench.py, drawn in its order: all prompts, then output lengths, 100 to 1,024 each."""
    draw = random.Random(0).randint
    prompts = [[draw(3, 10_000) % vocab for _ in range(draw(100, 1024))] for _ in range(count)]
    outputs = [draw(100, 1024) for _ in range(count)]
    return [
        Row(i, prompt, RowParams(max_tokens=output, temperature=0.6, seed=i))
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


def tail(vocab: int, short: int = TAIL_SHORT, long: int = TAIL_LONG) -> list[Row]:
    """(c): short rows of 16 tokens, and among them, evenly spread, long ones of 2,000."""
    apart = short // long + 1
    rows = decode(DISTINCT, short + long, vocab, prompt=16, output=16)
    return [lengthened(row, 2_000) if row.id % apart == apart // 2 else row for row in rows]


def texts(count: int) -> Iterator[dict[str, Any]]:
    """(d): short prompts as lines of a file, 64 tokens each, settings all different."""
    for n in range(count):
        words = " ".join(WORDS[(n * 7 + k * k) % len(WORDS)] for k in range(5))
        shared = {"custom_id": str(n), "max_tokens": TEXT_TOKENS, "ignore_eos": True}
        yield shared | {"prompt": f"{words} {n}"} | MIXES[DISTINCT](n)


def tokenised(lines: Iterator[dict[str, Any]], encode: Callable[[str], Sequence[int]]) -> list[Row]:
    """The rows a worker makes of ``texts``."""
    names = ("max_tokens", *MIXES[DISTINCT](0))
    return [
        Row(n, encode(line["prompt"]), RowParams(**{name: line[name] for name in names}))
        for n, line in enumerate(lines)
    ]


def prefill(vocab: int, seed: int) -> list[Row]:
    """(e): 64 prompts of 512 tokens, one new token each; others with each seed, as some cache them."""
    return decode(DISTINCT, 64, vocab, prompt=512, output=1, seed=seed)


def padded(rows: Sequence[Row]) -> list[Row]:
    """A static batch: every prompt as long as the longest, every row runs as long as the longest."""
    prompt = max(len(row.prompt) for row in rows)
    output = max(row.params.max_tokens for row in rows)
    return [
        lengthened(replace(row, prompt=[*row.prompt, *[row.prompt[-1]] * (prompt - len(row.prompt))]), output)
        for row in rows
    ]


def lengthened(row: Row, output: int) -> Row:
    """The same row with another max_tokens."""
    return replace(row, params=replace(row.params, max_tokens=output))


def num_tokens(rows: Sequence[Row]) -> int:
    """Output tokens that were asked for."""
    return sum(row.params.max_tokens for row in rows)
