"""A model folder's stored answer: the first greedy tokens of one prompt, run once when the folder was built.

Owns reference.json. `worker check` runs the prompt again and compares: damaged weights, a runtime that
computes something else and a device that is quietly another one all show there. A CUDA folder's answer comes
from the same weights in float32 on the CPU, so it also says by how much each token won.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kernels.rows import RowParams
from producer.errors import LivebatchError
from worker.sequence import Row

if TYPE_CHECKING:
    from worker.engine import Engine

FILE = "reference.json"
PROMPT = "The capital of France is"
NUM_TOKENS = 8
_NEAR_TIE = 0.25  # twice what float16 was seen to move a logit (0.09), and some
_LARGEST_TWIN = 4 << 30  # bytes of float32 weights that are worth writing and running for eight tokens


@dataclass(frozen=True, slots=True)
class Reference:
    """The prompt's ids, the answer's, and how far each of those led in logits (empty: exactly, or wrong)."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]

    def disagreement(self, found: list[int]) -> str | None:
        """What is wrong with ``found`` tokens; None when they are right or part at a near-tie."""
        pairs = zip(found, self.tokens, strict=False)
        first = next((i for i, (one, other) in enumerate(pairs) if one != other), len(self.tokens))
        if found == self.tokens or (first < len(self.gaps) and self.gaps[first] < _NEAR_TIE):
            return None
        return f"the model gives tokens {found}; when the folder was built it gave {self.tokens}"


def answer(engine: Engine, prompt: list[int]) -> list[int]:
    """The greedy continuation of ``prompt``, NUM_TOKENS ids. Raises LivebatchError when the row fails."""
    [output] = engine.generate([Row(0, prompt, RowParams(max_tokens=NUM_TOKENS, temperature=0.0))])
    if not output.tokens:
        raise LivebatchError(f"the model cannot run: {output.message or output.status.name}")
    return list(output.tokens)


def record(folder: Path) -> str | None:
    """Runs the prompt on the CPU and stores the answer beside the model; else says why not.

    Raises LivebatchError.
    """
    from worker.model import too_old

    if (reason := too_old()) is None:
        _store(folder, _run(folder))
    return reason


def record_for_cuda(folder: Path, source: Path) -> str | None:
    """Stores what ``source``, the folder's GGUF, answers in float32 on the CPU; else says why not.

    Raises LivebatchError.
    """
    from worker.build import build_model
    from worker.folder import ModelFolder
    from worker.model import too_old

    if (reason := too_old()) is not None:
        return reason
    if 2 * ModelFolder.load(folder).graph.data_bytes > _LARGEST_TWIN:
        return "the model is too large to be run on the CPU for it"
    with tempfile.TemporaryDirectory(dir=folder, prefix=".twin-") as scratch:
        twin = Path(scratch) / "fp32"
        build_model(source, twin)
        stored = _run(twin)
        _store(folder, stored | {"gaps": _gaps(twin, stored["prompt_token_ids"], stored["token_ids"])})
    return None


def load(folder: Path) -> Reference | None:
    """The stored answer; None where the folder has none. LivebatchError: unreadable."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        stored = json.loads(path.read_bytes())
        prompt, tokens = stored["prompt_token_ids"], stored["token_ids"]
        gaps = [float(gap) for gap in stored.get("gaps", [])]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LivebatchError(f"{path} cannot be read ({error!r}): build the folder again") from error
    if not all(
        isinstance(ids, list) and ids and all(type(i) is int for i in ids) for ids in (prompt, tokens)
    ):
        raise LivebatchError(f"{path} does not hold token ids: build the folder again")
    return Reference(prompt, tokens, gaps)


def _run(folder: Path) -> dict[str, Any]:
    from worker.compose import build_engine
    from worker.settings import EngineSettings
    from worker.tokenizer import Tokenizer

    prompt = Tokenizer.load(folder).encode(PROMPT)
    engine = build_engine(EngineSettings(model=str(folder), max_batch=1))
    return {"prompt": PROMPT, "prompt_token_ids": prompt, "token_ids": answer(engine, prompt)}


def _gaps(folder: Path, prompt: list[int], tokens: list[int]) -> list[float]:
    """By how much each token's logit led the next best, all in one run of the whole text. [len(tokens)]"""
    from worker.batch import Batch
    from worker.blocks import blocks_for
    from worker.folder import ModelFolder
    from worker.model import OrtModel

    ids = [*prompt, *tokens[:-1]]
    opened = ModelFolder.load(folder)
    num_blocks = blocks_for(len(ids), opened.block_size)
    logits = OrtModel(opened, num_blocks=1 + num_blocks).run(
        Batch(
            input_ids=np.array(ids, np.int64),
            cumulative=np.array([0, len(ids)], np.int32),
            past=np.zeros(1, np.int32),
            block_table=np.arange(1, 1 + num_blocks, dtype=np.int32)[None],
            logits_rows=np.arange(len(prompt) - 1, len(ids), dtype=np.int64),
            slots=np.zeros(1, np.int32),
        )
    )
    best = np.sort(np.partition(logits, -2)[:, -2:])  # [len(tokens), 2]
    return [round(float(gap), 4) for gap in best[:, 1] - best[:, 0]]


def _store(folder: Path, stored: dict[str, Any]) -> None:
    (folder / FILE).write_text(json.dumps(stored, indent=2) + "\n")
