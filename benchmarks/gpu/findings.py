"""What was found, one JSON object a line: written as it comes, so a peer that is killed keeps its figures."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Finding = dict[str, Any]
EMPTY: Mapping[str, Sequence[float]] = {}


class Findings:
    """A file that several processes append to, one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(
        self, case: str, peer: str, rounds: Mapping[str, Sequence[float]] = EMPTY, /, **figures: Any
    ) -> None:
        """``rounds``: figures that were measured several times; their medians are kept under their names."""
        found: Finding = {"case": case, "peer": peer}
        for name, values in rounds.items():
            found[name] = rounded(median(values))
            found[f"{name}_rounds"] = [rounded(one) for one in values]
        found |= {name: rounded(value) for name, value in figures.items()}
        line = json.dumps(found)
        print(line, file=sys.stderr, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")

    def read(self) -> list[Finding]:
        return [json.loads(line) for line in self._path.read_text().splitlines()]


def rounded(value: Any) -> Any:
    """Four significant digits and never fewer than the whole part: the rest is noise."""
    if not isinstance(value, float):
        return value
    return round(value) if abs(value) >= 1000 else float(f"{value:.4g}")


def find(findings: Iterable[Finding], **wanted: Any) -> Finding:
    """The last one of which ``wanted`` is true; empty if there is none."""
    matching = [one for one in findings if all(one.get(name) == value for name, value in wanted.items())]
    return matching[-1] if matching else {}
