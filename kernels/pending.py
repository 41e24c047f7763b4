"""Done: the answer of a sampler that has drawn before it returns. cuda.Pending is the other kind."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Done(NamedTuple):
    """What a step says of its n rows."""

    tokens: NDArray[np.int32]  # [n], -1: none
    status: NDArray[np.uint8]  # [n]

    def wait(self) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
        return self
