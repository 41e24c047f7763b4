"""The engine in a process of its own: rows in, outputs out, over a private pipe.

Owns the process's life: built, restarted, and dead at once when its parent is. Must not know Redis or text.
The parent never waits for the engine nor the engine for the parent: a thread each fills and drains the pipe.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.process import _children as active  # type: ignore[attr-defined]
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from kernels.rows import Status
from producer.errors import LivebatchError
from worker import logs
from worker.compose import build_engine
from worker.events import Died, Outputs, Post, Ready
from worker.sequence import Output, Row
from worker.settings import EngineSettings

if TYPE_CHECKING:
    from worker.engine import Engine

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
PROGRESS = (10, 12, 14, 15)  # of proc(5): minor and major page faults, time as user and in the kernel
STOP_SECONDS = 3.0
# Outputs of so long travel together: each message costs the parent a turn of its loop, with cold caches.
SEND_SECONDS = 0.01
BUSY_SEND_SECONDS = 0.05  # while rows enough wait for a seat: two fifths less CPU a row there
LOAD_SECONDS = 1.0  # a step that ends no row is reported at least this often
Orders = tuple[Sequence[Row], Sequence[int]]  # rows to add, ids to cancel


class EngineProcess:
    """The parent's handle. Events (Ready, Outputs, Died) go to ``post``, from a thread, in order.

    Start it from a thread that lives as long as the engine shall: Linux ends the child with that thread.
    """

    def __init__(self, settings: EngineSettings, post: Post) -> None:
        self._settings = settings
        self._post = post
        self._outbox: SimpleQueue[Orders | None] = SimpleQueue()
        self._process: SpawnProcess | None = None
        self._hang_up: Callable[[], None] = lambda: None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Spawn the engine. Ready or Died follows."""
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(
            target=main, args=(self._settings, theirs, os.getpid()), name="livebatch-engine", daemon=True
        )
        process.start()
        theirs.close()
        outbox: SimpleQueue[Orders | None] = SimpleQueue()
        reader = threading.Thread(
            target=self._drain, args=(pipe, process, outbox), name="engine-reader", daemon=True
        )
        writer = threading.Thread(target=_fill, args=(pipe, outbox), name="engine-writer", daemon=True)
        self._process, self._outbox, self._hang_up = process, outbox, partial(_hang_up, pipe, reader)
        reader.start()
        writer.start()

    def send(self, rows: Sequence[Row], cancels: Sequence[int]) -> None:
        """Add rows to the engine's queue and end others. Returns at once."""
        if rows or cancels:
            self._outbox.put((rows, cancels))

    def progress(self) -> tuple[str, ...] | None:
        """Changes while the process does anything, computing or reading. None, where nobody knows: none."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return tuple(fields[number - 3] for number in PROGRESS)

    def kill(self) -> None:
        """SIGKILL, for an engine that hangs. Died follows."""
        if self._process is not None:
            self._process.kill()

    def stop(self) -> None:
        """End the engine; no event follows. It leaves when it sees the pipe closed, or is killed."""
        if (process := self._process) is not None:
            self._process = None
            self._hang_up()
            if process.is_alive():
                log.error("the engine's process %s does not end: it is left behind", process.pid)
                active.discard(process)  # or Python would wait for it at its own end

    def _drain(self, pipe: Connection, process: SpawnProcess, outbox: SimpleQueue[Orders | None]) -> None:
        error: LivebatchError | None = None
        try:
            while True:
                message = pipe.recv()
                if isinstance(message, LivebatchError):
                    error = message
                else:
                    self._post(message)
        except (EOFError, OSError):
            pass
        outbox.put(None)
        process.join(STOP_SECONDS)  # here and nowhere else: a process can be waited for once
        while process.exitcode is None:
            process.kill()
            process.join(STOP_SECONDS)
            if self._process is not process:
                return  # nobody is told, so nobody need wait for what SIGKILL does not end
        if self._process is process:
            self._post(Died(_describe(process.exitcode), error))


def _fill(pipe: Connection, outbox: SimpleQueue[Orders | None]) -> None:
    try:
        while (orders := outbox.get()) is not None:
            pipe.send(orders)
    except OSError:
        pass  # the engine is dead: the other thread says so


def _hang_up(pipe: Connection, reader: threading.Thread) -> None:
    """Shut a pipe down under its reader, which then sees the engine off."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
    reader.join(3 * STOP_SECONDS)


def _describe(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"killed by {signal.Signals(-exit_code).name}"
    return f"exit code {exit_code}"


def main(settings: EngineSettings, pipe: Connection, parent: int) -> None:
    """The engine's process: build, say ready or why not, then run until the parent hangs up."""
    _die_with(parent)
    logs.set_up(settings.log_format)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # these reach the whole group; the parent decides
    begun = time.monotonic()
    try:
        engine = build_engine(settings)
        pipe.send(Ready(time.monotonic() - begun))
        serve(engine, pipe)
    except LivebatchError as error:
        pipe.send(error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent is gone, and with it whoever wanted the rows


def serve(engine: Engine, pipe: Connection) -> None:
    """Orders in, step, outputs out. Blocks only when there is nothing to do. Raises EOFError at the end."""
    outputs: list[Output] = []
    sent = step_seconds = 0.0
    while True:
        while pipe.poll(None if not engine.has_work else 0):
            rows, cancels = pipe.recv()
            for row in rows:
                engine.add(row)
            for row_id in cancels:
                engine.cancel(row_id)
        begun = time.monotonic()
        outputs += engine.step()
        now = time.monotonic()
        step_seconds += now - begun
        waited = now - sent
        if (outputs and waited >= patience(engine, outputs)) or waited >= LOAD_SECONDS:
            pipe.send(Outputs(outputs, engine.load, step_seconds))
            outputs, sent = [], time.monotonic()


def patience(engine: Engine, outputs: Sequence[Output]) -> float:
    """Seconds that outputs may wait for company: long only where neither a seat nor a stop string does."""
    if not engine.has_work:
        return 0.0
    load = engine.load
    is_fed = 2 * load.waiting >= load.live
    is_streaming = any(output.status == Status.RUNNING for output in outputs)
    return BUSY_SEND_SECONDS if is_fed and not is_streaming else SEND_SECONDS


def _die_with(parent: int) -> None:
    """Have Linux kill this process when its parent dies, however that comes."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
