"""Building a CUDA folder: every node as it should be, weights as the source's, and the textbook's result."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from cuda_reader import CudaGraph
from gguf import GGMLQuantizationType
from tiny_gguf import TOKENS, TinyLlama

from producer.errors import UsageError
from worker.build import build_model
from worker.folder import ModelFolder

PAGES = 4


def built(tiny: TinyLlama, tmp_path: Path, *, bounds: bool = True) -> Path:
    folder = tmp_path / "tiny-fp16"
    build_model(tiny.write(tmp_path / "tiny.gguf"), folder, target="cuda", bounds=bounds)
    return folder


def caches(folder: ModelFolder) -> dict[str, np.ndarray]:
    """Pages full of NaN: whatever was not written must not be read."""
    shape = (PAGES, folder.block_size, folder.num_kv_heads, folder.head_size)
    names = [name for word in ("past_key_names", "past_value_names") for name in folder.layer_names(word)]
    return {name: np.full(shape, np.nan) for name in names}


def step(rows: list[tuple[list[int], int, list[int]]], wanted: list[int]) -> dict[str, np.ndarray]:
    """Feeds of a run: rows of (ids, tokens before, blocks)."""
    return {
        "input_ids": np.array([token for ids, _, _ in rows for token in ids]),
        "cumulative_sequence_lengths": np.cumsum([0, *(len(ids) for ids, _, _ in rows)]),
        "past_sequence_lengths": np.array([past for _, past, _ in rows]),
        "block_table": np.array([blocks for _, _, blocks in rows]),
        "attention_metadata": np.array([0, 0, 0]),
        "logits_indices": np.array(wanted),
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [GGMLQuantizationType.F32, GGMLQuantizationType.Q4_1])
def test_the_graph_says_the_textbook(tied: bool, kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """Two prompts at once, one cut into chunks, then a token each; chosen rows only. Off by fp16 weights."""
    tiny = TinyLlama(tied=tied, kind=kind)
    path = built(tiny, tmp_path)
    graph, pages = CudaGraph(path), caches(ModelFolder.load(path))
    one, two = [4, 30, 7, 7, 12, 41, 0, 25], [9, 18, 33, 2, 5]
    first = graph.run(pages | step([(one[:3], 0, [2]), (two[:4], 0, [1])], [6]))
    second = graph.run(pages | step([(one[3:], 3, [2]), (two[4:], 4, [1])], [4, 5]))
    right = [tiny.logits(two)[3], tiny.logits(one)[-1], tiny.logits(two)[-1]]
    found = np.concatenate([first["logits"], second["logits"]])
    np.testing.assert_allclose(found, right, rtol=0, atol=0.05)
    assert np.abs(right).max() > 5


def test_ten_nodes_a_layer(tmp_path: Path) -> None:
    graph = CudaGraph(built(TinyLlama(layers=3), tmp_path)).graph
    assert Counter(node.op_type for node in graph.node) == {
        "Gather": 3, "SimplifiedLayerNormalization": 1, "Gemm": 1,
        "MatMul": 15, "PagedAttention": 3, "SkipSimplifiedLayerNormalization": 6, "QuickGelu": 3, "Mul": 3,
    }  # fmt: skip


def test_attention_has_the_operators_inputs_in_its_order(tmp_path: Path) -> None:
    graph = CudaGraph(built(TinyLlama(), tmp_path)).graph
    node = next(node for node in graph.node if node.op_type == "PagedAttention")
    assert list(node.input) == [
        "layer0.qkv", "", "", "past_key_values.0.key", "past_key_values.0.value",
        "cumulative_sequence_lengths", "past_sequence_lengths", "block_table", "cos", "sin",
        "", "", "", "", "", "", "attention_metadata",
    ]  # fmt: skip
    assert list(node.output) == ["layer0.attended", "present.0.key", "present.0.value"]
    attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    assert attributes == {
        "num_heads": 4, "kv_num_heads": 2, "scale": 0.25, "do_rotary": 1, "rotary_interleaved": 0,
    }  # fmt: skip


def test_weights_are_the_sources_to_float16(tmp_path: Path) -> None:
    tiny = TinyLlama(tied=False)
    weights = CudaGraph(built(tiny, tmp_path)).weights
    w = tiny.weights
    packed = np.concatenate([w[f"blk.1.attn_{part}.weight"] for part in "qkv"])
    for name, right in {
        "layer1.qkv.weight": packed.T,
        "layer0.gate.weight": w["blk.0.ffn_gate.weight"].T,
        "layer0.down.weight": w["blk.0.ffn_down.weight"].T,
        "output.weight": w["output.weight"],
        "token_embd.weight": w["token_embd.weight"],
        "output_norm.weight": w["output_norm.weight"],
    }.items():
        assert weights[name].dtype == np.float16
        np.testing.assert_array_equal(weights[name], right.astype(np.float16), err_msg=name)


def test_a_tied_head_is_stored_once(tmp_path: Path) -> None:
    graph = CudaGraph(built(TinyLlama(), tmp_path))
    head = next(node for node in graph.graph.node if node.op_type == "Gemm")
    assert head.input[1] == "token_embd.weight"
    assert sum(array.shape == (len(TOKENS), 64) for array in graph.weights.values()) == 1


def test_the_folder_is_read_back(tmp_path: Path) -> None:
    folder = ModelFolder.load(built(TinyLlama(), tmp_path))
    assert (folder.kind, folder.block_size, folder.aliases) == ("cuda-paged", 256, ("tiny",))
    assert (folder.is_pruned, folder.has_attention_metadata) == (True, True)
    assert (folder.kv_dtype, folder.logits_dtype) == ("FLOAT16", "FLOAT16")
    assert folder.step_inputs["logits_indices"] == "INT32"
    assert folder.session_config == {"ep.cuda.enable_gemm_auto_tune": "1"}


def test_genais_engine_finds_what_it_asks_for(tmp_path: Path) -> None:
    """The keys of builder 0.18 for a paged CUDA model, with its names."""
    config = json.loads((built(TinyLlama(), tmp_path) / "genai_config.json").read_text())
    assert config["engine"] == {
        "dynamic_batching": {"block_size": 256, "max_batch_size": 256, "gpu_utilization_factor": 0.6}
    }
    decoder = config["model"]["decoder"]
    assert decoder["state_groups"] == [{"kind": "paged_kv", "layer_ids": [0, 1]}]
    assert decoder["session_options"]["provider_options"] == [{"cuda": {"enable_cuda_graph": "0"}}]
    assert all(decoder["inputs"][name] == name for name in step([], []))
    assert decoder["inputs"]["past_key_names"] == "past_key_values.%d.key"
    assert decoder["outputs"]["present_value_names"] == "present.%d.value"


def test_a_graph_for_older_runtimes_knows_no_bounds(tmp_path: Path) -> None:
    path = built(TinyLlama(), tmp_path, bounds=False)
    folder = ModelFolder.load(path)
    assert (folder.kind, folder.has_attention_metadata) == ("cuda-paged", False)
    node = next(node for node in CudaGraph(path).graph.node if node.op_type == "PagedAttention")
    assert len(node.input) == 10
    assert "attention_metadata" not in (path / "genai_config.json").read_text()


@pytest.mark.parametrize(("precision", "target"), [("fp16", "cpu"), ("q8", "cuda"), ("fp32", "cuda")])
def test_no_precision_on_the_wrong_device(precision: str, target: str, tmp_path: Path) -> None:
    source = TinyLlama().write(tmp_path / "tiny.gguf")
    with pytest.raises(UsageError, match=f"no {precision} on {target}: choose"):
        build_model(source, tmp_path / "model", precision, target)  # type: ignore[arg-type]
