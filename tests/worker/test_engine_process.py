"""The engine's real process: rows in, outputs out, and how it ends."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from kernels.rows import RowParams, Status
from producer.errors import LivebatchError, RowError, StoreError, UsageError
from waiting import wait_until
from worker import engine_process
from worker.engine import Load
from worker.engine_process import BUSY_SEND_SECONDS, SEND_SECONDS, EngineProcess, patience
from worker.events import Died, Event, Outputs, Ready
from worker.sequence import Output, Row
from worker.settings import EngineSettings

EOS = 257
DUMMY = EngineSettings(model="dummy", max_batch=8, threads=1)


class Process:
    """An engine and what it says."""

    def __init__(self, settings: EngineSettings = DUMMY) -> None:
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.engine = EngineProcess(settings, self.events.put)
        self.engine.start()

    def event(self) -> Event:
        return self.events.get(timeout=60)

    def ended(self, count: int) -> dict[int, Output]:
        """The next ``count`` rows that end."""
        found: dict[int, Output] = {}
        while len(found) < count:
            event = self.event()
            assert isinstance(event, Outputs), event
            found |= {output.id: output for output in event.outputs if output.status != Status.RUNNING}
        return found


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """One engine for the tests that leave it alive."""
    made = Process()
    assert isinstance(made.event(), Ready)
    yield made
    made.engine.stop()


def row(number: int, text: str = "hello", max_tokens: int = 100) -> Row:
    return Row(number, list(text.encode()), RowParams(max_tokens=max_tokens, temperature=0.0, eos_ids=(EOS,)))


def test_rows_go_in_and_answers_come_out(process: Process) -> None:
    process.engine.send([row(1, "one"), row(2, "two", max_tokens=2)], [])
    ended = process.ended(2)
    assert bytes(ended[1].tokens[1:-1]) == b"one"  # the dummy says a mark, the prompt, and EOS
    assert ended[1].status == Status.EOS
    assert (len(ended[2].tokens), ended[2].status) == (2, Status.LENGTH)


def test_it_tells_of_its_steps_and_its_cache(process: Process) -> None:
    process.engine.send([row(4, "four")], [])
    told = process.event()
    assert isinstance(told, Outputs)
    assert told.load.steps > 0
    assert 0 < told.step_seconds < 60
    assert 0 < told.load.free_blocks <= told.load.blocks


@pytest.mark.parametrize(
    ("live", "waiting", "status", "seconds"),
    [
        (0, 0, Status.EOS, 0.0),  # nothing left to do: at once
        (4, 0, Status.EOS, SEND_SECONDS),  # seats may be free until the parent hears of it
        (4, 1, Status.EOS, SEND_SECONDS),
        (4, 2, Status.EOS, BUSY_SEND_SECONDS),
        (4, 2, Status.RUNNING, SEND_SECONDS),  # a stop string may be complete
    ],
)
def test_ends_wait_for_company_only_while_rows_wait_for_seats(
    live: int, waiting: int, status: Status, seconds: float
) -> None:
    engine: Any = SimpleNamespace(has_work=live > 0, load=Load(live, waiting, 0, 0, 0, 0, 0))
    assert patience(engine, [Output(1, [5], status), Output(2, [5], Status.EOS)]) == seconds


def test_a_running_row_is_cancelled(process: Process) -> None:
    process.engine.send([row(3, "x" * 4000, max_tokens=4000)], [])
    process.engine.send([], [3])
    assert process.ended(1)[3].status == Status.CANCELLED


def test_sending_never_waits_for_the_engine(process: Process) -> None:
    """Far more than a pipe holds, to an engine that does not read: it is stopped."""
    assert process.engine.pid is not None
    os.kill(process.engine.pid, signal.SIGSTOP)
    try:
        for number in range(100, 300):
            process.engine.send([row(number, "y" * 8000, max_tokens=1)], [])
    finally:
        os.kill(process.engine.pid, signal.SIGCONT)
    assert len(process.ended(200)) == 200


def test_whether_it_does_anything_can_be_seen(process: Process) -> None:
    assert process.engine.pid is not None
    os.kill(process.engine.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: state(process.engine.pid) == "T")
        seen = process.engine.progress()
        process.engine.send([row(8, "x" * 1000, max_tokens=1000)], [])
        time.sleep(0.1)
        assert seen == process.engine.progress() is not None
    finally:
        os.kill(process.engine.pid, signal.SIGCONT)
    assert len(process.ended(1)) == 1
    assert seen != process.engine.progress()


def test_signals_for_the_group_are_the_parents_business(process: Process) -> None:
    assert process.engine.pid is not None
    os.kill(process.engine.pid, signal.SIGTERM)
    os.kill(process.engine.pid, signal.SIGINT)
    process.engine.send([row(9)], [])
    assert process.ended(1)[9].status == Status.EOS


def test_a_killed_engine_says_so_and_starts_again() -> None:
    process = Process()
    assert isinstance(process.event(), Ready)
    assert process.engine.pid is not None
    os.kill(process.engine.pid, signal.SIGKILL)
    assert process.event() == Died("killed by SIGKILL")
    process.engine.start()
    assert isinstance(process.event(), Ready)
    process.engine.send([row(1)], [])
    assert process.ended(1)[1].status == Status.EOS
    process.engine.stop()
    process.engine.stop()  # twice is harmless
    assert process.events.empty(), "a wanted end is no event"


def test_one_that_nothing_ends_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a system call that does not return: here it is stopped, and SIGKILL does nothing."""
    monkeypatch.setattr(engine_process, "STOP_SECONDS", 0.1)
    monkeypatch.setattr(SpawnProcess, "kill", lambda self: None)
    process = Process()
    assert isinstance(process.event(), Ready)
    pid = process.engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    begun = time.monotonic()
    process.engine.stop()
    assert time.monotonic() - begun < 5
    assert is_alive(pid)
    assert pid not in [child.pid for child in multiprocessing.active_children()]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_an_engine_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    process = Process(EngineSettings(model=str(tmp_path / "none")))
    event = process.event()
    assert isinstance(event, Died)
    assert isinstance(event.error, UsageError) and "none" in str(event.error)
    process.engine.stop()


def test_the_engine_dies_with_its_parent(tmp_path: Path) -> None:
    """Also when the parent is killed, and even when the engine is in the middle of something."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
            import os, signal, sys, time
            from queue import SimpleQueue
            from worker.engine_process import EngineProcess
            from worker.settings import EngineSettings

            if __name__ == "__main__":
                events = SimpleQueue()
                engine = EngineProcess(EngineSettings(model="dummy", max_batch=1, threads=1), events.put)
                engine.start()
                events.get()
                os.kill(engine.pid, signal.SIGSTOP)
                print(engine.pid, flush=True)
                time.sleep(60)
        """)
    )
    root = Path(__file__).resolve().parents[2]
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_alive(child))


def state(pid: int | None) -> str:
    """As ps shows it; "" for no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""


def is_alive(pid: int) -> bool:
    """A zombie that nobody has reaped yet is dead."""
    return state(pid) not in ("", "Z")


@pytest.mark.parametrize(
    "error", [RowError("invalid_value", "no", "top_p"), UsageError("no model"), StoreError("away")]
)
def test_errors_of_ours_travel(error: LivebatchError) -> None:
    """Through the pipe: one that cannot be read at its other end would end the thread that reads."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
