"""Model folders of onnxruntime-genai's builder with a paged CUDA graph: what is read, what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from onnx import TensorProto, ValueInfoProto, helper
from tiny_graph import write_tiny_folder

from producer.errors import UsageError
from worker.compose import build_parts
from worker.cuda import check
from worker.folder import ModelFolder
from worker.settings import EngineSettings

F16, BF16, F32, I32, I64 = (
    TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64,
)  # fmt: skip
LAYERS, HEADS, HEAD_SIZE, VOCAB = 2, 3, 64, 100
CACHE = ("num_blocks", "block_size", HEADS, HEAD_SIZE)
STEP = {
    "input_ids": (I64, ["num_tokens"]),
    "block_table": (I32, ["batch_size", "max_num_blocks"]),
    "cumulative_sequence_lengths": (I32, ["batch_size + 1"]),
    "past_sequence_lengths": (I32, ["batch_size"]),
    "attention_metadata": (I32, [3]),
    "logits_indices": (I32, ["num_logits"]),
}
Ports = Mapping[str, tuple[int, Sequence[int | str]]]


def write_folder(
    path: Path,
    *,
    without: Sequence[str] = (),
    step: Ports | None = None,
    kv: int = F16,
    logits: int = F16,
    operators: Sequence[str] = ("PagedAttention",),
    vocab_size: int = VOCAB,
    **decoder: Any,
) -> Path:
    """A folder as the builder writes it, with nodes that nobody runs. ``step`` adds or overrides inputs."""
    path.mkdir()
    ports = {name: port for name, port in (STEP | dict(step or {})).items() if name not in without}
    caches = [f"{layer}.{kind}" for layer in range(LAYERS) for kind in ("key", "value")]
    inputs = _infos(ports) + _infos({f"past_key_values.{cache}": (kv, CACHE) for cache in caches})
    outputs = _infos({"logits": (logits, ["num_logits", vocab_size])})
    outputs += _infos({f"present.{cache}": (kv, CACHE) for cache in caches})
    nodes = [helper.make_node(operator, ["input_ids"], [f"made.{operator}"]) for operator in operators]
    model = helper.make_model(helper.make_graph(nodes, "main", inputs, outputs))
    (path / "model.onnx").write_bytes(model.SerializeToString())
    (path / "genai_config.json").write_text(json.dumps(genai_config(ports, vocab_size, decoder)))
    return path


def _infos(ports: Ports) -> list[ValueInfoProto]:
    return [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in ports.items()]


def genai_config(inputs: Ports, vocab_size: int, decoder: Mapping[str, Any]) -> dict[str, Any]:
    """The shape of what builder 0.18 writes for a CUDA folder with use_paged_attention."""
    past = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    present = {"present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
    sizes = {
        "filename": "model.onnx",
        "head_size": HEAD_SIZE,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": [{"cuda": {}}]},
        "state_groups": [{"kind": "paged_kv", "layer_ids": list(range(LAYERS))}],
        "inputs": {name: name for name in inputs} | past,
        "outputs": {"logits": "logits"} | present,
    }
    dynamic = {"block_size": 256, "max_batch_size": 100, "gpu_utilization_factor": 0.6}
    return {
        "model": {
            "type": "llama",
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "vocab_size": vocab_size,
            "context_length": 8192,
            "decoder": sizes | decoder,
        },
        "search": {"early_stopping": True, "num_beams": 1, "past_present_share_buffer": True},
        "engine": {"dynamic_batching": dynamic},
    }  # fmt: skip


def test_reads_a_pruned_graph_with_metadata(tmp_path: Path) -> None:
    folder = ModelFolder.load(write_folder(tmp_path / "llama-fp16"))
    assert (folder.kind, folder.block_size, folder.max_batch) == ("cuda-paged", 256, 256)
    assert (folder.is_pruned, folder.has_attention_metadata) == (True, True)
    assert (folder.kv_dtype, folder.logits_dtype) == ("FLOAT16", "FLOAT16")
    assert folder.step_inputs["logits_indices"] == "INT32"
    assert set(folder.step_inputs) == set(STEP)


def test_every_input_left_out_is_known(tmp_path: Path) -> None:
    folder = ModelFolder.load(
        write_folder(tmp_path / "model", without=["attention_metadata", "logits_indices"])
    )
    assert (folder.kind, folder.is_pruned, folder.has_attention_metadata) == ("cuda-paged", False, False)
    assert set(folder.step_inputs) == set(STEP) - {"attention_metadata", "logits_indices"}


def test_types_are_the_graphs_own(tmp_path: Path) -> None:
    step = {"logits_indices": (I64, ["num_logits"])}
    folder = ModelFolder.load(write_folder(tmp_path / "model", step=step, kv=BF16, logits=F32))
    assert folder.step_inputs["logits_indices"] == "INT64"
    assert (folder.kv_dtype, folder.logits_dtype) == ("BFLOAT16", "FLOAT")


@pytest.mark.parametrize(
    ("value", "text"), [("1", "1"), ("true", "true"), (1, "1"), (-0.5, "-0.5"), (True, "1"), (False, "0")]
)
def test_session_entries_are_kept_as_text(value: Any, text: str, tmp_path: Path) -> None:
    options = {"log_id": "x", "ep.cuda.fpa_intb_gemm": value, "provider_options": [{"cuda": {}}]}
    folder = ModelFolder.load(write_folder(tmp_path / "model", session_options=options))
    assert folder.session_config == {"ep.cuda.fpa_intb_gemm": text}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": {"block_table_windowed": (I32, ["b", "w"])}}, "block_table_windowed.*sliding-window"),
        ({"step": {"past_key_values.0.key_scale": (F32, ["n"])}}, r"0\.key_scale.*quantised caches"),
        ({"step": {"past.1.recurrent": (F32, ["n"])}}, r"past\.1\.recurrent.*state of another kind"),
        ({"step": {"state_update.active": (I32, ["n"])}}, r"state_update\.active.*another kind"),
        ({"step": {"attention_mask": (I64, ["b", "t"])}}, "attention_mask.*dense cache"),
        ({"step": {"attention_metadata": (I32, [2])}}, r"attention_metadata' has shape \(2,\)"),
        ({"step": {"logits_indices": (F32, ["n"])}}, "logits_indices' is FLOAT.*INT32 or INT64"),
        ({"step": {"past_sequence_lengths": (I64, ["n"])}}, "past_sequence_lengths' is INT64"),
        ({"without": ["block_table"]}, "no paged decoder's"),
        ({"kv": TensorProto.INT8}, r"past_key_values\.0\.key' is INT8.*BFLOAT16 or FLOAT16"),
        ({"kv": F32}, r"past_key_values\.0\.key' is FLOAT"),
        ({"logits": TensorProto.DOUBLE}, "logits' is DOUBLE"),
        ({"operators": ["PagedAttention", "If"]}, "LongRoPE"),
        ({"state_groups": [{"kind": "paged_kv"}, {"kind": "fixed_conv"}]}, "state_groups"),
        ({"sliding_window": {"window_size": 128}}, "sliding_window"),
    ],
)
def test_refuses_by_name_what_it_cannot_serve(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        ModelFolder.load(write_folder(tmp_path / "model", **changes))


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it is looked for before the folder is."""
    cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda number: SimpleNamespace(use=lambda: None)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)


