"""A worker in a hurry: leases of a second, and a dummy model whose process dies of a prompt with a bell.

The whole worker dies of another prompt while the engine runs it.

``python -m e2e.quick_worker URL MAX_BATCH``. The engine's process imports this module too: multiprocessing
gives a spawned process its parent's main module.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from worker import cli, dummy, settings
from worker.batch import Batch

BELL = "\a"
DEADLY = "\x06"
LEASE_SECONDS = 1.0


class Fragile(dummy.DummyModel):
    """Tokens of the dummy are bytes."""

    def run(self, batch: Batch) -> NDArray[np.float32]:
        if (batch.input_ids == ord(BELL)).any():
            os.kill(os.getpid(), signal.SIGKILL)
        if (batch.input_ids == ord(DEADLY)).any():
            os.kill(os.getppid(), signal.SIGKILL)  # and the engine dies with its parent
        return super().run(batch)


if __name__ in ("__main__", "__mp_main__"):  # the worker and its engine, not a test that wants the constants
    dummy.DummyModel = Fragile  # type: ignore[misc]

if __name__ == "__main__":
    told = settings.read(model="dummy", redis_url=sys.argv[1], max_batch=int(sys.argv[2]))
    cli.start(replace(told, lease_seconds=LEASE_SECONDS, beat_seconds=0.3, maintenance_seconds=0.3))
