"""What reaches a terminal, whatever stands in the input, in its names and in Redis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_worker import TinyWorker, rows, write

from producer import again, cli
from producer.client import Client
from producer.jsonl import encode_line
from producer.screen import printable, safe_json

HOSTILE = "\x00\x07\x1b[2J\x7f\x85\x9b31m\u2028\u2029\u202e\n\r\t"


def test_what_is_printed_is_words() -> None:
    assert printable("größe 漢 🦙 \\") == "größe 漢 🦙 \\"
    shown = printable(HOSTILE + "\udcff")
    assert shown.isprintable()
    assert shown.startswith(r"\x00\x07\x1b[2J\x7f\x85\x9b31m\u2028")
    assert shown.endswith(r"\n\r\t\udcff")


def test_json_stays_what_it_says() -> None:
    value = {HOSTILE: ["größe 漢", HOSTILE]}
    text = safe_json(json.dumps(value, ensure_ascii=False))
    assert json.loads(text) == value
    assert "größe 漢" in text
    assert len(text.splitlines()) == 1
    assert encode_line(value).decode().removesuffix("\n").replace("\u202e", "").isprintable()


LINES = [
    {"prompt": "x", HOSTILE: 1},
    {"prompt": "x", "temperature": HOSTILE},
    {"prompt": "x", "stop": [HOSTILE, 5]},
    {"prompt": "x", "response_format": {"type": HOSTILE}},
    {"prompt": "x", "logit_bias": {HOSTILE: 1}},
    {"prompt": "x", "sampling_params": {HOSTILE: 1}},
    {"messages": [{"role": "user", "content": "x", HOSTILE: 1}]},
    {"messages": [{"role": HOSTILE, "content": "x"}]},
    {"method": HOSTILE, "url": "x", "body": {}},
    {"method": "POST", "url": HOSTILE, "body": {}},
    {"method": "POST", "url": "/v1/completions", HOSTILE: 1},
    {"custom_id": HOSTILE, "prompt": "x"},
    {"custom_id": HOSTILE, "prompt": "x"},
    f'{{"prompt": "\x9b{HOSTILE}"}}'.replace("\n", "").replace("\r", ""),
]
BAD = len(LINES) - 1
NAME = "n\x1b[2J\x9b\n\udcff.jsonl"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two, so that they are named in messages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(cli.__file__).parents[1]))
    return [write(Path(NAME), LINES), write(Path("m.jsonl"), rows(1))]


def shown(*arguments: str, **environment: str) -> tuple[list[str], list[str]]:
    """Lines of standard output and of standard error; each can be printed."""
    command = [sys.executable, "-m", "producer.cli", *arguments]
    run = subprocess.run(command, capture_output=True, check=False, env={**os.environ, **environment})
    lines = [stream.decode().removesuffix("\n").split("\n") for stream in (run.stdout, run.stderr)]
    assert [line for stream in lines for line in stream if not line.isprintable()] == []
    return lines[0], lines[1]


def test_validate_prints_no_controls(files: list[str]) -> None:
    out, said = shown("validate", *files)
    assert len(out) == BAD
    assert all(
        line.startswith(r"n\x1b[2J\x9b\n\ufffd.jsonl, line ".replace(r"\ufffd", "\ufffd")) for line in out
    )
    assert said == [f"{len(LINES) + 1} rows, {BAD} bad"]


def test_validate_prints_no_controls_as_json(files: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "producer.cli", "validate", "--json", *files], capture_output=True, check=False
    )
    text = run.stdout.decode().removesuffix("\n").replace("\u202e", "")
    assert text.isprintable()
    assert len(json.loads(text)["problems"]) == BAD


@pytest.mark.parametrize(
    "arguments",
    [
        ["validate", f"{NAME}.gone"],
        ["validate", f"*{NAME}.gone"],
        ["validate", "folder\x1b[2J"],
        ["submit", "m.jsonl", "--wait", "-o", "none\x1b[2J/out"],
        ["submit", "m.jsonl", "--batch-id", "\x1b[2J"],
        ["submit", "m.jsonl", "--queue", "\x9b"],
        ["submit", "m.jsonl", "--max-queued-bytes", "\x9b"],
        ["status", "\x1b[2J", "--redis", "redis://\x1b[2J:1"],
        ["status", "--redis", "\x9b"],
    ],
)
def test_complaints_hold_no_controls(files: list[str], arguments: list[str]) -> None:
    Path("folder\x1b[2J").mkdir()
    out, said = shown(*arguments, REDIS_URL="redis://127.0.0.1:1")
    assert out == [""]
    assert len(said) == 1
    assert said[0].startswith("producer: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", "--no{}"],
        ["submit", "-{}"],
        ["submit", "--format", "{}"],
        ["submit", "--expires-in", "{}"],
        ["status", "one", "{}"],
        ["{}"],
    ],
)
def test_usage_errors_hold_no_controls(arguments: list[str]) -> None:
    """They are Typer's, and repeat what was typed; a pattern of the shell's types names of files."""
    _, said = shown(*(word.format("\x07\x1b[2J\x7f\x9b31m\n\r\t") for word in arguments))
    assert len(said) == 4, "usage, where help is, an empty line, and one that says it"
    assert said[3].startswith("Error: ")


@pytest.mark.redis
def test_submit_prints_no_controls(files: list[str], client: Client, worker: TinyWorker) -> None:
    empty = write(Path("empty\x9b.jsonl"), [])
    flags = ["--batch-id", "m", "--redis", client.url]
    _, said = shown("submit", *files, "--strict", *flags)
    assert len(said) == BAD + 1
    _, said = shown("submit", *files, empty, *flags)
    assert r"warning: empty\x9b.jsonl has no rows" in said
    worker.run()
    out = "out\x1b\n.jsonl"
    _, said = shown("results", "m", "-o", out, "--redis", client.url)
    assert said[-2].endswith(r" failed -> out\x1b\n.jsonl")
    lines = Path(out).read_bytes().split(b"\n")
    assert len(lines) == BAD + 2 + 1
    assert all(line.decode().replace("\u202e", "").isprintable() for line in lines)


@pytest.mark.parametrize(
    "word", ["plain", "two words", "it's", HOSTILE.replace("\0", ""), "it's \\x1b \x1b1", "n\udcff.jsonl"]
)
def test_what_can_be_copied_into_a_shell_names_the_same_file(word: str) -> None:
    line = again.rest([word], False, None, None).removeprefix("queue the rest with: ")
    assert line.isprintable()
    command = f"printf %s {line.removeprefix('producer submit ')}"
    run = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert run.stdout == os.fsencode(word)
