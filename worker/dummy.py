"""DummyModel: a model without weights that echoes prompts, to try a pipeline.

Keeps a KV cache whose entries are the tokens themselves and reads it through the block table, like a real
model, so that what it answers depends on every cached position and on nothing else.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from worker.batch import Batch

Cells = NDArray[np.int64]

EMPTY = -1


class TokenCache:
    """A paged KV cache with one number a position. [num_blocks, block_size]"""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.cells = np.full((num_blocks, block_size), EMPTY, np.int64)

    def write(self, batch: Batch, values: Cells, positions: Cells) -> None:
        """Stores a value [T] for each token of the batch."""
        rows = np.repeat(np.arange(len(batch.past)), np.diff(batch.cumulative))
        blocks = batch.block_table[rows, positions // self.block_size]
        self.cells[blocks, positions % self.block_size] = values

    def read(self, batch: Batch) -> tuple[Cells, Cells]:
        """For each logits row: the values of its whole table [n, W * block_size] and how many count [n]."""
        rows = np.searchsorted(batch.cumulative, batch.logits_rows, side="right") - 1
        lengths = token_positions(batch)[batch.logits_rows] + 1
        width = batch.block_table.shape[1] * self.block_size
        return self.cells[batch.block_table[rows]].reshape(len(rows), width), lengths


def token_positions(batch: Batch) -> Cells:
    """Position of each token of the batch in its row. [T]"""
    offsets = np.repeat(batch.past - batch.cumulative[:-1], np.diff(batch.cumulative))
    return np.arange(len(batch.input_ids)) + offsets


def one_hot(tokens: Cells, vocab_size: int) -> NDArray[np.float32]:
    """Logits [n, vocab_size] whose greedy choice is ``tokens`` [n]."""
    logits = np.zeros((len(tokens), vocab_size), np.float32)
    logits[np.arange(len(tokens)), tokens] = 100.0
    return logits


class DummyModel:
    """Answers a prompt with ``echo_id``, the prompt's own tokens and ``eos_id``, then ``eos_id`` for ever.

    ``echo_id`` must not occur in prompts: it marks where the answer starts, so that the next token is a
    function of the tokens alone and a preempted row resumes exactly.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        echo_id: int,
        eos_id: int,
        context_length: int = 8192,
        block_size: int = 16,
        num_blocks: int = 16385,
        max_step_tokens: int = 4096,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.max_step_tokens = max_step_tokens
        self._echo_id = echo_id
        self._eos_id = eos_id
        self._cache = TokenCache(num_blocks, block_size)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """One-hot logits [n, vocab_size]."""
        assert len(batch.input_ids) <= self.max_step_tokens
        self._cache.write(batch, batch.input_ids, token_positions(batch))
        return one_hot(self._echo(*self._cache.read(batch)), self.vocab_size)

    def _echo(self, tokens: Cells, lengths: Cells) -> Cells:
        known = np.arange(tokens.shape[1]) < lengths[:, None]
        marks = known & (tokens == self._echo_id)
        start = marks.argmax(axis=1)  # tokens before the mark: the prompt
        at = lengths - start - 1  # tokens of it already said
        every = np.arange(len(tokens))
        said = np.where(at < start, tokens[every, np.minimum(at, lengths - 1)], self._eos_id)
        return np.where(marks.any(axis=1), said, self._echo_id)
