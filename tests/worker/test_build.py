"""Building a model folder: the graph computes the textbook, and what it could not compute is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from model_batches import Part, make_batch
from tiny_gguf import TEMPLATE, TOKENS, TinyLlama
from tokenizers import Tokenizer

from producer.errors import UsageError
from worker.build import Precision, build_model
from worker.folder import ModelFolder
from worker.model import OrtModel

IDS = [4, 30, 7, 7, 12, 41, 0, 25, 9, 18, 33, 2, 5, 6, 28, 14, 3, 19, 21, 40]


def built(tiny: TinyLlama, tmp_path: Path, precision: Precision = "fp32", **metadata: Any) -> OrtModel:
    source = tiny.write(tmp_path / "tiny.gguf", metadata)
    build_model(source, tmp_path / "model", precision)
    return OrtModel(ModelFolder.load(tmp_path / "model"), num_blocks=16)


def last_logits(model: OrtModel, ids: list[int]) -> np.ndarray[Any, Any]:
    return model.run(make_batch([Part(ids, 0, [3, 7, 1])], model.block_size))[0].copy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1]
)
def test_fp32_graph_computes_the_textbook(tied: bool, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    tiny = TinyLlama(tied=tied, kind=kind)
    found = last_logits(built(tiny, tmp_path), IDS)
    np.testing.assert_allclose(found, tiny.logits(IDS)[-1], rtol=0, atol=2e-4)


def test_decoding_token_by_token_computes_the_textbook(tmp_path: Path) -> None:
    tiny = TinyLlama()
    model, right = built(tiny, tmp_path), tiny.logits(IDS)
    for position, token in enumerate(IDS):
        found = model.run(make_batch([Part([token], position, [5, 2])], model.block_size))[0]
        np.testing.assert_allclose(found, right[position], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    "kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q4_1]
)
def test_q8_graph_is_near(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    tiny = TinyLlama(kind=kind)
    found, right = last_logits(built(tiny, tmp_path, "q8"), IDS), tiny.logits(IDS)[-1]
    assert np.abs(found - right).max() < 0.05 * np.abs(right).max()


def test_linear_rope_scaling(tmp_path: Path) -> None:
    tiny = TinyLlama()
    angles = tiny.base ** (-np.arange(0, tiny.head_size, 2) / tiny.head_size) / 4
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    found = last_logits(built(tiny, tmp_path, **scaling), IDS)
    np.testing.assert_allclose(found, tiny.logits(IDS, angles)[-1], rtol=0, atol=2e-4)


def test_llama_3_rope_factors(tmp_path: Path) -> None:
    tiny = TinyLlama()
    factors = np.linspace(1, 8, tiny.head_size // 2, dtype=np.float32)
    angles = tiny.base ** (-np.arange(0, tiny.head_size, 2) / tiny.head_size) / factors
    source = tiny.write(tmp_path / "tiny.gguf", extra={"rope_freqs.weight": factors})
    build_model(source, tmp_path / "model")
    found = last_logits(OrtModel(ModelFolder.load(tmp_path / "model"), num_blocks=16), IDS)
    np.testing.assert_allclose(found, tiny.logits(IDS, angles)[-1], rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "qwen2"}, "qwen2"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.attention.sliding_window": 512}, "sliding_window"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count"),
        ({"llama.attention.value_length": 32}, "value_length"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.block_count": 3}, "blk.2."),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "deepseek-llm"),
        ({"tokenizer.ggml.model": "llama"}, "'llama'"),
    ],
)
def test_refuses_by_name(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    source = TinyLlama().write(tmp_path / "tiny.gguf", metadata)
    with pytest.raises(UsageError, match=named) as caught:
        build_model(source, tmp_path / "model")
    assert "tiny.gguf" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_refuses_weights_it_would_leave_out(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.bias": np.zeros(64, np.float32)}
    with pytest.raises(UsageError, match=r"blk\.0\.attn_q\.bias"):
        build_model(TinyLlama().write(tmp_path / "tiny.gguf", extra=extra), tmp_path / "model")


def test_refuses_rows_that_are_no_multiple_of_a_block_for_q8(tmp_path: Path) -> None:
    tiny = TinyLlama(hidden=48, heads=4, kv_heads=4)
    with pytest.raises(UsageError, match="use fp32"):
        build_model(tiny.write(tmp_path / "tiny.gguf"), tmp_path / "model", "q8")


def test_refuses_a_storage_type_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = TinyLlama(kind=GGMLQuantizationType.Q8_0).write(tmp_path / "tiny.gguf")
    monkeypatch.delitem(quants._type_traits, GGMLQuantizationType.Q8_0)
    with pytest.raises(UsageError, match=r"tensor 'token_embd\.weight' is stored as Q8_0"):
        build_model(source, tmp_path / "model")


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.gguf: no such file"):
        build_model(tmp_path / "none.gguf", tmp_path / "model")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(TinyLlama().write(tmp_path / "tiny.gguf").read_bytes()[:3000])
    with pytest.raises(UsageError, match=r"damaged\.gguf: not a readable GGUF"):
        build_model(damaged, tmp_path / "model")


def test_out_must_be_new_and_writable(tmp_path: Path) -> None:
    source = TinyLlama().write(tmp_path / "tiny.gguf")
    with pytest.raises(UsageError, match="exists already"):
        build_model(source, tmp_path)
    with pytest.raises(UsageError, match=r"cannot write .*tiny\.gguf/model"):
        build_model(source, source / "model")


HALF_WAY = """
import sys
from pathlib import Path
from worker.build import build_model
from worker.build.graph import Decoder

