"""The engine's two seams, by duck type: the model (CPU, CUDA, fake) and the sampler (NumPy, CPU, CUDA twins).

What passes between them, ``Logits``, is theirs alone: an array f32[n, vocab_size] on the host, addresses on
a device, which only takes orders in ``run`` and ``enqueue``: ``Pending.wait`` is where its answer is awaited.

Knows shapes and promises only, no implementation.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kernels.rows import RowParams
from worker.batch import Batch
from worker.sequence import Ints

Logits = NDArray[Any]


class Model(Protocol):
    """Tokens in, logits out, with a paged KV cache of its own. Sizes are fixed once it is built."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_length(self) -> int:
        """Most tokens a row may have, prompt and output."""

    @property
    def block_size(self) -> int:
        """Tokens a KV block holds."""

    @property
    def num_blocks(self) -> int:
        """KV blocks, block 0 included: the bin for padding, never lent to a row."""

    @property
    def max_step_tokens(self) -> int:
        """Most tokens one run may carry."""

    def run(self, batch: Batch) -> Logits:
        """Writes the batch's keys and values to its blocks; logits [n, vocab_size] of ``logits_rows``.

        They are valid until the next run and may be edited. An exception means that this run gave
        nothing and the cache's contents are lost, but the next run may succeed; what is worse must end the
        process. MemoryError: there is none left, and a smaller batch may find enough.
        """


class Sampler(Protocol):
    """Logits in, one token a row out. Per-row state lives by slot from ``admit`` to ``release``."""

    def admit(self, slot: int, params: RowParams, prompt: Seq[int], output: Seq[int] = ()) -> None:
        """Takes a free slot for a row; ``output``: what it had generated when it was preempted.

        RuntimeError and MemoryError are the device's; any other error says that this row cannot be taken.
        """

    def release(self, slot: int) -> None:
        """Frees a slot; nothing of its row may reach the next."""

    def enqueue(self, logits: Logits, slots: Ints) -> Pending:
        """Draws a token for each of logits' n >= 0 rows, which belong to ``slots`` [n].

        The token joins the row's own state at once. A row that has ended stays as it is. MemoryError as in
        ``Model.run``.
        """


class Pending(Protocol):
    """A step's draw, maybe still under way."""

    def wait(self) -> tuple[Ints, NDArray[np.uint8]]:
        """(tokens [n], Status [n]). No token is meant where the status is beyond LENGTH."""
