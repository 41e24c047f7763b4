"""Bench: model and sampler of the product, built once, and as many engines over them as there are cases."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from worker.batch import Batch
from worker.compose import build_parts, build_policy
from worker.engine import Engine
from worker.settings import EngineSettings, Loop


class Bench:
    """The parts a worker is made of. They are looked into, hence Any."""

    def __init__(self, settings: EngineSettings, model: Any, sampler: Any) -> None:
        self.settings, self.model, self.sampler = settings, model, sampler

    @classmethod
    def build(cls, settings: EngineSettings) -> Bench:
        """By the worker's own functions."""
        return cls(settings, *build_parts(settings))

    def engine(self, batch: int, loop: Loop | None = None) -> Engine:
        """One with ``batch`` live rows. The last one must have given its slots back."""
        settings = replace(self.settings, max_batch=batch, loop=loop or self.settings.loop)
        policy = build_policy(settings, self.model)
        return Engine(self.model, self.sampler, policy, overlap=settings.loop == "overlapped")

    def warm(self, batches: Iterable[int], width: int) -> None:
        """Captures the decodes of these many rows, tables ``width`` blocks wide. No slot may be taken."""
        from kernels.cuda import RESULT_BUFFERS  # as many graphs of a draw, used in turn

        for rows in batches:
            slots = np.arange(rows, dtype=np.int32)
            addresses = self.model.run(idle(rows, 1, width))
            for _ in range(RESULT_BUFFERS):
                self.sampler.enqueue(addresses, slots).wait()  # slots without a row stay as they are


def idle(rows: int, tokens: int, width: int, first_block: int = 0) -> Batch:
    """Rows of ``tokens`` new tokens each and nothing past; blocks from ``first_block`` on, or all the bin."""
    ends = np.arange(rows + 1, dtype=np.int32) * np.int32(tokens)
    blocks = first_block + np.arange(rows * width) if first_block else np.zeros(rows * width)
    return Batch(
        input_ids=np.full(rows * tokens, 5, np.int64),
        cumulative=ends,
        past=np.zeros(rows, np.int32),
        block_table=blocks.astype(np.int32).reshape(rows, width),
        logits_rows=ends[1:].astype(np.int64) - 1,
        slots=np.arange(rows, dtype=np.int32),
    )
