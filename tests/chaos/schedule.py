"""What goes wrong, and when: a function of the seed alone.

A fault waits for a share of the rows to have ended rather than for a time, so that the whole storm falls into
the batch however fast the machine is.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "engine killed",
    "engine frozen",
    "worker killed",
    "worker frozen",
    "worker told to end",
    "worker told twice",
    "producer killed",
    "producer frozen",
    "Redis killed",
    "Redis frozen",
    "row cancelled",
    "batch cancelled",
]

# Of 50 faults. The batch that is cancelled is another one, and cancelled once.
SHARES: dict[Kind, int] = {
    "engine killed": 7,
    "engine frozen": 4,
    "worker killed": 8,
    "worker frozen": 5,
    "worker told to end": 6,
    "worker told twice": 4,
    "producer killed": 5,
    "producer frozen": 3,
    "Redis killed": 5,
    "Redis frozen": 1,
    "row cancelled": 2,
}
LAST = 0.85  # of the rows have ended when the last fault falls due
LEASE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Fault:
    """``at``: share of the rows that have ended. ``seconds``: how long it stays frozen, or away."""

    at: float
    kind: Kind
    victim: int  # which of the workers or rows, modulo how many there are
    seconds: float


def schedule(seed: int, count: int) -> list[Fault]:
    """``count`` faults in order, of every kind about its share, one of them the cancelled batch."""
    draw = random.Random(seed)
    deck = [kind for kind, share in SHARES.items() for _ in range(share)]
    kinds: list[Kind] = []
    while len(kinds) < count - 1:
        draw.shuffle(deck)
        kinds += deck
    kinds[count - 1 :] = []
    moments = sorted(draw.uniform(0.02, LAST) for _ in kinds)
    faults = [
        Fault(at, kind, draw.randrange(1 << 16), _seconds(kind, draw))
        for at, kind in zip(moments, kinds, strict=True)
    ]
    faults.append(Fault(draw.uniform(0.3, 0.6), "batch cancelled", 0, 0.0))
    return sorted(faults, key=lambda fault: fault.at)


def _seconds(kind: Kind, draw: random.Random) -> float:
    if kind == "Redis killed":
        return draw.uniform(0.0, 3.0)
    return draw.uniform(LEASE_SECONDS + 1, LEASE_SECONDS + 4) if kind.endswith("frozen") else 0.0
