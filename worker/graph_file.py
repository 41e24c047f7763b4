"""What an ONNX file says of itself without being run: its inputs, its outputs and the data files it needs.

Reads the graph only, never the weights. Must not know what a model folder's config says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx

from producer.errors import UsageError

REBUILD = "Build the folder again with `worker build`, or copy it again."


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
            graph = onnx.load(path, load_external_data=False).graph
            ends = _data_ends(graph)
        except Exception as error:  # protobuf raises its own, undocumented, kinds
            raise UsageError(f"{path} is not a readable ONNX file ({error}). {REBUILD}") from error
        if not graph.input or not graph.output:
            raise UsageError(f"{path} holds no ONNX graph. {REBUILD}")
        for name, end in ends.items():
            _check_data(file_within(folder, name, f"{path.name}'s data file"), end)
        operators = frozenset(node.op_type for node in graph.node)
        return cls(path, _ports(graph.input), _ports(graph.output), sum(ends.values()), operators)


def file_within(folder: Path, name: str, what: str) -> Path:
    """``folder / name``, made sure to be a file that lies inside ``folder`` even after links are followed."""
    path = folder / name
    try:
        inside, there = path.resolve().is_relative_to(folder.resolve()), path.is_file()
    except (OSError, ValueError) as error:  # no name that a file can have
        raise UsageError(f"{folder}: {what} {name!r} is no file name ({error}).") from error
    if not inside:
        raise UsageError(
            f"{what} '{name}' lies outside {folder}: a model folder may name only its own files."
        )
    if not there:
        raise UsageError(f"{path} is missing ({what}). {REBUILD}")
    return path


def _ports(infos: list[onnx.ValueInfoProto]) -> dict[str, Port]:
    ports = {}
    for info in infos:
        tensor = info.type.tensor_type
        sizes = (dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim)
        ports[info.name] = Port(onnx.TensorProto.DataType.Name(tensor.elem_type), tuple(sizes))
    return ports


def _data_ends(graph: onnx.GraphProto) -> dict[str, int]:
    """For each data file the graph names: how many bytes it must have at least."""
    ends: dict[str, int] = {}
    for tensor in _tensors(graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {item.key: item.value for item in tensor.external_data}
            end = int(entry.get("offset", 0)) + int(entry.get("length", 0))
            ends[entry["location"]] = max(end, ends.get(entry["location"], 0))
    return ends


def _tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Every constant of the graph: initializers and attributes, in nested graphs too."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for inner in [attribute.g, *attribute.graphs]:
                yield from _tensors(inner)


def _check_data(path: Path, end: int) -> None:
    size = path.stat().st_size
    if size < end:
        raise UsageError(
            f"{path} has {size:,} bytes where the graph needs {end:,}: it is cut short. {REBUILD}"
        )
