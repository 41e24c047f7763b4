"""Model folders out of GGUF files: an ONNX graph with its weights, a tokenizer and a genai_config.json.

The order to read: gguf_source (what the file holds), weights and attention (how parts enter the graph),
graph (the decoder), tokenizer, config; onnx_writer puts it on disk. Nothing here runs a model.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

from producer.errors import UsageError

Precision = Literal["fp32", "q8"]


def build_model(source: Path, out: Path, precision: Precision = "fp32") -> None:
    """Builds ``out`` from the GGUF file ``source``; ``out`` appears complete or not at all.

    Raises UsageError when ``out`` exists, when the file cannot be read, or when its model is not supported.
    """
    if out.exists():
        raise UsageError(f"{out} exists already. Remove it or choose another folder.")
    staging = out.parent / f".{out.name}.building"
    try:
        shutil.rmtree(staging, ignore_errors=True)  # what a killed build left
        staging.mkdir(parents=True)
        _write_folder(source, staging, precision)
        staging.rename(out)
    except OSError as error:
        raise UsageError(
            f"cannot write {out}: {error.strerror or error}. Check the path and free space."
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_folder(path: Path, folder: Path, precision: Precision) -> None:
    from worker.build.attention import PoolAttention
    from worker.build.config import write_config
    from worker.build.gguf_source import GgufSource
    from worker.build.graph import Decoder
    from worker.build.onnx_writer import OnnxWriter
    from worker.build.tokenizer import write_tokenizer
    from worker.build.weights import FloatWeights, Q8Weights, Weights

    source = GgufSource(path)
    write_tokenizer(source, folder)
    write_config(source, folder)
    with OnnxWriter(folder) as writer:
        kind = FloatWeights if precision == "fp32" else Q8Weights
        weights: Weights = kind(writer, source)
        Decoder(writer, source, weights, PoolAttention(writer, source.architecture)).write()
        source.refuse_unused()
        writer.save()
