"""The CUDA sampler behind the CPU twins' signature: NumPy logits in, so that one test serves all three."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

BFLOAT16 = np.uint16


def rounded(logits: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """fp32 values that a narrower type holds exactly."""
    if kind == "bfloat16":
        return (logits.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    with np.errstate(over="ignore"):
        return logits.astype(kind).astype(np.float32)


class OnDevice:
    """cuda.BatchedSampler fed from host memory; ``offset`` entries of misalignment before the first row."""

    def __init__(
        self,
        max_batch: int,
        vocab_size: int,
        max_length: int,
        kind: Any = "float32",
        **options: Any,
    ) -> None:
        from kernels import cuda

        self.sampler = cuda.BatchedSampler(max_batch, vocab_size, max_length, logits=kind, **options)
        self.kind, self.offset = kind, 0
        self.admit, self.release, self.set_mask = (
            self.sampler.admit,
            self.sampler.release,
            self.sampler.set_mask,
        )

    def upload(self, logits: NDArray[np.float32]) -> Any:
        import cupy as cp

        if self.kind == "bfloat16":
            stored = (logits.view(np.uint32) >> np.uint32(16)).astype(BFLOAT16)
        else:
            with np.errstate(over="ignore"):
                stored = logits.astype(self.kind)
        room = cp.empty(stored.size + 4, stored.dtype)
        view = room[self.offset : self.offset + stored.size].reshape(stored.shape)
        view.set(stored)
        cp.cuda.get_current_stream().synchronize()  # the sampler's stream does not wait for this one
        return view

    def step(self, logits: NDArray[np.float32], slots: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
        return self.sampler.step(self.upload(logits), slots)
