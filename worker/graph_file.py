"""What an ONNX file says of itself without being run: its inputs, its outputs and the data files it needs.

Reads the graph only, never the weights. Must not know what a model folder's config says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

from producer.errors import UsageError
from worker.own_files import REBUILD, file_within


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output: element type as ONNX names it ("FLOAT", "INT64"); shape, None where it varies."""

    dtype: str
    shape: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class GraphFile:
    """The contract of a graph on disk."""

    path: Path
    inputs: dict[str, Port]
    outputs: dict[str, Port]
    data_bytes: int  # weights kept outside the graph
    operators: frozenset[str]  # kinds of node, without those in branches and loops

    @classmethod
    def read(cls, path: Path, folder: Path) -> GraphFile:
        """UsageError when ``path`` is damaged or its data is missing, cut short or outside ``folder``."""
        try:
            model = onnx.load(path, load_external_data=False)
            graph, ends = model.graph, _data_ends(model)
        except Exception as error:  # protobuf raises its own, undocumented, kinds
            raise UsageError(f"{path} is not a readable ONNX file ({error}). {REBUILD}") from error
        if not graph.input or not graph.output:
            raise UsageError(f"{path} holds no ONNX graph. {REBUILD}")
        for name, end in ends.items():
            _check_data(file_within(folder, name, f"{path.name}'s data file"), end)
        operators = frozenset(node.op_type for node in graph.node)
        return cls(path, _ports(graph.input), _ports(graph.output), sum(ends.values()), operators)


def _ports(infos: list[onnx.ValueInfoProto]) -> dict[str, Port]:
    ports = {}
    for info in infos:
        tensor = info.type.tensor_type
        sizes = (dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim)
        ports[info.name] = Port(onnx.TensorProto.DataType.Name(tensor.elem_type), tuple(sizes))
    return ports


def _data_ends(model: onnx.ModelProto) -> dict[str, int]:
    """For each data file the model names: how many bytes it must have at least."""
    ends: dict[str, int] = {}
    bodies = [model.graph, *model.functions]
    for tensor in (tensor for body in bodies for tensor in _tensors(body)):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            end = int(entry.get("offset", 0)) + int(entry.get("length", 0))
            ends[entry["location"]] = max(end, ends.get(entry["location"], 0))
    return ends


def _tensors(body: onnx.GraphProto | onnx.FunctionProto) -> Iterator[onnx.TensorProto]:
    """Every constant of a graph or function: initializers and attributes, in nested graphs too."""
    if isinstance(body, onnx.GraphProto):
        yield from body.initializer
        yield from _parts(body.sparse_initializer)
    for node in body.node:
        for attribute in node.attribute:
            yield from [attribute.t, *attribute.tensors]
            yield from _parts([attribute.sparse_tensor, *attribute.sparse_tensors])
            for inner in [attribute.g, *attribute.graphs]:
                yield from _tensors(inner)


def _parts(sparse: Iterable[onnx.SparseTensorProto]) -> Iterator[onnx.TensorProto]:
    for tensor in sparse:
        yield from (tensor.values, tensor.indices)


def _check_data(path: Path, end: int) -> None:
    size = path.stat().st_size
    if size < end:
        raise UsageError(
            f"{path} has {size:,} bytes where the graph needs {end:,}: it is cut short. {REBUILD}"
        )
