"""Tables and a plot from benchmarks/results/engine.json: markdown to stdout, an SVG beside the results.

python benchmarks/plot_engine.py > table.md
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu.findings import Finding  # noqa: E402
from benchmarks.gpu.load import BATCHES, DISTINCT  # noqa: E402
from benchmarks.gpu.tables import rate, tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
LINES = {  # peer: the settings it ran with, and its colour
    "raw": (None, "#888888"),
    "ours": (DISTINCT, "#c0392b"),
    "deterministic": (DISTINCT, "#e67e22"),
    "eager": (None, "#2a7de1"),
    "genai": (DISTINCT, "#27ae60"),
}
WIDTH, HEIGHT, LEFT, BOTTOM = 680, 400, 70, 350
TICKS = (100, 1_000, 10_000, 100_000)


def at(batch: int, tokens: float) -> tuple[float, float]:
    """Both axes are logarithmic: 55 a doubling of the batch, 90 a tenfold rate."""
    return LEFT + 55 * math.log2(batch), BOTTOM - 90 * math.log10(max(tokens, TICKS[0]) / TICKS[0])


def plot(found: Sequence[Finding], title: str) -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif">'
    ]
    parts.append(f'<text x="{LEFT}" y="20">{title}</text>')
    parts += axes()
    for number, (peer, (mix, colour)) in enumerate(LINES.items()):
        parts += line(found, peer, mix, colour, 200 + 20 * number)
    return "\n".join([*parts, "</svg>"])


def axes() -> list[str]:
    parts = []
    for tick in TICKS:
        x, y = at(1, tick)
        parts.append(f'<line x1="{x}" y1="{y:.0f}" x2="{x + 440}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 10}" y="{y + 5:.0f}" text-anchor="end">{tick:,}</text>')
    for batch in BATCHES:
        parts.append(f'<text x="{at(batch, 1)[0]:.0f}" y="{BOTTOM + 20}" text-anchor="middle">{batch}</text>')
    return [*parts, f'<text x="{LEFT}" y="{BOTTOM + 42}">rows of the batch</text>']


def line(found: Sequence[Finding], peer: str, mix: str | None, colour: str, y: int) -> list[str]:
    """A peer's curve and its name at height y; nothing if it did not run."""
    wanted = {"mix": mix} if mix else {}
    rates = {batch: rate(found, peer, batch, **wanted) for batch in BATCHES}
    points = " ".join("{:.1f},{:.1f}".format(*at(batch, each)) for batch, each in rates.items() if each)
    if not points:
        return []
    curve = f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
    return [curve, f'<text x="{LEFT + 470}" y="{y}" fill="{colour}">{peer}</text>']


def main() -> None:
    data = json.loads((RESULTS / "engine.json").read_text())
    title = f"Decode, tokens a second: {data['model']}, {data['machine'].get('gpu', 'no GPU')}"
    (RESULTS / "engine.svg").write_text(plot(data["findings"], title) + "\n")
    print(tables(data["findings"]))


if __name__ == "__main__":
    main()
