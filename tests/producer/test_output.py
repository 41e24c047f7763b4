"""The files results go to: which ones meet, and which are somebody else's."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_worker import write

from producer import cli
from producer.errors import OutputError, UsageError
from producer.output import Output, ResultFile, Style
from producer.wire import Choice, Failure, Result, Usage

LATE = Failure.of("timeout", "late")
GOOD = Result(
    custom_id="r0",
    job_id="b-0-9",
    created=1,
    endpoint="chat",
    model="m",
    choices=(Choice(0, "x", "stop"),),
    usage=Usage(1, 1),
)


def failed(batch: str, line: int = 1) -> Result:
    return Result(custom_id=f"r{line}", job_id=f"{batch}-0-{line}", created=1, failure=LATE)


def collect(out: str, batch: str, errors: str | None = None, lines: tuple[int, ...] = (1,)) -> None:
    """Failed rows of ``batch`` into the output, as one run of the command does it."""
    with ResultFile(Path(out), batch, Style(), Path(errors) if errors else None) as sink:
        for line in lines:
            sink.write([failed(batch, line)], f"{line}-0")


def batches(path: str) -> list[str]:
    return [json.loads(line)["id"] for line in Path(path).read_text().splitlines()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a symbolic link to what will be the output, and a hard one to the input."""
    monkeypatch.chdir(tmp_path)
    write(Path("in.jsonl"), [])
    Path("link").symlink_to("out")
    Path("next").symlink_to("out.cursor.new")
    os.link("in.jsonl", "hard")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (("out", "out"), "out is both -o and --errors-file"),
        (("out", "./out"), "out is both -o and --errors-file"),
        (("out", "link"), "out is both -o and --errors-file"),
        (("out", "out.cursor"), "out.cursor is both the cursor of -o and --errors-file"),
        (("out", "../{here}/out.cursor"), "out.cursor is both the cursor of -o and --errors-file"),
        (("out", "out.cursor.new"), "out.cursor.new is both the next cursor of -o and --errors-file"),
        (("out", "next"), "out.cursor.new is both the next cursor of -o and --errors-file"),
        (("in.jsonl", None), "in.jsonl is both an input and -o"),
        (("./in.jsonl", None), "in.jsonl is both an input and -o"),
        (("hard", None), "in.jsonl is both an input and -o"),
        (("out", "hard"), "in.jsonl is both an input and --errors-file"),
        (("in", None), "in.cursor is both an input and the cursor of -o"),
        (("in.new", None), "in.new.cursor.new is both an input and the next cursor of -o"),
    ],
)
def test_files_that_would_be_written_over_each_other(
    files: tuple[str, str | None],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, errors = files
    for name in ("in.cursor", "in.new.cursor.new"):
        write(Path(name), ['{"prompt": "x"}'])
    before = sorted(path.name for path in Path().iterdir())
    flags = ["--errors-file", errors.format(here=tmp_path.name)] if errors else []
    inputs = ["in*", "--redis", "redis://127.0.0.1:1", "--wait", "-o", out, *flags]
    monkeypatch.setattr(sys, "argv", ["producer", "submit", *inputs])
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert (done.value.code, capsys.readouterr().err) == (2, f"producer: {said}: name another file\n")
    assert sorted(path.name for path in Path().iterdir()) == before


def test_standard_input_may_be_a_file_that_would_be_written_over() -> None:
    write(Path("x.cursor.new"), ['{"prompt": "x"}'])
    command = "submit - --redis redis://127.0.0.1:1 --wait -o x <x.cursor.new"
    run = subprocess.run(
        ["bash", "-c", f"exec {sys.executable} -m producer.cli {command}"],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])},
    )
    assert run.returncode == 2
    assert b"is both an input and the next cursor of -o" in run.stderr


def test_files_of_different_names_do_not_meet() -> None:
    Output(Path("out"), errors=Path("out.errors")).check(["in.jsonl", "-"])


def test_an_errors_file_has_many_names() -> None:
    collect("out", "b", "e")
    collect("./out", "b", "./e", lines=(2,))
    Path("sub").mkdir()
    os.chdir("sub")
    collect("../out", "b", "../e", lines=(3,))
    os.chdir("..")
    assert batches("e") == ["b-0-1", "b-0-2", "b-0-3"]


def test_an_errors_file_of_the_same_name_elsewhere_is_another() -> None:
    collect("out", "b", "e")
    Path("sub").mkdir()
    collect("sub/out", "c", "sub/e", lines=(1, 2))
    os.chdir("sub")
    with pytest.raises(UsageError, match=r"^e is not empty, and ../out.cursor does not say"):
        collect("../out", "b", "e", lines=(2,))
    assert batches("e") == ["c-0-1", "c-0-2"]


def test_an_errors_file_of_another_batch_is_named() -> None:
    """Not OUT, which is new, or empty."""
    collect("one", "b", "e")
    for touch in (False, True):
        if touch:
            Path("two").touch()
        with pytest.raises(
            UsageError, match=r"^e is not empty, and two.cursor does not say that failed rows"
        ):
            collect("two", "c", "e")
    with pytest.raises(UsageError, match=r"^e holds results of batch b: name another file"):
        collect("one", "c", "e")
    assert batches("e") == ["b-0-1"]


