"""The CUDA twin's kernels, compiled: their text, and how a row is spread over the device. Knows no batch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal, NamedTuple

import cupy as cp

from kernels.packed import MAX_BIASES, MAX_ENDERS

HEADERS = ("device", "numbers", "logits", "block", "edit", "pick", "bins", "rare", "wide")
TYPES = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"}
LogitsType = Literal["float32", "float16", "bfloat16"]


class Shape(NamedTuple):
    """How a row is spread over the device."""

    cluster: int  # blocks a row
    threads: int  # threads a block
    blocks: int  # blocks a multiprocessor must hold: bounds the registers
    unroll: int  # loads a thread keeps in flight


# Measured on an H200: few rows want many blocks each, many rows few. Clusters of 4 would fit 32 rows on its
# 132 multiprocessors, were these not grouped by 18, 16 and 8, which no cluster straddles: 30 fit, 39 of 3.
FEW_ROWS = Shape(cluster=8, threads=512, blocks=1, unroll=4)
SOME_ROWS = Shape(cluster=3, threads=640, blocks=1, unroll=4)
MANY_ROWS = Shape(cluster=2, threads=512, blocks=1, unroll=6)
WITHOUT_CLUSTERS = Shape(cluster=1, threads=1024, blocks=1, unroll=4)  # before compute capability 9
MOST_FEW, MOST_SOME = 8, 32


def has_clusters() -> bool:
    return int(cp.cuda.Device().compute_capability) >= 90


def shape_for(rows: int) -> Shape:
    """The shape of a step of so many rows."""
    if not has_clusters():
        return WITHOUT_CLUSTERS
    return FEW_ROWS if rows <= MOST_FEW else SOME_ROWS if rows <= MOST_SOME else MANY_ROWS


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, compiled for one shape."""

    shape: Shape
    function: Any
    shared_bytes: int

    def launch(self, rows: int, arguments: tuple[Any, ...]) -> None:
        self.function(
            (self.shape.cluster, rows), (self.shape.threads,), arguments, shared_mem=self.shared_bytes
        )


def source(file: str) -> str:
    """A .cu file and all headers as one text: CuPy's cache of compiled code knows no included files."""
    folder = resources.files("kernels")
    texts = [folder.joinpath(f"{name}.cuh").read_text() for name in HEADERS]
    lines = "\n".join([*texts, folder.joinpath(f"{file}.cu").read_text()]).splitlines()
    return "\n".join(line for line in lines if not line.startswith(("#include", "#pragma once")))


def module(file: str, logits: LogitsType, shape: Shape) -> Any:
    numbers = {
        "CLUSTER": shape.cluster,
        "THREADS": shape.threads,
        "BLOCKS": shape.blocks,
        "SCAN_UNROLL": shape.unroll,
        "MAX_ENDERS": MAX_ENDERS,
        "MAX_BIASES": MAX_BIASES,
        "LOGITS": TYPES[logits],
    }
    options = ("-std=c++17", *(f"-D{name}={value}" for name, value in numbers.items()))
    return cp.RawModule(code=source(file), options=options)


def kernel(file: str, name: str, logits: LogitsType, shape: Shape) -> Kernel:
    code = module(file, logits, shape)
    function = code.get_function(name)
    shared_bytes = int(cp.ndarray((1,), cp.int32, code.get_global("shared_bytes"))[0])
    function.max_dynamic_shared_size_bytes = shared_bytes
    return Kernel(shape, function, shared_bytes)
