"""The benchmarks' random model: like a built folder, the same bytes each time, logits a sampler can use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_reader import CudaGraph

from benchmarks.random_model import SHAPES, RandomSource
from worker.build import write_cuda_model
from worker.folder import ModelFolder
from worker.tokenizer import Tokenizer


def written(path: Path, seed: int = 0) -> ModelFolder:
    path.mkdir()
    write_cuda_model(RandomSource("tiny", seed), path)
    return ModelFolder.load(path)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_whole(name: str) -> None:
    shape = SHAPES[name].architecture
    assert shape.head_size in (32, 64, 128)
    assert shape.head_size * shape.num_heads == shape.hidden_size
    assert len(shape.inverse_frequencies) == shape.head_size // 2


def test_the_seed_decides_every_byte(tmp_path: Path) -> None:
    data = [
        (written(tmp_path / name, seed).path / "model.onnx.data").read_bytes()
        for name, seed in (("one", 0), ("same", 0), ("other", 1))
    ]
    assert data[0] == data[1] != data[2]


def test_logits_are_sane_and_text_has_ids(tmp_path: Path) -> None:
    folder = written(tmp_path / "model")
    ids = Tokenizer.load(folder.path).encode("Hi there, all of you")
    assert len(ids) == 20
    shape = (2, folder.block_size, folder.num_kv_heads, folder.head_size)
    names = folder.layer_names("past_key_names") + folder.layer_names("past_value_names")
    feeds = {
        "input_ids": np.array(ids),
        "cumulative_sequence_lengths": np.array([0, len(ids)]),
        "past_sequence_lengths": np.array([0]),
        "block_table": np.array([[1]]),
        "attention_metadata": np.zeros(3),
        "logits_indices": np.arange(len(ids)),
    }
    logits = CudaGraph(folder.path).run(feeds | {name: np.zeros(shape) for name in names})["logits"]
    assert 0.5 < logits.std() < 3
    assert len(set(logits.argmax(-1))) > 10, "different texts, different tokens"