def wait_for_the_end(decoder):
    print("half way", flush=True)
    sys.stdin.read()

Decoder.write = wait_for_the_end
build_model(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_killed_build_leaves_no_model_and_the_next_one_succeeds(tmp_path: Path) -> None:
    source, out = TinyLlama().write(tmp_path / "tiny.gguf"), tmp_path / "model"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HALF_WAY, source, out], text=True, **pipes) as build:
        assert build.stdout is not None
        assert build.stdout.readline() == "half way\n"
        build.kill()
    assert not out.exists()
    build_model(source, out)
    files = {"genai_config.json", "model.onnx", "model.onnx.data", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in out.iterdir()} == files
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.gguf", "model"}


def test_config_and_tokenizer_hold_the_metadata(tmp_path: Path) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 0, "general.sampling.top_k": 20, "general.sampling.temp": 0.5}
    build_model(TinyLlama().write(tmp_path / "tiny.gguf", metadata), tmp_path / "tiny-llama-fp32")
    folder = ModelFolder.load(tmp_path / "tiny-llama-fp32")
    assert (folder.name, folder.aliases) == ("tiny-llama-fp32", ("tiny-llama",))
    assert (folder.vocab_size, folder.context_length, folder.block_size) == (len(TOKENS), 96, 16)
    assert folder.eos_ids == (2, 0)
    assert (folder.search["top_k"], folder.search["temperature"]) == (20, 0.5)
    config = json.loads((folder.path / "tokenizer_config.json").read_text())
    assert (config["chat_template"], config["bos_token"], config["eos_token"]) == (
        TEMPLATE, "<|im_start|>", "<|im_end|>",
    )  # fmt: skip


def test_tokenizer_splits_digits_and_keeps_special_tokens_whole(tmp_path: Path) -> None:
    build_model(TinyLlama().write(tmp_path / "tiny.gguf"), tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    tokens = tokenizer.encode("he12 a<|im_end|><file>").tokens
    assert tokens == ["he", "1", "2", "Ġa", "<|im_end|>", "<file>"]  # "12" is a token, but no digits may join
    assert tokenizer.decode(tokenizer.encode("he12 a<|im_end|><file>").ids) == "he12 a<file>"


def test_tokenizer_puts_bos_first_when_the_model_wants_it(tmp_path: Path) -> None:
    source = TinyLlama().write(tmp_path / "tiny.gguf", {"tokenizer.ggml.add_bos_token": True})
    build_model(source, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert tokenizer.encode("he").tokens == ["<|im_start|>", "he"]
