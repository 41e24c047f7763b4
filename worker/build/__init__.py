"""Model folders out of GGUF files: an ONNX graph with its weights, a tokenizer and a genai_config.json.

The order to read: source and gguf_source (what is built of), weights and attention (how parts enter the
graph), graph and cuda_graph (the decoder), tokenizer, config; onnx_writer puts it on disk. Nothing here runs
a model.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from producer.errors import UsageError

if TYPE_CHECKING:
    from worker.build.source import Source

Precision = Literal["fp32", "q8", "fp16"]
Target = Literal["cpu", "cuda"]
PRECISIONS: dict[Target, tuple[Precision, ...]] = {"cpu": ("fp32", "q8"), "cuda": ("fp16",)}


def build_model(
    source: Path,
    out: Path,
    precision: Precision | None = None,
    target: Target = "cpu",
    *,
    bounds: bool = True,
    finish: Callable[[Path], None] | None = None,
) -> None:
    """Builds ``out`` from the GGUF file ``source``; ``out`` appears complete or not at all.

    ``precision`` None is the first of PRECISIONS. ``bounds`` False leaves attention_metadata out of a CUDA
    graph, for ONNX Runtime before 1.29. ``finish`` is given the folder before it has its name; should
    it fail, there is no ``out``. Raises UsageError when ``out`` exists, when the file cannot be read, or when
    its model or the combination asked for is not supported.
    """
    precision = precision or PRECISIONS[target][0]
    if precision not in PRECISIONS[target]:
        raise UsageError(f"no {precision} on {target}: choose {' or '.join(PRECISIONS[target])}.")
    if out.exists():
        raise UsageError(f"{out} exists already. Remove it or choose another folder.")
    staging = out.parent / f".{out.name}.building"
    try:
        shutil.rmtree(staging, ignore_errors=True)  # what a killed build left
        staging.mkdir(parents=True)
        _write_folder(source, staging, precision, bounds)
        if finish is not None:
            finish(staging)
        staging.rename(out)
    except OSError as error:
        raise UsageError(
            f"cannot write {out}: {error.strerror or error}. Check the path and free space."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_folder(path: Path, folder: Path, precision: Precision, bounds: bool) -> None:
    from worker.build.gguf_source import GgufSource

    source = GgufSource(path)
    if precision == "fp16":
        write_cuda_model(source, folder, bounds=bounds)
    else:
        _write_cpu_model(source, folder, precision)
    source.refuse_unused()


def _write_cpu_model(source: Source, folder: Path, precision: Precision) -> None:
    from worker.build.attention import PoolAttention
    from worker.build.config import write_config
    from worker.build.graph import Decoder
    from worker.build.onnx_writer import OnnxWriter
    from worker.build.tokenizer import write_tokenizer
    from worker.build.weights import FloatWeights, Q8Weights, Weights

    write_tokenizer(source, folder)
    write_config(source, folder)
    with OnnxWriter(folder) as writer:
        kind = FloatWeights if precision == "fp32" else Q8Weights
        weights: Weights = kind(writer, source)
        Decoder(writer, source, weights, PoolAttention(writer, source.architecture)).write()
        writer.save()


def write_cuda_model(source: Source, folder: Path, *, bounds: bool = True) -> None:
    """Fills ``folder`` with a float16 model for CUDA out of any source. Raises UsageError."""
    import numpy as np

    from worker.build import config
    from worker.build.cuda_graph import CudaDecoder, PagedAttention
    from worker.build.onnx_writer import OnnxWriter
    from worker.build.tokenizer import write_tokenizer
    from worker.build.weights import FloatWeights

    sizes = source.architecture
    write_tokenizer(source, folder)
    config.write_config(source, folder, config.cuda(sizes.num_layers, bounds=bounds))
    with OnnxWriter(folder) as writer:
        weights = FloatWeights(writer, source, np.float16)
        CudaDecoder(writer, source, weights, PagedAttention(writer, sizes, bounds=bounds)).write()
        writer.save()
