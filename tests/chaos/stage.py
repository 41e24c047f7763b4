"""Where a storm plays: a Redis, workers on two queues, producers. Owns what each fault does to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

import redis
from redis.exceptions import RedisError
from rq.command import send_stop_job_command

from chaos.cast import Player, Reader
from chaos.schedule import Fault
from e2e.harness import environment
from producer.embedded import EmbeddedRedis
from producer.errors import LivebatchError
from producer.store import Serializer, Store

MAIN, DOOMED = "storm", "doomed"  # batches; each has a queue of its name
SUBMIT_SECONDS = 120.0
# Of a worker: as asked; Redis away as it starts; killed; told to end before its interpreter had read a line.
EXPECTED = (0, 3, -signal.SIGKILL, -signal.SIGTERM)


class Stage:
    """A context manager; ``files`` are the batches' rows by name. Everything it started ends with it."""

    def __init__(
        self, folder: Path, model: str, files: dict[str, Path], workers: int, device: str = "cpu"
    ) -> None:
        self.folder = folder
        self.server = EmbeddedRedis(folder / "redis")
        self.stopped_rows: set[str] = set()
        self.notes: list[str] = []
        self._model = model
        self._device = device
        self._files = files
        self._num_workers = workers
        self._server_back_at: float | None = None
        self._server_frozen = False
        self._ended = 0
        self._stack = ExitStack()

    def __enter__(self) -> Stage:
        self.folder.mkdir(parents=True)  # a new one: results of an earlier storm would be gone on from
        with self._stack as stack:
            stack.enter_context(self.server)
            stack.callback(self._heal_server)
            self.connection = redis.Redis.from_url(self.server.url, socket_timeout=1.0)
            stack.callback(self.connection.close)
            self.workers = [self._worker(number) for number in range(self._num_workers)]
            for worker in self.workers:
                stack.callback(worker.end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _worker(self, number: int) -> Player:
        flags = ["--queue", f"{MAIN}=9", "--queue", DOOMED, "--max-batch", "8", "--grace", "1"]
        flags += ["--device", self._device]
        flags += ["--threads", "1"] if self._device == "cpu" else ["--deterministic", "--kv-memory", "4G"]
        if number == 0 and self._model == "dummy":  # a frozen engine is found here, and waited for elsewhere
            flags += ["--engine-timeout", "6"]
        log = self.folder / f"worker-{number}.log"
        return Player(log, "worker", "run", "--model", self._model, *flags, redis_url=self.server.url)

    # -- producers

    def submit(self, batch: str, kills: list[float]) -> int:
        """Queue a batch; the producer is killed after so many seconds, again and again, then left alone.

        Returns how often it was killed, and had not ended before.
        """
        killed = 0
        command = [sys.executable, "-m", "producer.cli", "submit", str(self._files[batch])]
        command += ["--batch-id", batch, "--queue", batch]
        env = {**environment(), "REDIS_URL": self.server.url}
        for seconds in kills:
            try:
                subprocess.run(command, env=env, timeout=seconds, capture_output=True, check=False)
            except subprocess.TimeoutExpired:  # and was killed
                killed += 1
        done = subprocess.run(command, env=env, timeout=SUBMIT_SECONDS, capture_output=True, check=False)
        if done.returncode:
            raise LivebatchError(f"submit ends with {done.returncode}: {done.stderr.decode()[-500:]}")
        return killed

    def follow(self) -> None:
        """Collect the main batch from now on, and read with RQ's own tools."""
        self.out = self.folder / f"{MAIN}.out.jsonl"
        arguments = ["results", MAIN, "--follow", "-o", str(self.out)]
        self.producer = Player(
            self.folder / "producer.log", "producer", *arguments, redis_url=self.server.url
        )
        self._stack.callback(self.producer.end)
        self.reader = Reader(self.server.url, (MAIN, DOOMED))
        self.reader.start()
        self._stack.callback(self.reader.end)

    def collect_doomed(self) -> Path:
        """The results of the cancelled batch, once it is over."""
        out = self.folder / f"{DOOMED}.out.jsonl"
        command = [sys.executable, "-m", "producer.cli", "results", DOOMED, "--follow", "-o", str(out)]
        env = {**environment(), "REDIS_URL": self.server.url}
        subprocess.run(command, env=env, timeout=SUBMIT_SECONDS, capture_output=True, check=False)
        return out

    # -- how far it is

    def ended_rows(self) -> int:
        """Of the main batch, as last seen."""
        with suppress(RedisError):
            self._ended = Store(self.connection).status(MAIN).ended
        return self._ended

    def tend(self) -> bool:
        """Bring back whoever ended or was frozen for long enough. Whether the producer has all results."""
        if self._server_back_at is not None and time.monotonic() >= self._server_back_at:
            self._heal_server()
        for number, worker in enumerate(self.workers):
            code = worker.look()
            if code is not None:
                if code not in EXPECTED:
                    self.notes.append(f"worker {number} ended with {code}")
                worker.start()
        code = self.producer.look()
        if code in (0, 1):
            return True
        if code is not None:
            self.producer.start()
        return False

    def calm(self) -> None:
        """Nothing is frozen or away any more."""
        self._heal_server()
        for player in (*self.workers, self.producer):
            player.thaw()

    @property
    def exits(self) -> Counter[int]:
        return sum((worker.exits for worker in self.workers), Counter())

    @property
    def engine_deaths(self) -> int:
        """As the workers noticed them."""
        logs = self.folder.glob("worker-*.log")
        return sum(log.read_text(errors="replace").count("the engine died") for log in logs)

    # -- what goes wrong

    def strike(self, fault: Fault) -> bool:
        """Let it happen. False: its victim is not there just now, so it is still to come."""
        match fault.kind.split(" ", 1):
            case ["engine" | "worker" | "producer" as who, how]:
                return self._strike_player(who, how, fault)
            case ["Redis", how]:
                return self._strike_server(how, fault.seconds)
            case ["row", _]:
                return self._cancel_row(fault.victim)
            case _:
                return self._cancel_batch()

    def _strike_player(self, who: str, how: str, fault: Fault) -> bool:
        first = fault.victim % len(self.workers)
        players = [self.producer] if who == "producer" else self.workers[first:] + self.workers[:first]
        for player in players:
            victim = player.engine if who == "engine" else player.process.pid
            if player.is_free and victim is not None:
                if how == "frozen":
                    player.freeze(victim, fault.seconds)
                else:
                    _signal(victim, how)
                return True
        return False

    def _strike_server(self, how: str, seconds: float) -> bool:
        if self._server_back_at is not None:
            return False
        self._server_back_at = time.monotonic() + seconds
        if how == "frozen":
            os.kill(self.server.pid, signal.SIGSTOP)
            self._server_frozen = True
        else:
            self.server.kill()
        return True

    def _heal_server(self) -> None:
        if self._server_frozen:
            os.kill(self.server.pid, signal.SIGCONT)
        elif self._server_back_at is not None:
            self.server.start()
        self._server_frozen, self._server_back_at = False, None

    def _cancel_row(self, victim: int) -> bool:
        """One that runs, by RQ's own command to its worker; it may end before that is heard."""
        try:
            running = self.connection.zrange(f"rq:wip:{MAIN}", 0, -1)
            if not running:
                return False
            job_id = running[victim % len(running)].decode().split(":")[0]
            send_stop_job_command(self.connection, job_id, serializer=Serializer)
        except (RedisError, ValueError):  # Redis is away; or the row has just ended
            return False
        self.stopped_rows.add(job_id)
        return True

    def _cancel_batch(self) -> bool:
        command = [sys.executable, "-m", "producer.cli", "cancel", DOOMED]
        env = {**environment(), "REDIS_URL": self.server.url}
        if self._server_back_at is not None:
            return False
        done = subprocess.run(command, env=env, timeout=60, capture_output=True, check=False)
        return done.returncode == 0


def _signal(pid: int, how: str) -> None:
    numbers = {
        "killed": [signal.SIGKILL],
        "told to end": [signal.SIGTERM],
        "told twice": [signal.SIGTERM] * 2,
    }
    for number in numbers[how]:
        os.kill(pid, number)
