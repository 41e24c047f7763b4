"""What SmolLM2-135M answers greedily in float32 on the CPU: the yardstick of its float16 twin on a GPU.

    python tests/worker/smollm2_answers.py models/smollm2-135m-fp32 > tests/data/smollm2_answers.json

Twenty minutes on two cores: one prompt has 8,000 tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kernels.cpu import BatchedSampler
from kernels.pending import Done
from kernels.rows import RowParams
from worker.engine import Engine
from worker.folder import ModelFolder
from worker.model import OrtModel
from worker.scheduler import Policy
from worker.sequence import Row
from worker.tokenizer import Tokenizer

NEEDLE = "The name of the lighthouse keeper is Margaret."
QUESTION = (
    "\nQuestion: What is the name of the lighthouse keeper?\nAnswer: The name of the lighthouse keeper is"
)
HAY = "The sea was calm that day and the boats went out early to fish near the rocks. "
QUESTIONS = (
    "What is the capital of France?",
    "What colour is the sky?",
    "Explain photosynthesis in one sentence.",
    "List three prime numbers.",
    "Write a haiku about the sea.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for pancakes.",
)


def chat(tokenizer: Tokenizer, question: str) -> list[int]:
    assert tokenizer.template is not None
    return tokenizer.encode_rendered(
        tokenizer.template.render([{"role": "user", "content": question}], 10_000)
    )


def haystack(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """About ``num_tokens`` of hay, the needle a third of the way in, and the question."""
    hay, needle = tokenizer.encode(HAY), tokenizer.encode(NEEDLE + " ")
    question = tokenizer.encode(QUESTION)
    copies = (num_tokens - len(needle) - len(question)) // len(hay)
    return [*hay * (copies // 3), *needle, *hay * (copies - copies // 3), *question]


def prompts(tokenizer: Tokenizer) -> Iterator[tuple[str, list[int], int]]:
    """(name, token ids, tokens of the answer)"""
    for question in QUESTIONS:
        yield question, chat(tokenizer, question), 48
    for name, length in (("past 2,048", 2038), ("past 4,096", 4086)):
        hay = (tokenizer.encode(HAY) * 400)[:length]
        yield name, hay, 24
    yield "needle", haystack(tokenizer, 8000), 12


class Watching(BatchedSampler):
    """Notes by how much each drawn token led the next best, by slot."""

    leads: dict[int, list[float]]

    def enqueue(self, logits: NDArray[np.float32], slots: Sequence[int]) -> Done:  # type: ignore[override]
        if len(slots):
            best = np.sort(np.partition(logits, -2, axis=1)[:, -2:], axis=1)
            for slot, (second, first) in zip(slots, best, strict=True):
                self.leads.setdefault(int(slot), []).append(round(float(first - second), 4))
        return super().enqueue(logits, slots)


def main() -> None:
    path = Path(sys.argv[1])
    folder, tokenizer = ModelFolder.load(path), Tokenizer.load(path)
    model = OrtModel(folder, num_blocks=1200, max_batch=1)
    answers = []
    for name, ids, count in prompts(tokenizer):
        sampler = Watching(1, folder.vocab_size, folder.context_length)
        sampler.leads = {}
        engine = Engine(model, sampler, Policy(max_batch=1))
        params = RowParams(max_tokens=count, temperature=0.0, eos_ids=folder.eos_ids)
        (output,) = engine.generate([Row(0, ids, params)])
        tokens = [int(token) for token in output.tokens]
        answers.append({"name": name, "prompt": ids, "answer": tokens, "leads": sampler.leads[0]})
        print(name, len(ids), repr(tokenizer.decode(tokens)), file=sys.stderr)
    json.dump(answers, sys.stdout, separators=(",", ":"))


if __name__ == "__main__":
    main()
