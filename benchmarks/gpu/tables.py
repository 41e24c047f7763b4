"""The findings as short markdown tables. Knows the findings' names, nothing of how they came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.findings import Finding, find
from benchmarks.gpu.load import BATCHES, DISTINCT

Cells = Sequence[Any]


def markdown(head: Cells, rows: Sequence[Cells]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(shown, cells)) + " |" for cells in lines)


def shown(cell: Any) -> str:
    if cell is None:
        return "-"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def ratio(above: Any, below: Any) -> str | None:
    return f"{above / below:.2f}" if above and below else None


def tables(found: Sequence[Finding]) -> str:
    """All of them, the empty ones left out."""
    parts = [decode(found), mixes(found), workloads(found), steps(found), memory(found), undone(found)]
    return "\n\n".join(part for part in parts if part)


def decode(found: Sequence[Finding]) -> str:
    """(a): decode rates of settings that all differ, beside the peers."""
    rows = []
    for batch in BATCHES:
        ours = rate(found, "ours", batch, mix=DISTINCT)
        raw = rate(found, "raw", batch)
        genai = rate(found, "genai", batch, mix=DISTINCT)
        eager = rate(found, "eager", batch)
        own = [rate(found, peer, batch, mix=DISTINCT) for peer in ("plain loop", "deterministic")]
        if ours:
            rows.append([batch, ours, raw, ratio(ours, raw), eager, genai, ratio(ours, genai), *own])
    head = ("B", "ours", "raw", "ours / raw", "eager", "genai", "ours / genai", "plain loop", "deterministic")
    return markdown(head, rows) if rows else ""


def rate(found: Sequence[Finding], peer: str, batch: int, **wanted: Any) -> Any:
    return find(found, case="a", peer=peer, batch=batch, **wanted).get("decode_tok_s")


def mixes(found: Sequence[Finding]) -> str:
    """(a): other settings, and rates with the prefill counted."""
    rows = []
    for batch in BATCHES:
        cells: list[Any] = [batch]
        for peer in ("ours", "genai"):
            cells += [rate(found, peer, batch, mix=mix) for mix in ("greedy", "one setting")]
            cells.append(find(found, case="a", peer=peer, batch=batch, mix=DISTINCT).get("total_tok_s"))
        if any(cells[1:]):
            rows.append(cells)
    names = ("greedy", "one setting", "with prefill")
    head = ("B", *(f"{peer}, {name}" for peer in ("ours", "genai") for name in names))
    return markdown(head, rows) if rows else ""


def workloads(found: Sequence[Finding]) -> str:
    """(b) to (e)."""
    queued = find(found, case="d", peer="ours")
    direct = find(found, case="d", peer="direct").get("total_tok_s")
    offline = {peer: find(found, case="b", peer=peer) for peer in ("ours", "static", "genai")}
    prompts = {
        peer: find(found, case="e", peer=peer).get("prompt_tok_s") for peer in ("ours", "eager", "genai")
    }
    total, static = (
        find(found, case="c", peer=peer).get("total_tok_s") for peer in ("ours, to the end", "static")
    )
    rows: list[Cells] = [
        ("b offline, output tok/s", offline["ours"].get("total_tok_s"), peers_of_b(offline)),
        *tails(found),
        ("c to the end", total, f"static {shown(static)}"),
        ("d through Redis", queued.get("total_tok_s"), f"direct {shown(direct)}"),
        ("d / direct", ratio(queued.get("total_tok_s"), direct), ""),
        (
            "e prompt tok/s",
            prompts["ours"],
            f"eager {shown(prompts['eager'])}, genai {shown(prompts['genai'])}",
        ),
    ]
    rows = [row for row in rows if row[1] is not None]
    return markdown(("case", "ours", "beside it"), rows) if rows else ""


def tails(found: Sequence[Finding]) -> list[Cells]:
    """(c): of each number of live rows."""
    rows: list[Cells] = []
    for one in found:
        if "until_tok_s" in one:
            until, pure = one["until_tok_s"], one["pure_decode_tok_s"]
            share = f"{shown(ratio(until, pure))} of decode alone, {shown(pure)}"
            rows.append((f"c until the last 20 rows, {one['batch']} live", until, share))
    return rows


def peers_of_b(offline: dict[str, Finding]) -> str:
    genai, static = offline["genai"], offline["static"].get("total_tok_s")
    cut = "" if genai.get("finished", True) else " (cut off)"
    return f"static {shown(static)}, genai {shown(genai.get('total_tok_s'))}{cut}"


def steps(found: Sequence[Finding]) -> str:
    names = ("step_ms", "replay_ms", "draw_us", "gap_us", "gap_share")
    host = ("host_plan_us", "host_launch_us", "host_land_us", "host_wait_us")
    rows = [
        [one["batch"], *(one[name] for name in (*names, *host))] for one in found if one["case"] == "steps"
    ]
    return markdown(("B", *(name.replace("_", " ") for name in (*names, *host))), rows) if rows else ""


def memory(found: Sequence[Finding]) -> str:
    """Over decode steps, and over the rows of (d): start, quarters, end."""
    lines = []
    if one := find(found, case="allocations"):
        spread = {name: one[f"{name}_spread"] for name in ("pool_used_bytes", "device_used_bytes", "rss_mb")}
        lines.append(f"{one['steps']:,} decode steps of {one['rows']} rows allocated: {spread}")
    for name, quarters in find(found, case="d", peer="ours").get("memory_mb", {}).items():
        lines.append(f"{name} MB: {', '.join(f'{each:,.0f}' for each in quarters)}")
    return "\n".join(lines)


def undone(found: Sequence[Finding]) -> str:
    """Parts that did not run to their end: what they had found until then is in the tables."""
    return "\n".join(f"not done: {one['peer']}: {one['ended']}" for one in found if one.get("ended"))
