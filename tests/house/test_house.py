"""The house keeps its shape: rooms, import arrows, sizes, docstrings, and a README whose commands exist."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import sizes

ROOT = sizes.ROOT


def test_no_function_is_longer_than_sixty_lines() -> None:
    assert [size for size in sizes.functions() if size.lines > 60] == []


def test_functions_are_short() -> None:
    lengths = sorted(size.lines for size in sizes.functions())
    assert lengths[len(lengths) // 2] <= 10
    assert lengths[int(0.9 * len(lengths))] <= 30


def test_files_fit_in_a_head() -> None:
    assert [size for size in sizes.files() if size.lines > 500] == []


def test_every_module_says_what_it_owns() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in sizes.sources()
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert silent == []


def test_the_architecture_names_every_module() -> None:
    named = set(re.findall(r"\b\w+\.py\b", (ROOT / "docs" / "architecture.md").read_text()))
    modules = {path.name for path in sizes.sources() if path.parent.name != "build"} - {"__init__.py"}
    assert modules - named == set()


def test_import_arrows_point_one_way() -> None:
    """From the worker alone; what it may have of the producer is docs/architecture.md's list, no more.

    import-linter holds the contracts of pyproject.toml, which see through several imports, too.
    """
    named = re.search(r"`worker -> producer\.\{(.*?)\}`", (ROOT / "docs" / "architecture.md").read_text())
    assert named is not None
    allowed = {f"producer.{name}" for name in named[1].split(",")}
    foreign = {
        (str(path.relative_to(ROOT)), name)
        for path in sizes.sources()
        for name in imported(path)
        if name.partition(".")[0] != path.relative_to(ROOT).parts[0]
    }
    taken = {(path, name) for path, name in foreign if path.startswith("worker/")}
    assert foreign - taken == set()
    used = {name for _, name in taken if not name.startswith("kernels.")}
    assert used == allowed, "used, and what the architecture names"


def imported(path: Path) -> set[str]:
    """What a file imports of the rooms, anywhere in it: "room.module"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {".".join(name.split(".")[:2]) for name in found if name.split(".")[0] in sizes.ROOMS}


def test_nothing_of_the_builders_machine_is_named() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in tracked.stdout.decode().split("\0") if name]
    odd = re.compile(rb"/" + rb"work/main|/" + rb"work/shared|\.\./" + rb"shared|/" + rb"tmp/scratch")
    assert [
        name for name in names if (ROOT / name).is_file() and odd.search((ROOT / name).read_bytes())
    ] == []


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def fenced_commands(document: Path) -> list[str]:
    """Lines of the document's ``sh`` blocks, comments left out, continuation lines joined."""
    blocks = re.findall(r"^```sh\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_documented_make_targets_exist(document: Path) -> None:
    targets = {
        command.split()[1] for command in fenced_commands(document) if re.match(r"make [a-z]", command)
    }
    assert targets <= make_targets()


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_documented_flags_exist(document: Path) -> None:
    """Every `producer x --flag` and `worker x --flag` shown to a reader is in that command's --help."""
    for command in fenced_commands(document):
        match = re.search(r"(?:^|/|\s)(producer|worker) ([a-z]+)((?: .*)?)$", command)
        if match:
            program, name, rest = match.groups()
            help_text = command_help(program, name)
            missing = [flag for flag in re.findall(r"(?<=\s)--[a-z-]+", rest) if flag not in help_text]
            assert missing == [], command


def command_help(program: str, name: str, seen: dict[tuple[str, str], str] = {}) -> str:  # noqa: B006 - a memo
    if (program, name) not in seen:
        run = subprocess.run(
            [sys.executable, "-m", f"{program}.cli", name, "--help"],
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env={"COLUMNS": "200", "PATH": "/usr/bin:/bin", "TERM": "dumb"},
        )
        assert run.returncode == 0, run.stderr
        seen[program, name] = run.stdout
    return seen[program, name]


def test_readme_names_both_commands() -> None:
    commands = fenced_commands(ROOT / "README.md")
    assert {"make demo", "make test"} <= set(commands)


def test_ci_runs_the_readmes_test_command() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text()
