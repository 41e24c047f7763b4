"""The stored answer of a model folder, and what the doctor says when the model no longer gives it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from producer.errors import LivebatchError
from worker import doctor, reference, settings
from worker.bench import rates
from worker.settings import DUMMY, EngineSettings


def findings(folder: Path) -> list[doctor.Finding]:
    told = settings.read(model=str(folder), redis_url="redis://127.0.0.1:1", max_batch=1)
    return [found for found in doctor.examine(told) if found.subject == "prompt"]


@pytest.fixture
def copy(model_folder: Path, tmp_path: Path) -> Path:
    """The default model's folder with a reference.json of its own; weights are linked, not copied."""
    folder = tmp_path / "model"
    shutil.copytree(
        model_folder, folder, copy_function=lambda source, target: Path(target).hardlink_to(source)
    )
    (folder / reference.FILE).unlink(missing_ok=True)
    return folder


@pytest.mark.model
def test_the_doctor_compares_with_the_stored_answer(copy: Path) -> None:
    assert [found.verdict for found in findings(copy)] == ["ok", "warning"]
    reference.record(copy)
    stored = json.loads((copy / reference.FILE).read_text())
    assert stored["token_ids"][:2] == [7042, 30], "' Paris', '.'"
    assert [found.verdict for found in findings(copy)] == ["ok", "ok"]
    stored["token_ids"][3] += 1
    (copy / reference.FILE).write_text(json.dumps(stored))
    assert [found.verdict for found in findings(copy)] == ["ok", "error"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"token_ids": [1]}', '{"prompt_token_ids": [1], "token_ids": ["a"]}']
)
def test_a_damaged_reference_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / reference.FILE).write_text(text)
    with pytest.raises(LivebatchError, match=r"reference\.json"):
        reference.load(tmp_path)


def test_bench_measures_each_live_batch() -> None:
    measured = list(rates(EngineSettings(model=DUMMY, max_batch=9)))
    assert [rate.live for rate in measured] == [1, 8, 9]
    assert all(rate.greedy > 0 and rate.sampled > 0 for rate in measured)
