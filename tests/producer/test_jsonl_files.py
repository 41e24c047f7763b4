"""Files to lines: splitting, marks, gzip, stdin, caps, progress, and errors that say what to do."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from producer import wire
from producer.errors import UsageError
from producer.jsonl import BadRow, file_names, read_rows
from producer.lines import Line, check_readable, read_lines
from producer.sources import readable_twice

ROW = b'{"prompt":"x"}'


def lines(path: Path, **options: int) -> list[tuple[int, bytes]]:
    return [(line.number, line.data) for line in read_lines(str(path), **options)]  # type: ignore[arg-type]


def open_files() -> set[Path]:
    return {link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def test_lines_split_at_newline_alone(file: Path) -> None:
    breakers = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\rh".encode()
    file.write_bytes(breakers + b"\n" + b"last")
    assert lines(file) == [(1, breakers + b"\n"), (2, b"last")]


def test_an_empty_file_has_no_lines(file: Path) -> None:
    file.write_bytes(b"")
    assert lines(file) == []
    assert list(read_rows(str(file), batch_id="b")) == []


def test_blank_lines_count_but_are_skipped(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf\n \t\r\n" + ROW + b"\n\n")
    assert [row.custom_id for row in read_rows(str(file), batch_id="b")] == ["line-3"]


def test_a_byte_order_mark_is_dropped_once(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n")
    assert lines(file) == [(1, b"a\n"), (2, b"\xef\xbb\xbfb\n")]


def test_utf16_is_refused_with_the_reason(file: Path) -> None:
    for encoding in ("utf-16-le", "utf-16-be"):
        file.write_bytes(("\ufeff" + ROW.decode()).encode(encoding))
        with pytest.raises(UsageError, match="is UTF-16; save it as UTF-8"):
            lines(file)


def test_gzip_is_known_by_its_magic(tmp_path: Path) -> None:
    for name in ("rows.jsonl.gz", "rows.jsonl"):
        (tmp_path / name).write_bytes(gzip.compress(b"\xef\xbb\xbfa\nb"))
        assert lines(tmp_path / name) == [(1, b"a\n"), (2, b"b")]
    (tmp_path / "plain.gz").write_bytes(b"a\n")
    assert lines(tmp_path / "plain.gz") == [(1, b"a\n")]


def test_joined_gzip_members_are_one_file(file: Path) -> None:
    file.write_bytes(gzip.compress(b"a\n") + gzip.compress(b"b\n"))
    assert lines(file) == [(1, b"a\n"), (2, b"b\n")]


def test_damaged_gzip_is_an_error(file: Path) -> None:
    packed = gzip.compress(os.urandom(50_000) + b"\n", 1)
    flipped = bytearray(packed)
    flipped[-6] ^= 1
    for damaged in (packed[:-9], bytes(flipped), packed[:20] + b"\xff" * 50):
        file.write_bytes(damaged)
        with pytest.raises(UsageError, match="gzip data is damaged"):
            lines(file)


@pytest.mark.parametrize("content", [b"a\nb", gzip.compress(b"a\nb")])
def test_stdin(content: bytes, stdin: Callable[[bytes], None]) -> None:
    stdin(content)
    with readable_twice(["-"]) as (source,):
        assert list(read_lines(source.path)) == [Line(1, b"a\n"), Line(2, b"b")]
    assert not sys.stdin.buffer.closed


def test_a_real_pipe() -> None:
    command = [sys.executable, "-W", "error", "-m", "producer.cli", "validate", "-", "--json"]
    run = subprocess.run(command, input=ROW + b"\r\n" + ROW, capture_output=True, check=True)
    assert run.stdout.strip() == b'{"rows": 2, "bad": 0, "problems": []}'
    assert run.stderr == b""


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for check in (check_readable, lambda path: list(read_lines(path))):
        with pytest.raises(UsageError, match=r"nope.jsonl: no such file"):
            check(str(tmp_path / "nope.jsonl"))
        with pytest.raises(UsageError, match="is a folder; name the files in it"):
            check(str(tmp_path))
    locked = tmp_path / "locked.jsonl"
    locked.touch()
    check_readable(str(locked))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read everything
    with pytest.raises(UsageError, match="may not be read"):
        check_readable(str(locked))


def test_a_file_that_fails_while_it_is_read() -> None:
    with pytest.raises(
        UsageError, match=r"/proc/self/mem: cannot be read after line 0 \(Input/output error\)"
    ):
        list(read_lines("/proc/self/mem"))  # opens, but its first page is nobody's


@pytest.mark.parametrize("length", [9, 10, 11, 12, 5000, 3_000_000])
def test_a_line_over_the_cap_is_one_bad_row(file: Path, length: int) -> None:
    file.write_bytes(b"x" * length + b"\n" + b"y\n")
    read = list(read_lines(str(file), max_line_bytes=10))
    assert [line.number for line in read] == [1, 2]
    assert read[0].whole == (length <= 10)
    assert read[0].over == (0 if length <= 10 else length + 1)
    assert len(read[0].data) <= 4096
    assert read[1] == Line(2, b"y\n")


def test_a_last_line_over_the_cap(file: Path) -> None:
    file.write_bytes(b"x" * 11)
    assert [line.whole for line in read_lines(str(file), max_line_bytes=10)] == [False]
    file.write_bytes(b"x" * 10)
    assert [line.whole for line in read_lines(str(file), max_line_bytes=10)] == [True]


@pytest.mark.parametrize(
    ("before", "field"),
    [
        ('"prompt":"', "prompt"),
        ('"prompt": "a \\"quoted\\": ', "prompt"),
        ('"messages":[{"role":"user","content":"', "content"),
        ('"prompt_token_ids":[1,2],"x":[', None),
    ],
)
def test_the_row_of_a_line_over_the_cap(file: Path, before: str, field: str | None) -> None:
    """Its size, its line and its field are named; its neighbours do not notice."""
    line = f'{{"custom_id":"big",{before}'.encode() + b"x" * 10_000 + b'"}\n'
    file.write_bytes(line + ROW)
    big, small = read_rows(str(file), batch_id="b", max_line_bytes=1000)
    assert isinstance(big, BadRow)
    assert (big.custom_id, big.failure.code, big.failure.param) == ("big", "line_too_long", field)
    said = f"line 1: {len(line):,} bytes, and a row may have 1,000"
    assert big.failure.message == said + (f': "{field}" is too long' if field else "")
    assert isinstance(small, wire.Request)


@pytest.mark.parametrize("packed", [False, True])
def test_progress_counts_the_bytes_of_the_file(file: Path, packed: bool) -> None:
    content = (b"x" * 999 + b"\n") * 2000
    file.write_bytes(gzip.compress(os.urandom(1_000_000) + b"\n" + content) if packed else content)
    size = file.stat().st_size
    seen: list[tuple[int, int]] = []
    for _ in read_lines(str(file), on_read=lambda done, total: seen.append((done, total))):
        pass
    assert 4 <= len(seen) <= 20
    assert seen == sorted(seen)
    assert seen[-1] == (size, size)
    assert {total for _, total in seen} == {size}


def test_a_reader_that_stops_early_closes_the_file(file: Path) -> None:
    file.write_bytes((ROW + b"\n") * 10)
    reader = read_rows(str(file), batch_id="b")
    next(reader)
    assert file in open_files()
    reader.close()  # type: ignore[attr-defined]
    assert file not in open_files()


def test_memory_does_not_grow_with_the_file(file: Path) -> None:
    with gzip.open(file, "wb", 1) as packed:
        for _ in range(16):
            packed.write((b"x" * 1023 + b"\n") * 4096)  # 64 MiB in all
    tracemalloc.start()
    try:
        count = sum(1 for _ in read_lines(str(file)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 16 * 4096
    assert peak < 8 * 2**20


def test_many_files_name_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "b\udcff.jsonl"  # a file name need not be Unicode
    path.write_bytes(ROW + b"\n{\n")
    (name,) = file_names([str(path)])
    rows = list(read_rows(str(path), batch_id="b", file_index=2, name=name))
    assert rows[0].custom_id == f"{tmp_path}/b\ufffd.jsonl:line-1"
    assert rows[1].custom_id == f"{tmp_path}/b\ufffd.jsonl:line-2"
    assert (rows[1].file, rows[1].line) == (2, 2)
    assert isinstance(rows[1], BadRow)
    assert rows[1].failure.message.startswith(f"{tmp_path}/b\ufffd.jsonl, line 2: not JSON")
    assert rows[1].result(5).job_id == "b-2-2"


@pytest.mark.parametrize(
    "paths",
    [
        ["n\udcff.jsonl", "n\udcfe.jsonl"],
        [f"{'d' * 398}/{name}.jsonl" for name in "abc"],
        ["n\udcff (file 2)", "n\udcff", "n\udcfe", "n\ufffd"],
        ["a", "b"],
    ],
)
def test_different_files_have_different_names(paths: list[str]) -> None:
    """The ids of their rows would meet, and the rows be refused."""
    names = file_names(paths)
    assert len(set(names)) == len(paths)
    assert max(map(len, names)) <= 512 - len(":line-9999999999")
    assert "".join(names).encode()


def test_files_have_their_names_where_these_differ() -> None:
    assert file_names(["a.jsonl", "d/a.jsonl", "a.jsonl"]) == ["a.jsonl", "d/a.jsonl", "a.jsonl"]
    assert file_names(["n\udcff", "a", "n\udcfe", "a"]) == [
        "n\ufffd (file 1)",
        "a (file 2)",
        "n\ufffd (file 3)",
        "a (file 2)",
    ]


def test_text_files(file: Path) -> None:
    file.write_bytes("one\r\n\n  two \n三".encode())
    rows = list(read_rows(str(file), batch_id="b", format="text"))
    assert [(row.custom_id, row.prompt) for row in rows if isinstance(row, wire.Request)] == [
        ("line-1", "one"),
        ("line-3", "  two "),
        ("line-4", "三"),
    ]