def test_an_errors_file_that_another_output_filled_is_not_cut() -> None:
    """The first output had no failed row yet: what stands there is not the rest of its crash."""
    with ResultFile(Path("one"), "b", Style(), Path("e")) as sink:
        sink.write([GOOD], "1-0")
    collect("two", "c", "e")
    with pytest.raises(UsageError, match=r"^e is not empty, and one.cursor does not say"):
        collect("one", "b", "e", lines=(2,))
    assert batches("e") == ["c-0-1"]


def test_what_a_crash_left_in_an_errors_file_is_cut_and_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the very first failed rows."""
    for line in (1, 2):
        with monkeypatch.context() as crash:
            crash.setattr("producer.output._settle", lambda stream: stream.flush() or 1 / 0)
            with pytest.raises(ZeroDivisionError):
                collect("out", "b", "e", lines=(line,))
        collect("out", "b", "e", lines=(line,))
    assert batches("e") == ["b-0-1", "b-0-2"]


@pytest.mark.parametrize("kind", ["text", "empty", "folder", "broken link"])
def test_what_is_no_cursor_is_not_replaced(kind: str) -> None:
    cursor = Path("out.cursor")
    if kind == "folder":
        cursor.mkdir()
    elif kind == "broken link":
        cursor.symlink_to("nowhere")
    else:
        cursor.write_text("mine" * (kind == "text"))
    with pytest.raises(
        UsageError, match=r"^out.cursor is no cursor of ours: name another file, or delete it"
    ):
        collect("out", "b")
    assert not Path("out").exists()
    assert kind != "text" or cursor.read_text() == "mine"


def test_what_to_delete_to_start_over() -> None:
    collect("out", "b", "e")
    os.truncate("e", 1)
    with pytest.raises(UsageError, match=r"^e is shorter .* To start over delete out and out.cursor and e$"):
        collect("out", "b", "e")


# Two producers at the same moment.

Role = Callable[[str], ResultFile]


def as_out(name: str) -> ResultFile:
    """The file they meet in is OUT."""
    return ResultFile(Path("both"), "b", Style())


def as_errors(name: str) -> ResultFile:
    return ResultFile(Path(name), "b", Style(), Path("both"))


def just_before(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, act: Callable[[], object]) -> None:
    """The next call of that function does ``act`` first, once."""
    real = getattr(owner, name)

    def hooked(*arguments: object) -> object:
        if arguments[0] == Path("both") or name == "flock":
            monkeypatch.setattr(owner, name, real)
            act()
        return real(*arguments)

    monkeypatch.setattr(owner, name, hooked)


@pytest.mark.parametrize("role", [as_out, as_errors])
def test_who_comes_second_to_a_new_file_leaves_it_alone(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it saw none when it looked."""
    winner: list[ResultFile] = []
    just_before(monkeypatch, Path, "open", lambda: winner.append(role("one")))
    with pytest.raises(UsageError, match=r"^both is being written by another producer"):
        role("two")
    with winner[0]:
        winner[0].write([failed("b")], "1-0")
    assert batches("both") == ["b-0-1"]
    assert not Path("two").exists()


@pytest.mark.parametrize("role", [as_out, as_errors])
def test_a_file_that_its_maker_removes_meanwhile_is_made_again(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = role("one")
    just_before(monkeypatch, Path, "open", lambda: just_before(monkeypatch, fcntl, "flock", maker.close))
    with role("two") as second:
        second.write([failed("b")], "1-0")
    assert batches("both") == ["b-0-1"]


def test_what_another_writes_meanwhile_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file was empty when it was opened."""
    first = as_out("one")

    def write_and_end() -> None:
        first.write([failed("b")], "1-0")
        first.close()

    just_before(monkeypatch, fcntl, "flock", write_and_end)
    with as_out("two") as second:
        assert second.cursor == "1-0"
        second.write([failed("b", 2)], "2-0")
    assert batches("both") == ["b-0-1", "b-0-2"]


def test_a_link_to_a_file_that_was_made_for_nothing_stays() -> None:
    with ResultFile(Path("link"), "b", Style()):
        assert Path("out").exists()
    assert Path("link").is_symlink()
    assert not Path("out").exists()


@pytest.mark.parametrize("gone", ["out", "errors"])
def test_a_file_that_is_removed_while_it_is_written_takes_no_more(gone: str) -> None:
    """Else what is written would be nowhere, and with --release not in Redis either."""
    with ResultFile(Path("out"), "b", Style(), Path("errors")) as sink:
        sink.write([failed("b", 1)], "1-0")
        before = Path("out.cursor").read_text()
        Path(gone).unlink()
        with pytest.raises(OutputError, match=f"^{gone} was removed or replaced"):
            sink.write([failed("b", 2)], "2-0")
    assert Path("out.cursor").read_text() == before
