"""The GPU engine against its ceiling and its peers, in one run on one model folder. Needs an NVIDIA GPU.

    python benchmarks/engine.py --model DIR --out benchmarks/results/engine.json

(a) decode, 128 + 256 tokens, 1 to 256 rows; (b) nano-vllm's offline workload; (c) a tail of long rows;
(d) 20,000 rows through Redis; (e) prefill. Each part is a process of its own, one after the other: they would
not fit the GPU's memory together. onnxruntime-genai wants NVIDIA's libraries on LD_LIBRARY_PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import machine, queued  # noqa: E402
from benchmarks.gpu.findings import Findings, find  # noqa: E402
from benchmarks.gpu.tables import tables  # noqa: E402

OURS_SECONDS, DETERMINISTIC_SECONDS, GENAI_SECONDS, QUEUED_SECONDS = 300, 90, 90, 120  # then it is ended
GENAI_CASES = ("a", "b", "e")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a CUDA model folder")
    parser.add_argument("--cases", default="a,b,c,d,e", help="some of a,b,c,d,e")
    parser.add_argument("--peers", default="raw,eager,genai,static,deterministic")
    parser.add_argument("--genai-model", type=Path, help="for genai, should it refuse --model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=20_000, help="rows of (d)")
    parser.add_argument("--kv-memory", default="24G", help="of our engine")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    return parser.parse_args()


def child(findings: Findings, module: str, flags: list[str], seconds: float) -> bool:
    """Whether a part ran to its end; what it found until then is kept, and why it did not."""
    begun = time.perf_counter()
    command = [sys.executable, "-m", f"benchmarks.gpu.{module}", *flags]
    try:
        code = subprocess.run(command, stdout=sys.stderr, timeout=seconds, check=False, cwd=ROOT).returncode
        ended = f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        ended = f"not done after {seconds:.0f} s"
    findings.add(
        "part",
        module,
        deterministic="--deterministic" in flags,
        seconds=time.perf_counter() - begun,
        ended=ended,
    )
    return not ended


def ours(findings: Findings, told: argparse.Namespace, report: list[str]) -> None:
    """Every case in one process, (a) once more in a deterministic one: its switch is read at the start."""
    common = ["--model", str(told.model.resolve()), "--kv-memory", told.kv_memory, *report]
    cases = ["--cases", told.cases, "--peers", told.peers, "--rows", str(told.rows)]
    child(findings, "cases", [*common, *cases, "--rounds", str(told.rounds)], OURS_SECONDS)
    if "a" in told.cases.split(",") and "deterministic" in told.peers.split(","):
        child(findings, "cases", [*common, "--deterministic", "--rounds", "2"], DETERMINISTIC_SECONDS)


def genai(findings: Findings, told: argparse.Namespace, report: list[str]) -> None:
    """On our folder; if that gives no figure, on the one given for it."""
    cases = [case for case in told.cases.split(",") if case in GENAI_CASES]
    if "genai" not in told.peers.split(",") or not cases:
        return
    for model in (each.resolve() for each in (told.model, told.genai_model) if each):
        flags = ["--model", str(model), "--cases", ",".join(cases), *report]
        child(findings, "genai", flags, GENAI_SECONDS)
        if any(find(findings.read(), case=case, peer="genai", folder=model.name) for case in cases):
            return


def through_redis(findings: Findings, told: argparse.Namespace) -> None:
    flags = ["--model", str(told.model.resolve()), "--device", "cuda:0", "--kv-memory", told.kv_memory]
    try:
        findings.add("d", "ours", **queued.measure(flags, told.rows, told.rows // 10, QUEUED_SECONDS))
    except RuntimeError as error:
        findings.add("part", "queued", ended=str(error))


def record(told: argparse.Namespace, found: list[dict[str, Any]], begun: float) -> dict[str, Any]:
    return {
        "command": f"python {sys.argv[0]} --cases {told.cases} --peers {told.peers} --rounds {told.rounds}",
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - begun),
        "model": told.model.name,
        "machine": machine.describe(),
        "findings": found,
    }


def main() -> None:
    told, begun = parse(), time.perf_counter()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "findings.jsonl"
        findings, report = Findings(path), ["--report", str(path)]
        ours(findings, told, report)
        if "d" in told.cases.split(","):
            through_redis(findings, told)
        genai(findings, told, report)
        found = findings.read()
    if told.out:
        told.out.write_text(json.dumps(record(told, found, begun), indent=1) + "\n")
    print(tables(found))


if __name__ == "__main__":
    main()
