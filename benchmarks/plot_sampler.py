"""Tables and a plot from benchmarks/results/sampler.json: markdown to stdout, an SVG beside the results.

python benchmarks/plot_sampler.py > table.md
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
MIXES = ("uniform", "4 groups", "all distinct", "top_p of all", "penalties")
RUNGS = ("row_by_row", "launch_then_wait", "one_call_if_uniform", "call_per_group", "one_launch")
COLOURS = ("#888888", "#c8a000", "#2a7de1", "#c0392b", "#27ae60", "#8e44ad")
BATCHES = (1, 8, 32, 128, 256)


def device_table(rows: list[dict[str, Any]], torch: list[dict[str, Any]]) -> str:
    """Device time of our one launch, us, beside the floor and torch."""
    names = [name for name in torch[0] if name.startswith("torch")]
    head = ["V", "B", "floor", *MIXES, *names]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for peer in torch:
        here = {
            r["mix"]: r for r in rows if (r["batch"], r["vocab_size"]) == (peer["batch"], peer["vocab_size"])
        }
        times = [here[mix]["device_us"] for mix in MIXES]
        cells = [
            peer["vocab_size"],
            peer["batch"],
            here["uniform"]["floor_us"],
            *times,
            *(peer[n] for n in names),
        ]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def ladder_table(rows: list[dict[str, Any]], vocab_size: int) -> str:
    """Wall time of a step on the host, us, by rung."""
    lines = ["| B | rows | " + " | ".join(RUNGS) + " |", "|" + "---|" * (2 + len(RUNGS))]
    for row in rows:
        if row["vocab_size"] == vocab_size:
            times = " | ".join(f"{row['wall_us'][rung]:,.0f}" for rung in RUNGS)
            lines.append(f"| {row['batch']} | {row['mix']} | {times} |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], vocab_size: int) -> str:
    """Device time over batch, both logarithmic, one line a mix and one for the floor."""
    width, height, left, bottom = 640, 400, 60, 340

    def at(batch: int, us: float) -> str:
        x = left + 60 * math.log2(batch)
        y = bottom - 130 * math.log10(max(us, 1) / 1)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
    ]
    parts.append(
        f'<text x="{left}" y="20">One launch a step, V = {vocab_size:,}, fp32: us on the device</text>'
    )
    for us in (1, 10, 100):
        x, y = at(1, us).split(",")
        parts.append(
            f'<line x1="{x}" y1="{y}" x2="560" y2="{y}" stroke="#ddd"/><text x="20" y="{y}">{us}</text>'
        )
    for batch in BATCHES:
        parts.append(f'<text x="{at(batch, 1).split(",")[0]}" y="{bottom + 20}">{batch}</text>')
    lines = [("floor", "floor_us", "uniform"), *((mix, "device_us", mix) for mix in MIXES)]
    for number, ((label, field, mix), colour) in enumerate(zip(lines, COLOURS, strict=True)):
        found = [r for r in rows if r["vocab_size"] == vocab_size and r["mix"] == mix]
        points = " ".join(at(r["batch"], r[field]) for r in found)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="500" y="{215 + 18 * number}" fill="{colour}">{label}</text>')
    parts.append(f'<text x="{left}" y="{bottom + 45}">rows of the batch</text></svg>')
    return "\n".join(parts)


def main() -> None:
    data = json.loads((RESULTS / "sampler.json").read_text())
    (RESULTS / "sampler.svg").write_text(plot(data["rows"], 201088))
    print(device_table(data["rows"], data["torch"]))
    print()
    print(ladder_table(data["rows"], 201088))


if __name__ == "__main__":
    main()
