"""Writes an ONNX model: nodes and small constants in model.onnx, weights in model.onnx.data as they come.

Weights go to disk one by one, so a build never holds more than the tensor at hand (and not the whole model).
Must not know what the graph computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

GRAPH_FILE = "model.onnx"
DATA_FILE = "model.onnx.data"
_OPSET = 24  # first with Attention's nonpad_kv_seqlen
_IR_VERSION = 11
_INLINE_BYTES = 1024  # constants up to this size stay in model.onnx, where shape inference sees them
_PAGE = 4096  # ONNX Runtime maps the data file into memory: start each tensor on a page


class OnnxWriter:
    """A graph under construction in ``folder``. Use as a context manager; ``save`` writes model.onnx."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, TensorProto] = {}
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._data: BinaryIO = (folder / DATA_FILE).open("wb")

    def __enter__(self) -> OnnxWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.close()

    def input(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, dtype: int, shape: Sequence[int | str]) -> str:
        self._outputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def node(self, op: str, inputs: Sequence[str], *outputs: str, domain: str = "", **attributes: Any) -> str:
        """Adds a node, gives its first output's name; ``""`` is an optional input or output left out."""
        made = helper.make_node(op, inputs, outputs, name=f"{outputs[0]}/{op}", domain=domain, **attributes)
        self._nodes.append(made)
        return outputs[0]

    def constant(self, name: str, array: NDArray[Any]) -> str:
        """Stores an initializer once; asking for the same name again returns it."""
        if name not in self._constants:
            array = np.ascontiguousarray(array)
            inline = array.nbytes <= _INLINE_BYTES
            self._constants[name] = (
                numpy_helper.from_array(array, name) if inline else self._append(name, array)
            )
        return name

    def view(self, name: str, of: str, shape: Sequence[int]) -> str:
        """A second initializer over the same bytes of the data file, in another shape."""
        tensor = TensorProto()
        tensor.CopyFrom(self._constants[of])
        tensor.name = name
        tensor.ClearField("dims")
        tensor.dims.extend(shape)
        self._constants[name] = tensor
        return name

    def save(self) -> None:
        graph = helper.make_graph(
            self._nodes, "decoder", self._inputs, self._outputs, list(self._constants.values())
        )
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(
            graph, opset_imports=opsets, ir_version=_IR_VERSION, producer_name="livebatch"
        )
        (self._folder / GRAPH_FILE).write_bytes(model.SerializeToString())

    def _append(self, name: str, array: NDArray[Any]) -> TensorProto:
        self._data.seek(-self._data.tell() % _PAGE, 1)
        tensor = TensorProto(
            name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape
        )
        tensor.data_location = TensorProto.EXTERNAL
        where = {"location": DATA_FILE, "offset": str(self._data.tell()), "length": str(array.nbytes)}
        for key, value in where.items():
            tensor.external_data.add(key=key, value=value)
        array.tofile(self._data)
        return tensor
