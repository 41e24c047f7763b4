"""The stored answer of a model folder, and what the doctor says when the model no longer gives it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import onnxruntime
import pytest
from tiny_gguf import TinyLlama

from producer.errors import LivebatchError
from worker import cli, doctor, reference, settings
from worker.build import build_model
from worker.reference import Reference


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


def tiny_reference(tmp_path: Path) -> Reference:
    """Of a CUDA folder built from a tiny llama; its source's answer in float32."""
    source = TinyLlama().write(tmp_path / "tiny.gguf")
    build_model(source, tmp_path / "tiny-fp16", target="cuda")
    assert reference.record_for_cuda(tmp_path / "tiny-fp16", source) is None
    stored = reference.load(tmp_path / "tiny-fp16")
    assert stored is not None
    return stored


def test_a_cuda_folders_answer_comes_from_its_source(tmp_path: Path) -> None:
    """Token by token the textbook's best, with the lead it has there; nothing else is left behind."""
    stored = tiny_reference(tmp_path)
    ids = [*stored.prompt, *stored.tokens[:-1]]
    right = TinyLlama().logits(ids)[len(stored.prompt) - 1 :]
    assert right.argmax(-1).tolist() == stored.tokens
    best = np.sort(right)[:, -2:]
    np.testing.assert_allclose(stored.gaps, best[:, 1] - best[:, 0], rtol=0, atol=1e-3)
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.gguf", "tiny-fp16"}
    assert not list(tmp_path.glob("tiny-fp16/.*"))


def test_no_answer_of_a_model_too_large_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TinyLlama().write(tmp_path / "tiny.gguf")
    build_model(source, tmp_path / "tiny-fp16", target="cuda")
    monkeypatch.setattr(reference, "_LARGEST_TWIN", 1000)
    assert "too large" in str(reference.record_for_cuda(tmp_path / "tiny-fp16", source))
    assert reference.load(tmp_path / "tiny-fp16") is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_runtime_that_cannot_be_trusted_on_the_cpu_builds_without_an_answer(
    device: Literal["cpu", "cuda"],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The extra cuda12 brings such a one. Its environment is not told to install a second runtime."""
    source, out = TinyLlama().write(tmp_path / "tiny.gguf"), tmp_path / "out"
    monkeypatch.setattr(onnxruntime, "__version__", "1.26.0")
    cli.build(source, out, device=device)
    said = capsys.readouterr().out
    assert "gets no reference.json: ONNX Runtime 1.26.0" in said
    assert "in a new environment" in said
    assert f"{out} is ready" in said
    assert not (out / reference.FILE).exists()


def test_a_folder_whose_answer_cannot_be_had_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the same command can be given again; cut short or failed, there is nothing to remove."""
    source, out = TinyLlama().write(tmp_path / "tiny.gguf"), tmp_path / "out"

    def fail(engine: object, prompt: list[int]) -> list[int]:
        assert not out.exists()
        raise LivebatchError("the model cannot run")

    with monkeypatch.context() as patch:
        patch.setattr(reference, "answer", fail)
        with pytest.raises(SystemExit, match="1"):
            cli.build(source, out)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    cli.build(source, out)
    assert reference.load(out) is not None


def test_a_near_tie_may_go_either_way() -> None:
    stored = Reference(prompt=[1], tokens=[5, 6, 7], gaps=[2.0, 0.1, 2.0])
    assert stored.disagreement([5, 6, 7]) is None
    assert stored.disagreement([5, 9, 9]) is None, "the second token led by 0.1"
    assert "[8, 6, 7]" in str(stored.disagreement([8, 6, 7])), "the first led by 2"
    assert stored.disagreement([5, 6]) is not None
    assert Reference([1], [5, 6], []).disagreement([5, 9]) is not None, "no leads: exactly, or wrong"