@pytest.mark.parametrize(
    ("vocab_size", "max_batch", "said"),
    [
        (262_208, 256, "a vocabulary of 262,208 tokens; on a GPU it can have at most 262,144"),
        (VOCAB, 257, "--max-batch 257: this graph's attention takes 256 rows"),
    ],
)
def test_what_no_gpu_can_run_is_refused_by_its_name(
    a_gpu: None, tmp_path: Path, vocab_size: int, max_batch: int, said: str
) -> None:
    """Before anything is made of its size, and never as a live batch too large."""
    path = write_folder(tmp_path / "model", vocab_size=vocab_size)
    with pytest.raises(UsageError, match=said) as raised:
        build_parts(EngineSettings(model=str(path), device="cuda:0", max_batch=max_batch))
    assert "more than this model takes" not in str(raised.value)


def test_a_cpus_folder_is_refused_on_a_gpu(a_gpu: None, tmp_path: Path) -> None:
    path = write_tiny_folder(tmp_path / "tiny")
    with pytest.raises(UsageError, match="cpu-paged model and the device is a GPU: build one"):
        build_parts(EngineSettings(model=str(path), device="cuda:0"))


def test_a_vocabulary_may_be_as_large_as_the_kernels_take(tmp_path: Path) -> None:
    check(ModelFolder.load(write_folder(tmp_path / "model", vocab_size=262_144)), 256)
