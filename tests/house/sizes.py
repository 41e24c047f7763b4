"""Lines per file and per function of the three rooms; `make size` prints them, test_house.py bounds them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("producer", "worker", "kernels")


class Size(NamedTuple):
    lines: int
    where: str


def sources() -> list[Path]:
    return sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def files() -> list[Size]:
    """Every source file, longest first."""
    lengths = (Size(path.read_text().count("\n"), str(path.relative_to(ROOT))) for path in sources())
    return sorted(lengths, reverse=True)


def functions() -> list[Size]:
    """Every function and method with its length in lines, decorators left out, longest first."""
    found = []
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                found.append(Size(lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return sorted(found, reverse=True)


def main() -> None:
    lengths = sorted(size.lines for size in functions())
    median, most = lengths[len(lengths) // 2], lengths[int(0.9 * len(lengths))]
    print(f"{len(lengths)} functions: median {median}, 90 % under {most} lines")
    for title, rows in (("longest functions", functions()), ("longest files", files())):
        print(f"\n{title}")
        for size in rows[:10]:
            print(f"  {size.lines:4d}  {size.where}")


if __name__ == "__main__":
    main()
