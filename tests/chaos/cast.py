"""Who plays in a storm: programs that are started again whenever they end, and a reader of RQ's registries.

Owns their processes: signals go to these alone. Must not know why something happens to them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import redis
from redis.exceptions import RedisError
from rq import Queue
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry

from e2e.harness import engine_of, environment
from producer.store import Serializer

END_SECONDS = 40.0
READ_SECONDS = 3.0  # between two looks of RQ's own tools


class Player:
    """One program; ``look`` starts it again when it has ended. ``exits`` counts how it ended."""

    def __init__(self, log: Path, program: str, *arguments: str, redis_url: str) -> None:
        self._command = [sys.executable, "-m", f"{program}.cli", *arguments]
        self._environment = {**environment(), "REDIS_URL": redis_url}
        self._log = log.open("ab")
        self._thaw_at = 0.0
        self._frozen: int | None = None  # the process that is: itself or its engine
        self.exits: Counter[int] = Counter()
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self._command, stdout=self._log, stderr=self._log, env=self._environment
        )

    def look(self) -> int | None:
        """Thaw it when it is time. Returns the exit code if it has ended: the caller may start it again."""
        if self._frozen is not None and time.monotonic() >= self._thaw_at:
            self.thaw()
        code = self.process.poll()
        if code is not None:
            self._frozen = None
            self.exits[code] += 1
        return code

    @property
    def engine(self) -> int | None:
        """The process id of a worker's engine."""
        with suppress(OSError):
            return engine_of(self.process)
        return None

    @property
    def is_free(self) -> bool:
        """Whether it runs and nothing of it is frozen."""
        return self._frozen is None and self.process.poll() is None

    def freeze(self, pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        self._frozen, self._thaw_at = pid, time.monotonic() + seconds

    def thaw(self) -> None:
        if self._frozen is not None and self._frozen in (self.process.pid, self.engine):
            os.kill(self._frozen, signal.SIGCONT)
        self._frozen = None

    def end(self) -> int:
        """SIGTERM, and SIGKILL if that does not do. Returns the exit code."""
        self.thaw()
        self.process.terminate()
        try:
            return self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._log.close()


class Reader(threading.Thread):
    """RQ's own tools, again and again: `rq info`, and the cleanup that reading a registry does."""

    def __init__(self, url: str, queues: tuple[str, ...]) -> None:
        super().__init__(name="rq-reader", daemon=True)
        self._url = url
        self._connection = redis.Redis.from_url(url, socket_timeout=2.0)
        self._queues = [Queue(name, connection=self._connection, serializer=Serializer) for name in queues]
        self._stopped = threading.Event()
        self.rounds = 0

    def run(self) -> None:
        while not self._stopped.wait(READ_SECONDS):
            with suppress(RedisError, subprocess.TimeoutExpired):
                self._read()

    def end(self) -> None:
        self._stopped.set()
        self.join(30)

    def _read(self) -> None:
        for queue in self._queues:
            for registry in (StartedJobRegistry, FinishedJobRegistry, FailedJobRegistry):
                registry(queue=queue).cleanup()
        command = [Path(sys.executable).with_name("rq"), "info", "--url", self._url]
        subprocess.run(command, capture_output=True, timeout=10, check=False)
        self.rounds += 1
