"""What a row's text costs the parent process between request and result, in CPU microseconds a row.

Rows are 1,000 character slices of Python's own manual. "new": no slice was met before, the cache of words
fills up on the way; "seen": all of them again, as with instructions that rows share. Answers: 128 tokens of
the same text. Redis, the wire and the pipe to the engine are not part of it. Each number is the least of
several rounds: other work on the machine only ever adds.

    python benchmarks/parent_cost.py [--model models/smollm2-135m-fp32] [--rows 448] [--rounds 3] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics
from time import process_time
from typing import Any

import tokenizers

from kernels.rows import Status
from producer.wire import Request, Sampling
from worker.folder import ModelFolder
from worker.rows import Defaults, PreparedRow, RowPreparer
from worker.sequence import Output
from worker.tokenizer import Tokenizer

ROW_LENGTH, ANSWER_TOKENS, BATCH = 1000, 128, 32
TARGET = 250.0  # microseconds of prepare and result: the text's share of the parent's 600


def per_row(work: Callable[[Any], Any], rows: Sequence[Any]) -> float:
    """CPU microseconds of ``work`` on each of ``rows``."""
    start = process_time()
    for row in rows:
        work(row)
    return 1e6 * (process_time() - start) / len(rows)


def texts(num_rows: int) -> list[str]:
    manual = "\n".join(topics[name] for name in sorted(topics))
    starts = range(0, len(manual) - ROW_LENGTH, ROW_LENGTH)
    if num_rows > len(starts):
        raise SystemExit(f"--rows: there is text for {len(starts)} rows")
    return [manual[start : start + ROW_LENGTH] for start in starts[:num_rows]]


def request(line: int, stop: tuple[str, ...] | None = None, **prompt: Any) -> Request:
    return Request(
        custom_id=f"row-{line}",
        batch_id="batch",
        file=0,
        line=line,
        endpoint="chat" if "messages" in prompt else "completions",
        sampling=Sampling(max_tokens=ANSWER_TOKENS, temperature=0.7, top_p=0.9, stop=stop),
        **prompt,
    )


def finish(row: tuple[PreparedRow, list[int]]) -> None:
    prepared, tokens = row
    prepared.feed(Output(prepared.row.id, tokens, Status.LENGTH))
    prepared.result(Status.LENGTH)


def finish_streamed(row: tuple[PreparedRow, list[int]]) -> None:
    prepared, tokens = row
    for token in tokens:
        prepared.feed(Output(prepared.row.id, (token,), Status.RUNNING))
    prepared.result(Status.LENGTH)


def measure(folder: Path, slices: list[str]) -> dict[str, float]:
    """CPU microseconds a row by what is done."""
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    batches = [slices[start : start + BATCH] for start in range(0, len(slices), BATCH)]
    answers = [ids[:ANSWER_TOKENS] for ids in map(Tokenizer.load(folder).encode, slices)]
    preparer = RowPreparer(ModelFolder.load(folder), Tokenizer.load(folder), Defaults())
    ids = count(1)

    def prepare(request: Request) -> PreparedRow:
        return preparer.prepare(request, next(ids))

    plain = [request(line, prompt=text) for line, text in enumerate(slices, 1)]
    chats = [
        request(line, messages=[{"role": "user", "content": text}]) for line, text in enumerate(slices, 1)
    ]
    stops = [request(line, ("###", "\n\n\n\n"), prompt="x") for line in range(1, len(slices) + 1)]
    return {
        "tokenizers alone, a text at a time": per_row(library.encode, slices),
        f"tokenizers alone, {BATCH} texts at a time": per_row(library.encode_batch_fast, batches) / BATCH,
        "prepare a completion, new": per_row(prepare, plain),
        "prepare a completion, seen": per_row(prepare, plain),
        "prepare a chat, its ends new": per_row(prepare, chats),
        "prepare a chat, seen": per_row(prepare, chats),
        "result": per_row(finish, [*zip(map(prepare, plain), answers, strict=True)]),
        "result, two stop strings": per_row(
            finish_streamed, [*zip(map(prepare, stops), answers, strict=True)]
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-fp32"))
    parser.add_argument("--rows", type=int, default=448)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    options = parser.parse_args()
    rounds = [measure(options.model, texts(options.rows)) for _ in range(options.rounds)]
    costs = {name: min(costs[name] for costs in rounds) for name in rounds[0]}
    print(f"{options.rows} rows; CPU microseconds a row (target for prepare and result: {TARGET:g})")
    for name, cost in costs.items():
        print(f"{name:42s}{cost:8.1f}")
    for kind in ("new", "seen"):
        total = costs[f"prepare a completion, {kind}"] + costs["result"]
        print(f"{f'prepare and result, {kind}':42s}{total:8.1f}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        versions = {
            "python": platform.python_version(),
            "tokenizers": tokenizers.__version__,
            "machine": platform.machine(),
        }
        record = {"rows": options.rows, "target": TARGET, **versions, "microseconds": costs}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
