"""Watch: gauges read twice a second by a thread. Knows not what they measure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

PERIOD_SECONDS = 0.5


class Watch(threading.Thread):
    """From ``start`` to ``stop``."""

    def __init__(self, gauges: Mapping[str, Callable[[], float]]) -> None:
        super().__init__(daemon=True)
        self._gauges = gauges
        self.samples = {name: [read()] for name, read in gauges.items()}
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(PERIOD_SECONDS):
            for name, read in self._gauges.items():
                self.samples[name].append(read())

    def stop(self) -> dict[str, list[float]]:
        self._over.set()
        self.join()
        return self.samples
