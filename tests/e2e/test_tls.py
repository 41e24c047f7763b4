"""rediss:// for real: TLS ends in a proxy before a server that wants a password, and no word shows it.

The proxy makes this run everywhere: few server builds speak TLS.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from e2e.harness import by_id, environment, producer, text, write
from producer.connection import connect, redact
from producer.embedded import EmbeddedRedis
from producer.errors import StoreError

pytestmark = [pytest.mark.redis, pytest.mark.timeout(120)]

PEM = Path(__file__).resolve().parents[1] / "data" / "tls.pem"
SECRET = "hunter2"


class TlsProxy:
    """Takes TLS connections and passes on what is inside, a thread a connection."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(PEM)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                plain, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(plain,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with (
            suppress(OSError),
            plain,
            self._context.wrap_socket(plain, server_side=True) as outside,
            socket.create_connection(("127.0.0.1", self._target)) as inside,
        ):
            relay(outside, inside)


def relay(outside: ssl.SSLSocket, inside: socket.socket) -> None:
    """Until either side ends. One thread: an SSL socket is not to be read and written at once."""
    other = {outside: inside, inside: outside}
    while True:
        ready = [outside] if outside.pending() else select.select([outside, inside], [], [])[0]
        for source in ready:
            data = source.recv(1 << 16)
            if not data:
                return
            other[source].sendall(data)


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        with connect(server.url) as connection:
            connection.config_set("requirepass", SECRET)
        yield server


@pytest.fixture(scope="module")
def address(server: EmbeddedRedis) -> Iterator[str]:
    proxy = TlsProxy(server.port)
    with closing(proxy):
        yield f"127.0.0.1:{proxy.port}"


@pytest.fixture
def url(address: str) -> str:
    return f"rediss://default:{SECRET}@{address}/0?ssl_ca_certs={PEM}"


def run_worker(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "worker.cli",
        "run",
        "--model",
        "dummy",
        "--burst",
        "--redis",
        url,
        *flags,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), check=False)


def test_rows_go_the_whole_way_over_tls(url: str, tmp_path: Path) -> None:
    given = write(tmp_path / "in.jsonl", [{"custom_id": f"r{n}", "prompt": f"prompt {n}"} for n in range(8)])
    queued = producer(url, "submit", given, "--batch-id", "b")
    assert queued.returncode == 0
    worked = run_worker(url, "--log-format", "json")
    assert worked.returncode == 0, worked.stderr
    events = [json.loads(line).get("event") for line in worked.stderr.splitlines()]
    assert {"engine_ready", "batch_seen", "batch_left"} <= set(events)
    read = producer(url, "results", "b", "-o", tmp_path / "out.jsonl")
    assert read.returncode == 0
    answers = by_id(tmp_path / "out.jsonl")
    assert {name: text(line) for name, line in answers.items()} == {f"r{n}": f"prompt {n}" for n in range(8)}
    for run in (queued, worked, read):
        assert SECRET not in run.stdout + run.stderr


ADVICE = {
    "rediss://default:{secret}@{tls}": "ssl_ca_certs=FILE",
    "redis://default:{secret}@{tls}": "cannot reach Redis",
    "rediss://default:{secret}@{tls}?ssl_ca_certs=/nowhere": "cannot reach Redis",
    "rediss://default:{secret}@{tls}?ssl_cert_reqs=nonsense": "Redis at rediss://default:***@",
    "rediss://default:wrong{secret}@{tls}?ssl_ca_certs={pem}": "refused the login",
    "rediss://default:{secret}@127.0.0.1:1": "cannot reach Redis at rediss://default:***@127.0.0.1:1",
}


@pytest.mark.parametrize("pattern", ADVICE)
def test_a_producer_that_cannot_get_in_says_why(address: str, pattern: str) -> None:
    url = pattern.format(secret=SECRET, tls=address, pem=PEM)
    with pytest.raises(StoreError) as caught:
        connect(url)
    assert ADVICE[pattern] in str(caught.value)
    assert SECRET not in str(caught.value)
    assert SECRET not in redact(url)


@pytest.mark.parametrize("pattern", list(ADVICE)[::4])
def test_a_worker_that_cannot_get_in_says_why(address: str, pattern: str) -> None:
    run = run_worker(pattern.format(secret=SECRET, tls=address, pem=PEM))
    assert run.returncode == 3
    assert ADVICE[pattern] in run.stderr
    assert SECRET not in run.stdout + run.stderr
    assert "Traceback" not in run.stderr
