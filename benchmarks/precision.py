"""What q8 costs in accuracy and gives in speed beside fp32: the tables of docs/precision.md.

Accuracy: fp32's own greedy answers to a dozen questions are fed to both models and their logits compared at
every token; and each model answers by itself. Speed: prompt 16, output 64, greedy through the engine, the
best of several rounds taken in turns, so that a busy machine slows both alike.

    make model && python -m worker.build.fetch --precision q8 --out models/smollm2-135m-q8
    python benchmarks/precision.py models/smollm2-135m-fp32 models/smollm2-135m-q8
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernels.cpu import BatchedSampler
from kernels.rows import RowParams
from worker.batch import Batch
from worker.engine import Engine
from worker.folder import ModelFolder
from worker.model import OrtModel
from worker.scheduler import Policy
from worker.sequence import Row
from worker.tokenizer import Tokenizer

QUESTIONS = {  # and a word that a right answer has
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Italy?": "Rome",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What is 2+2?": "4",
    "How many days are in a week?": "7",
    "What color is the sky on a clear day?": "blue",
    "What is the largest planet in the solar system?": "Jupiter",
    "What gas do plants absorb from the air?": "carbon dioxide",
    "At what temperature in Celsius does water boil?": "100",
    "Which animal says meow?": "cat",
    "What is the chemical formula of water?": "H2O",
}
ANSWER_TOKENS = 48
PROMPT, OUTPUT = 16, 64
Floats = NDArray[np.float32]


class Subject:
    """One model folder under test."""

    def __init__(self, path: Path) -> None:
        self.folder = ModelFolder.load(path)
        self.model = OrtModel(self.folder, num_blocks=1024)
        self.tokenizer = Tokenizer.load(path)

    def prompt(self, question: str) -> list[int]:
        assert self.tokenizer.template is not None
        text = self.tokenizer.template.render([{"role": "user", "content": question}], 1 << 20)
        return self.tokenizer.encode_rendered(text)

    def generate(self, rows: Sequence[Row], max_batch: int) -> dict[int, list[int]]:
        sampler = BatchedSampler(max_batch, self.model.vocab_size, self.model.context_length)
        engine = Engine(self.model, sampler, Policy(max_batch=max_batch))
        return {output.id: list(output.tokens) for output in engine.generate(rows)}

    def answers(self) -> list[list[int]]:
        params = RowParams(max_tokens=ANSWER_TOKENS, temperature=0.0, eos_ids=self.folder.eos_ids)
        rows = [Row(i, self.prompt(question), params) for i, question in enumerate(QUESTIONS)]
        found = self.generate(rows, max_batch=4)
        return [found[i] for i in range(len(rows))]

    def logits(self, prompt: list[int], answer: list[int]) -> Floats:
        """Logits before every token of ``answer``. [len(answer), vocab]"""
        ids = [*prompt, *answer[:-1]]
        width = -(-len(ids) // self.model.block_size)
        batch = Batch(
            input_ids=np.array(ids, np.int64),
            cumulative=np.array([0, len(ids)], np.int32),
            past=np.zeros(1, np.int32),
            block_table=np.arange(1, 1 + width, dtype=np.int32)[None],
            logits_rows=np.arange(len(prompt) - 1, len(ids), dtype=np.int64),
            slots=np.zeros(1, np.int32),
        )
        return self.model.run(batch)

    def tokens_per_second(self, num_rows: int) -> float:
        dice = np.random.default_rng(0)
        params = RowParams(max_tokens=OUTPUT, temperature=0.0)
        rows = [
            Row(i, dice.integers(1000, self.model.vocab_size, PROMPT).tolist(), params)
            for i in range(num_rows)
        ]
        begun = time.perf_counter()
        self.generate(rows, num_rows)
        return num_rows * OUTPUT / (time.perf_counter() - begun)


@dataclass(frozen=True)
class Comparison:
    """One question: how far q8's logits are from fp32's along fp32's answer, and both answers."""

    question: str
    tokens: int
    mean_kl: float  # nats, KL(reference || other)
    max_kl: float
    max_difference: float  # of any logit
    agreement: float  # share of tokens where both have the same greatest logit
    least_gap: float  # reference's smallest lead of its greatest logit over its second: how easily it flips
    right: tuple[bool, bool]
    answers: tuple[str, str]


