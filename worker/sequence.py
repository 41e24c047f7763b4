"""The nouns of the engine room: Row in, Output out; Sequence, Slice and Step in between.

Knows token ids and sampling numbers only: no text, no Redis, no model.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernels.rows import RowParams, Status

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Row:
    """What the parent hands the engine: token ids and resolved sampling numbers."""

    id: int
    prompt: Seq[int]
    params: RowParams
    streamed: bool = False  # True: Outputs carry this row's new tokens every step (rows with stop strings)


@dataclass(frozen=True, slots=True)
class Output:
    """What the engine says of a row: its new tokens since the last Output, and how it stands.

    ``status`` is Status.RUNNING for a streamed row's partial output, else how the row ended.
    """

    id: int
    tokens: Seq[int]
    status: Status
    message: str = ""


@dataclass(slots=True, eq=False)
class Sequence:
    """A row in the engine. ``computed`` chases ``len(tokens)``: prefill, chunks, decode and resume are one rule."""

    row: Row
    tokens: list[int]  # prompt, then output
    computed: int = 0  # tokens whose keys and values are in the cache
    blocks: list[int] = field(default_factory=list)
    slot: int = -1  # index into the sampler's per-row arrays while live

    @property
    def num_prompt(self) -> int:
        return len(self.row.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.row.prompt)


@dataclass(frozen=True, slots=True)
class Slice:
    """``count`` tokens of one sequence, from ``start``, to run in one step."""

    sequence: Sequence
    start: int
    count: int
    samples: bool  # the slice ends at the last known token: its logits give the next one


@dataclass(frozen=True, slots=True)
class Step:
    """What one run of the model computes, in packing order. Made by plan, read by everyone, changed by nobody."""

    slices: tuple[Slice, ...]
