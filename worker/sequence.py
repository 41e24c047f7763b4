"""The nouns of the engine room: Row in, Output out; Sequence and Step in between.

Knows token ids and sampling numbers only: no text, no Redis, no model.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kernels.rows import RowParams, Status

Ints = NDArray[np.int32]
Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Row:
    """What the parent hands the engine: token ids and resolved sampling numbers."""

    id: int
    prompt: Seq[int]
    params: RowParams
    streamed: bool = False  # True: Outputs carry this row's new tokens every step (rows with stop strings)
    open_ended: bool = False  # True: max_tokens is nobody's wish, and is cut to what the cache holds


@dataclass(frozen=True, slots=True)
class Output:
    """What the engine says of a row: its new tokens since the last Output, and how it stands.

    ``status`` is Status.RUNNING for a streamed row's partial output, else how the row ended. The token that
    ended a row (EOS, a stop id) is among ``tokens``. ``message`` gives the reason of TOO_LARGE and FAILED.
    """

    id: int
    tokens: Seq[int]
    status: Status
    message: str = ""


@dataclass(slots=True, eq=False)
class Sequence:
    """A row in the engine. While it is live its tokens, lengths and blocks are a line of LiveBatch."""

    row: Row
    arrival: int  # rank in order of arrival; preemption and resume keep it
    output: list[int] = field(default_factory=list)  # tokens generated before the last preemption
    num_sent: int = 0  # output tokens already told in Outputs
    overtaken: int = 0  # later rows that were seated before it
    slot: int = -1  # line of LiveBatch and of the sampler's per-row arrays; -1 while waiting

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled, when it is seated."""
        return len(self.row.prompt) + len(self.output)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one run of the model computes. Made by plan, read by everyone, changed by nobody.

    Column i is a slice of one sequence: ``counts[i]`` tokens from position ``starts[i]`` of the row in slot
    ``slots[i]``. Positions and no tokens, so it can be made before the last step's tokens are known.
    """

    slots: Indices  # [B], oldest row first
    starts: Indices  # [B]
    counts: Indices  # [B], each at least 1
    samples: Flags  # [B]: the slice ends at the row's last known token, so its logits give the next one
    arrivals: Indices  # [B] whose slices they are: by the time the step lands, the slot may be another's
    left: tuple[int, ...]  # slots given up since the last step ...
    joined: tuple[Sequence, ...]  # ... and the rows seated in this one, maybe in the same slots

    def __post_init__(self) -> None:
        for column in (self.slots, self.starts, self.counts, self.samples, self.arrivals):
            column.flags.writeable = False

    def __len__(self) -> int:
        return len(self.slots)