def log_softmax(logits: Floats) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


def compare(reference: Subject, other: Subject) -> list[Comparison]:
    found = []
    for (question, word), mine, theirs in zip(
        QUESTIONS.items(), reference.answers(), other.answers(), strict=True
    ):
        prompt = reference.prompt(question)
        right, near = reference.logits(prompt, mine).copy(), other.logits(prompt, mine)
        p, q = log_softmax(right), log_softmax(near)
        kl = (np.exp(p) * (p - q)).sum(axis=1)
        top = np.partition(right, -2, axis=1)[:, -2:]
        texts = (reference.tokenizer.decode(mine), other.tokenizer.decode(theirs))
        found.append(
            Comparison(
                question=question,
                tokens=len(mine),
                mean_kl=float(kl.mean()),
                max_kl=float(kl.max()),
                max_difference=float(np.abs(right - near).max()),
                agreement=float((right.argmax(1) == near.argmax(1)).mean()),
                least_gap=float((top[:, 1] - top[:, 0]).min()),
                right=(word.lower() in texts[0].lower(), word.lower() in texts[1].lower()),
                answers=texts,
            )
        )
    return found


def speeds(subjects: Sequence[Subject], rounds: int) -> dict[int, list[float]]:
    """Tokens a second by live batch, one figure a subject."""
    found = {}
    for size in (1, 8, 32):
        runs = [[subject.tokens_per_second(size) for subject in subjects] for _ in range(rounds)]
        found[size] = np.max(runs, axis=0).tolist()
    return found


def print_accuracy(names: Sequence[str], rows: list[Comparison]) -> None:
    print(f"| question | KL mean | KL max | max d | same argmax | least gap | {names[0]} | {names[1]} |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        print_row(row.question, [row], *("right" if right else "wrong" for right in row.right))
    counts = [f"{sum(row.right[i] for row in rows)} of {len(rows)}" for i in range(2)]
    print_row(f"all {sum(row.tokens for row in rows)} tokens", rows, *counts)


def print_row(name: str, rows: list[Comparison], mine: str, theirs: str) -> None:
    """Means weigh by tokens, the rest are extremes."""
    tokens = [row.tokens for row in rows]
    kl = np.average([row.mean_kl for row in rows], weights=tokens)
    agreement = np.average([row.agreement for row in rows], weights=tokens)
    worst, difference = max(row.max_kl for row in rows), max(row.max_difference for row in rows)
    gap = min(row.least_gap for row in rows)
    figures = f"{kl:.4f} | {worst:.3f} | {difference:.2f} | {agreement:.1%} | {gap:.2f}"
    print(f"| {name} | {figures} | {mine} | {theirs} |")


def print_speed(names: Sequence[str], rates: dict[int, list[float]]) -> None:
    print(f"\n| live rows | {names[0]} tokens/s | {names[1]} tokens/s | ratio |\n|---|---|---|---|")
    for size, (mine, theirs) in rates.items():
        print(f"| {size} | {mine:.0f} | {theirs:.0f} | {theirs / mine:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("reference", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the speed test (5)")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    options = parser.parse_args()
    subjects = [Subject(options.reference), Subject(options.other)]
    names = [subject.folder.name for subject in subjects]
    rows = compare(*subjects)
    print_accuracy(names, rows)
    rates = speeds(subjects, options.rounds)
    print_speed(names, rates)
    if options.out:
        machine = {
            "cpu": platform.processor(),
            "cores": len(os.sched_getaffinity(0)),
            "load": os.getloadavg(),
        }
        figures = {"models": names, "machine": machine, "accuracy": [asdict(r) for r in rows], "speed": rates}
        options.out.write_text(json.dumps(figures, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
