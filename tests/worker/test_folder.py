"""ModelFolder: what is read, and that every way a folder can be wrong is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from tiny_graph import CONTEXT, VOCAB, write_tiny_folder

from producer.errors import UsageError
from worker.folder import ModelFolder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_folder(tmp_path / "tiny-q8")


def edit_config(folder: Path, key: str, value: Any) -> None:
    """Sets a dotted key of genai_config.json; None removes it."""
    path = folder / "genai_config.json"
    config = section = json.loads(path.read_text())
    *parents, last = key.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    section.pop(last, None)
    if value is not None:
        section[last] = value
    path.write_text(json.dumps(config))


def edit_graph(folder: Path, edit: Callable[[onnx.GraphProto], None]) -> None:
    path = folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    edit(model.graph)
    path.write_bytes(model.SerializeToString())


def add_input(graph: onnx.GraphProto, name: str, dtype: int = TensorProto.INT64) -> None:
    graph.input.append(helper.make_tensor_value_info(name, dtype, ["x"]))


def test_reads_sizes_and_names(folder: Path) -> None:
    edit_config(folder, "model.eos_token_id", [7, 3, 7])
    edit_config(folder, "search", {"temperature": 0.2, "num_beams": 1})
    loaded = ModelFolder.load(folder)
    assert (loaded.name, loaded.aliases, loaded.kind) == ("tiny-q8", ("tiny",), "cpu-paged")
    assert (loaded.vocab_size, loaded.context_length, loaded.block_size) == (VOCAB, CONTEXT, 4)
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.head_size) == (2, 1, 2)
    assert loaded.eos_ids == (7, 3)
    assert loaded.search["temperature"] == 0.2
    assert loaded.layer_names("present_value_names") == ["present.0.value", "present.1.value"]


def test_takes_the_graphs_own_names_from_the_config(folder: Path) -> None:
    def rename(graph: onnx.GraphProto) -> None:
        for info in [*graph.input, *graph.output]:
            if info.name == "position_ids":
                info.name = "places"

    edit_graph(folder, rename)
    edit_config(folder, "model.decoder.inputs", {"position_ids": "places"})
    assert ModelFolder.load(folder).names["position_ids"] == "places"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("model.vocab_size", None, r"model\.vocab_size is missing"),
        ("model.context_length", "8192", r"model\.context_length is '8192'; it must be a whole number"),
        ("model.context_length", 2**31, r"model\.context_length is 2147483648; .* from 1 to 2147483647"),
        ("model.decoder.head_size", 0, r"model\.decoder\.head_size is 0"),
        ("model.decoder.head_size", 3, r"past_key_values\.0\.key' has shape"),
        ("model.vocab_size", 62, r"logits' has shape"),
        ("model.decoder.num_hidden_layers", 3, r"past_key_values\.2\.key"),
        ("model.eos_token_id", [], r"model\.eos_token_id"),
        ("model.eos_token_id", VOCAB, r"token ids below 61"),
        ("model.decoder.filename", None, r"model\.decoder\.filename is missing"),
        ("model.decoder.filename", "absent.onnx", r"absent\.onnx is missing"),
        ("search.num_beams", 4, r"search\.num_beams is 4; it must be 1"),
        ("search.batch_size", 2, r"search\.batch_size is 2"),
        ("search", [1], r"search is \[1\]; it must be an object"),
        ("search.top_p", "high", r"search\.top_p is 'high'; it must be a number"),
        ("model.decoder.inputs", "input_ids", r"model\.decoder\.inputs is 'input_ids'"),
        ("model.decoder.filename", "x\0", r"is no file name"),
        ("model.decoder.filename", "x" * 5000, r"is no file name"),
        ("model.decoder.state_groups", {"kv": 1}, r"state_groups is .* a list of objects"),
        ("model.vision", {"filename": "vision.onnx"}, r"model\.vision"),
        ("model.decoder.sliding_window", {"window_size": 512}, r"model\.decoder\.sliding_window"),
        ("model.decoder.layer_types", ["full_attention", "linear_attention"], r"layer_types"),
        ("model.decoder.layer_types", 2, r"layer_types is 2"),
        ("model.decoder.state_groups", {"ssm": {"kind": "fixed_recurrent"}}, r"state_groups is .*paged_kv"),
        ("model.decoder.state_groups", [{"kind": "fixed_conv"}], r"state_groups is .*paged_kv"),
    ],
)
def test_names_the_key_that_is_wrong(key: str, value: Any, said: str, folder: Path) -> None:
    edit_config(folder, key, value)
    with pytest.raises(UsageError, match=said) as caught:
        ModelFolder.load(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("attention_mask", "rows cannot join and leave"),
        ("block_table_windowed", "sliding-window"),
        ("past_conv.0", "does not know what to feed it"),
    ],
)
def test_refuses_inputs_it_could_not_feed(name: str, reason: str, folder: Path) -> None:
    edit_graph(folder, lambda graph: add_input(graph, name))
    with pytest.raises(UsageError, match=f"input '{name}' is not supported: .*{reason}"):
        ModelFolder.load(folder)


def test_refuses_a_graph_that_lacks_an_input(folder: Path) -> None:
    def drop(graph: onnx.GraphProto) -> None:
        del graph.input[[info.name for info in graph.input].index("slot_mapping")]

    edit_graph(folder, drop)
    with pytest.raises(UsageError, match="no paged decoder's"):
        ModelFolder.load(folder)


@pytest.mark.parametrize(
    ("name", "found"), [("block_table", "INT64"), ("past_key_values.1.value", "FLOAT16")]
)
def test_refuses_other_types(name: str, found: str, folder: Path) -> None:
    def change(graph: onnx.GraphProto) -> None:
        port = next(info for info in graph.input if info.name == name)
        port.type.tensor_type.elem_type = TensorProto.DataType.Value(found)

    edit_graph(folder, change)
    with pytest.raises(UsageError, match=f"input '{name}' is {found}; a cpu-paged graph has"):
        ModelFolder.load(folder)


def test_missing_folder_and_missing_files(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"no such model folder.*worker build"):
        ModelFolder.load(folder / "none")
    for name in ("model.onnx.data", "model.onnx", "genai_config.json"):
        (folder / name).unlink()
        with pytest.raises(UsageError, match=f"{name} is missing"):
            ModelFolder.load(folder)


def test_a_folder_of_model_folders(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"is none itself: name one, such as .*/tiny-q8"):
        ModelFolder.load(folder.parent)


@pytest.mark.parametrize("damage", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_damaged_config(damage: bytes, folder: Path) -> None:
    (folder / "genai_config.json").write_bytes(damage)
    with pytest.raises(UsageError, match=r"genai_config\.json"):
        ModelFolder.load(folder)


@pytest.mark.parametrize("damage", [b"", b"not a graph", b"\x00" * 64])
def test_damaged_graph(damage: bytes, folder: Path) -> None:
    (folder / "model.onnx").write_bytes(damage)
    with pytest.raises(UsageError, match=r"model\.onnx"):
        ModelFolder.load(folder)


def test_data_cut_short(folder: Path) -> None:
    data = folder / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(UsageError, match=r"model\.onnx\.data has .* bytes where the graph needs .*cut short"):
        ModelFolder.load(folder)


@pytest.mark.parametrize("name", ["../other/model.onnx", "sub/../../other/model.onnx"])
def test_files_outside_the_folder_are_refused(name: str, folder: Path) -> None:
    shutil.copytree(folder, folder.parent / "other")
    (folder / "sub").mkdir()
    for named in (name, str(folder.parent / "other" / "model.onnx")):
        edit_config(folder, "model.decoder.filename", named)
        with pytest.raises(UsageError, match="lies outside"):
            ModelFolder.load(folder)


def test_links_out_of_the_folder_are_refused(folder: Path) -> None:
    for name in ("model.onnx.data", "model.onnx", "genai_config.json"):
        (folder / name).rename(folder.parent / name)
        (folder / name).symlink_to(folder.parent / name)
        with pytest.raises(UsageError, match=f"{name}' lies outside"):
            ModelFolder.load(folder)


def test_data_outside_the_folder_is_refused(folder: Path) -> None:
    def point_outside(graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = "../tiny-q8/../elsewhere.data"

    (folder.parent / "elsewhere.data").write_bytes((folder / "model.onnx.data").read_bytes())
    edit_graph(folder, point_outside)
    with pytest.raises(UsageError, match="lies outside"):
        ModelFolder.load(folder)


def outside(folder: Path) -> onnx.TensorProto:
    """A constant whose bytes are said to lie in a file beside the model folder."""
    (folder.parent / "elsewhere.data").write_bytes(bytes(64))
    tensor = onnx.TensorProto(name="x", data_type=TensorProto.FLOAT, dims=[4])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../elsewhere.data")
    return tensor


def hide_in_attribute(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["unused"], value=tensor))


def hide_in_branch(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    branch = helper.make_graph([], "branch", [], [], [tensor])
    model.graph.node.append(helper.make_node("Loop", [], ["unused"], body=branch))


def hide_in_function(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    body = [helper.make_node("Constant", [], ["y"], value=tensor)]
    model.functions.append(helper.make_function("own", "f", [], ["y"], body, []))


def hide_in_sparse(model: onnx.ModelProto, tensor: onnx.TensorProto) -> None:
    indices = helper.make_tensor("i", TensorProto.INT64, [0], [])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(tensor, indices, [4]))


@pytest.mark.parametrize("hide", [hide_in_attribute, hide_in_branch, hide_in_function, hide_in_sparse])
def test_data_outside_the_folder_is_found_wherever_a_model_keeps_constants(
    hide: Callable[[onnx.ModelProto, onnx.TensorProto], None], folder: Path
) -> None:
    path = folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    hide(model, outside(folder))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UsageError, match=r"elsewhere\.data' lies outside"):
        ModelFolder.load(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("session.model_external_initializers_file_folder_path", "/etc"),
        ("ep.context_file_path", "context.onnx"),
        ("ep.cuda.x", ["a"]),
        ("ep.cuda.x", None),
    ],
)
def test_session_entries_that_could_name_a_file_are_refused(name: str, value: Any, folder: Path) -> None:
    edit_config(folder, "model.decoder.session_options", {name: value, "log_id": "onnxruntime-genai"})
    with pytest.raises(UsageError, match=f"session_options sets '{name}' to what is neither a number nor"):
        ModelFolder.load(folder)
