"""What the `producer` command says of input that is not what it should be, and of itself."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest
from tiny_worker import rows, write

from producer import cli
from producer.client import Client
from producer.wire import Failure

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`producer ...` in this process: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["producer", *arguments])
        with pytest.raises(SystemExit) as done:
            cli.main()
        return int(done.value.code or 0), *capsys.readouterr()

    return run


def test_the_version(run: Run) -> None:
    assert run("--version") == (0, f"livebatch {version('livebatch')}\n", "")


def test_no_line_of_the_command_list_is_cut(run: Run) -> None:
    code, said, _ = run("--help")
    assert code == 0
    listed = said.partition("Commands:\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) == 6
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []


@pytest.mark.parametrize("number", cli.Exit)
def test_help_names_every_exit_code(run: Run, number: int) -> None:
    assert f"\n    {number:d}  " in run("--help")[1]


def test_problems_are_printed_up_to_twenty(run: Run) -> None:
    write(Path("in.jsonl"), [*rows(1), *(['{"prompt": 3}'] * 25)])
    code, out, said = run("validate", "in.jsonl")
    lines = out.splitlines()
    assert (code, len(lines)) == (1, 21)
    assert lines[-1] == "... and 5 more (--all prints every one)"
    assert said == "26 rows, 25 bad\n"
    code, out, _ = run("validate", "in.jsonl", "--all")
    assert (code, len(out.splitlines())) == (1, 25)


def test_a_text_file_is_recognised(run: Run) -> None:
    write(Path("in.txt"), ["Once upon a time", "There was"])
    hint = "2 rows, 2 bad; is this plain text? --format text takes one prompt a line\n"
    assert run("validate", "in.txt")[2] == hint
    assert run("validate", "in.txt", "--format", "text") == (0, "", "2 rows, 0 bad\n")
    write(Path("in.txt"), ["Once upon a time", '{"prompt": "x"}'])
    assert run("validate", "in.txt")[2] == "2 rows, 1 bad\n"


def test_a_file_without_rows_is_warned_of(run: Run) -> None:
    write(Path("in.jsonl"), rows(1))
    write(Path("empty.jsonl"), ["", " "])
    said = run("validate", "in.jsonl", "empty.jsonl")[2]
    assert said == "warning: empty.jsonl has no rows\n1 rows, 0 bad\n"


@pytest.mark.redis
def test_submitting_a_file_without_rows_is_warned_of_once(run: Run, redis_url: str) -> None:
    write(Path("empty.jsonl"), [])
    code, _, said = run("submit", "empty.jsonl", "--strict", "--redis", redis_url)
    assert code == 0
    assert said.count("warning: empty.jsonl has no rows\n") == 1


@pytest.mark.redis
def test_plain_text_is_not_queued_as_bad_lines(run: Run, client: Client) -> None:
    write(Path("in.txt"), ["Once upon a time", "There was"])
    code, out, said = run("submit", "in.txt", "--redis", client.url)
    assert (code, out) == (1, "")
    assert said.startswith("producer: nothing was queued: 2 of 2 rows are bad, the first: line 1: not JSON")
    assert said.endswith("; is this plain text? --format text takes one prompt a line\n")
    assert client.list() == []
    assert run("submit", "in.txt", "--format", "text", "--redis", client.url)[0] == 0
    assert [status.rows for status in client.list()] == [2]


@pytest.mark.redis
@pytest.mark.parametrize("line", ['{"prompt": "x"}', '{"prmpt": "x"}', "[1]"])
def test_one_line_of_json_is_enough_for_a_result_each(run: Run, client: Client, line: str) -> None:
    """It need not be a good one, and may stand in another file than the rest."""
    write(Path("a.jsonl"), ["Once upon a time", "There was"])
    write(Path("b.jsonl"), [line])
    assert run("submit", "a.jsonl", "b.jsonl", "--redis", client.url)[0] == 1
    assert [status.rows for status in client.list()] == [3]


@pytest.mark.redis
def test_a_strict_submission_prints_up_to_twenty_problems(run: Run, redis_url: str) -> None:
    write(Path("in.txt"), ["Once upon a time"] * 30)
    code, _, said = run("submit", "in.txt", "--strict", "--redis", redis_url)
    assert (code, said.count("(invalid_json)")) == (1, 20)
    assert "nothing was queued: 30 of 30 rows are bad" in said
    assert "is this plain text? --format text" in said


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "warning: standard input has no rows\n0 rows, 0 bad\n"),
        ("{}".encode("utf-16"), "producer: standard input: is UTF-16; save it as UTF-8\n"),
        (gzip.compress(b"{}\n" * 1000)[:-9], "producer: standard input: the gzip data is damaged after line"),
    ],
)
def test_standard_input_is_called_that(data: bytes, said: str) -> None:
    found = subprocess.run(command("validate", "-"), input=data, capture_output=True, check=False, env=ENV)
    assert found.stderr.decode().startswith(said)


def test_standard_input_that_cannot_be_read(tmp_path: Path) -> None:
    with (tmp_path / "only to be written").open("wb") as stream:
        found = subprocess.run(
            command("validate", "-"), stdin=stream, capture_output=True, check=False, env=ENV
        )
    assert (found.returncode, found.stdout) == (2, b"")
    assert found.stderr.startswith(b"producer: standard input: cannot be read (")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize("size", [10, 10**6])
def test_a_copy_that_finds_no_room_is_not_the_fault_of_the_input(
    run: Run, stdin: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Of a little, the disk is asked only when the copy is closed."""
    stdin(bytes(size))
    full = Path("/dev/full").open("r+b")  # noqa: SIM115 - who asks for a copy closes it
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda **_: full)
    said = f"producer: standard input: no room for its copy in {tempfile.gettempdir()}: set TMPDIR\n"
    assert run("validate", "-") == (2, "", said)


ENV = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "producer.cli", *arguments]


def test_a_failure_reads_as_a_sentence() -> None:
    assert str(Failure.of("timeout", "the row took too long")) == "timeout: the row took too long"
