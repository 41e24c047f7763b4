"""A model folder's stored answer: the first greedy tokens of one prompt, run once when the folder was built.

Owns reference.json. `worker check` runs the prompt again and compares: damaged weights, a runtime that
computes something else and a device that is quietly another one all show there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.rows import RowParams
from producer.errors import LivebatchError
from worker.sequence import Row

if TYPE_CHECKING:
    from worker.engine import Engine

FILE = "reference.json"
PROMPT = "The capital of France is"
NUM_TOKENS = 8


def answer(engine: Engine, prompt: list[int]) -> list[int]:
    """The greedy continuation of ``prompt``, NUM_TOKENS ids. Raises LivebatchError when the row fails."""
    [output] = engine.generate([Row(0, prompt, RowParams(max_tokens=NUM_TOKENS, temperature=0.0))])
    if not output.tokens:
        raise LivebatchError(f"the model cannot run: {output.message or output.status.name}")
    return list(output.tokens)


def record(folder: Path) -> None:
    """Runs the prompt on the CPU and stores the answer beside the model. Raises LivebatchError."""
    from worker.compose import build_engine
    from worker.settings import EngineSettings
    from worker.tokenizer import Tokenizer

    prompt = Tokenizer.load(folder).encode(PROMPT)
    engine = build_engine(EngineSettings(model=str(folder), max_batch=1))
    stored = {"prompt": PROMPT, "prompt_token_ids": prompt, "token_ids": answer(engine, prompt)}
    (folder / FILE).write_text(json.dumps(stored, indent=2) + "\n")


def load(folder: Path) -> tuple[list[int], list[int]] | None:
    """(prompt ids, the stored answer's ids); None where the folder has none. LivebatchError: unreadable."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_bytes())
        prompt, tokens = stored["prompt_token_ids"], stored["token_ids"]
    except (ValueError, KeyError, TypeError) as error:
        raise LivebatchError(f"{path} cannot be read ({error!r}): build the folder again") from error
    if not all(
        isinstance(ids, list) and ids and all(type(i) is int for i in ids) for ids in (prompt, tokens)
    ):
        raise LivebatchError(f"{path} does not hold token ids: build the folder again")
    return prompt, tokens
