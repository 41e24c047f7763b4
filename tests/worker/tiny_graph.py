"""A model folder that builds in milliseconds: a real ONNX graph with the CPU contract, and a hash for a
brain.

Every token's result is a hash of all cached cells of its row and their places, computed in whole numbers.
Layer 1 caches what layer 0 hashed, as in a real model, so a cell written wrongly stays wrong. One wrong
block, offset, length or position, one stale or missing cell, and the row's tokens are others.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from onnx import TensorProto

from worker.build.onnx_writer import GRAPH_FILE, OnnxWriter

VOCAB = 61
CONTEXT = 128
LAYERS = 2
KV_HEADS, HEAD_SIZE = 1, 2  # a cell holds the hash and, as a second number, the position
PRIME = 997  # hashes fit float32 exactly, and sums fit int64 by far


def write_tiny_folder(folder: Path, block_size: int = 4) -> Path:
    """Writes the folder (it must not exist) and returns it."""
    folder.mkdir(parents=True)
    (folder / "genai_config.json").write_text(json.dumps(tiny_config(block_size)))
    with OnnxWriter(folder) as writer:
        TinyGraph(writer, block_size).write()
        writer.save()
    return folder


def tiny_config(block_size: int) -> dict[str, object]:
    decoder = {
        "filename": GRAPH_FILE,
        "head_size": HEAD_SIZE,
        "num_key_value_heads": KV_HEADS,
        "num_hidden_layers": LAYERS,
    }
    model = {"vocab_size": VOCAB, "context_length": CONTEXT, "eos_token_id": 0, "decoder": decoder}
    return {"model": model, "search": {}, "engine": {"dynamic_batching": {"block_size": block_size}}}


class TinyGraph:
    """T tokens, W blocks a table, L = W * block_size slots a table."""

    def __init__(self, writer: OnnxWriter, block_size: int) -> None:
        self._writer, self._block_size = writer, block_size

    def write(self) -> None:
        writer = self._writer
        for name, shape in (
            ("input_ids", ["tokens"]),
            ("position_ids", ["tokens"]),
            ("slot_mapping", ["tokens", 2]),
        ):
            writer.input(name, TensorProto.INT64, shape)
        writer.input("block_table", TensorProto.INT32, ["tokens", "width"])
        writer.input("logits_indices", TensorProto.INT64, ["n"])
        writer.output("logits", TensorProto.FLOAT, ["n", VOCAB])
        self._constants()
        self._known()
        value = "input_ids"  # i64[T]
        for layer in range(LAYERS):
            value = self._layer(layer, value)
        writer.node("Gather", [value, "logits_indices"], "chosen", axis=0)
        writer.node("Mod", ["chosen", "vocab"], "next")
        writer.node("OneHot", ["next", "vocab", "off_on"], "logits", axis=-1)

    def _constants(self) -> None:
        weights = np.random.default_rng(0).integers(
            1, PRIME, size=(CONTEXT + 64, 2)
        )  # a pair for each position
        for name, array in (
            ("weights", weights),
            ("prime", np.array(PRIME)),
            ("vocab", np.array([VOCAB])),
            ("off_on", np.array([0, 100], np.float32)),
            ("zero", np.array(0)),
            ("one", np.array(1)),
            ("zero_float", np.array(0, np.float32)),
            ("axis_1", np.array([1])),
            ("axes_12", np.array([1, 2])),
            ("axes_cell", np.array([1, 2, 3])),
            ("cells", np.array([0, -1, HEAD_SIZE])),
            ("cell", np.array([-1, KV_HEADS, HEAD_SIZE])),
            ("block", np.array(self._block_size)),
        ):
            self._writer.constant(name, array)

    def _known(self) -> None:
        """Which slots of each table count: bool[T, L, 1]; and the weights of their positions: i64[L, 2]."""
        writer = self._writer
        writer.node("Shape", ["block_table"], "width", start=1)
        writer.node("Squeeze", ["width"], "width_scalar")
        writer.node("Mul", ["width_scalar", "block"], "slots")
        writer.node("Range", ["zero", "slots", "one"], "places")
        writer.node("Unsqueeze", ["position_ids", "axis_1"], "last")
        writer.node("LessOrEqual", ["places", "last"], "known_flat")
        writer.node("Unsqueeze", ["known_flat", writer.constant("axis_2", np.array([2]))], "known")
        writer.node("Gather", ["weights", "places"], "place_weights", axis=0)

    def _layer(self, layer: int, value: str) -> str:
        """i64[T] -> i64[T]: caches (value, position) and (position, value), then hashes the context."""
        p = f"layer{layer}."
        keys = self._cache(layer, "key", self._cell(p + "k", value, "position_ids"))
        values = self._cache(layer, "value", self._cell(p + "v", "position_ids", value))
        return self._hash(p, keys, values)

    def _cell(self, name: str, first: str, second: str) -> str:
        writer = self._writer
        halves = [
            writer.node("Unsqueeze", [part, "axis_1"], f"{name}.{i}")
            for i, part in enumerate((first, second))
        ]
        writer.node("Concat", halves, name + ".pair", axis=1)
        writer.node("Cast", [name + ".pair"], name + ".float", to=TensorProto.FLOAT)
        return writer.node("Reshape", [name + ".float", "cell"], name)

    def _cache(self, layer: int, kind: str, cell: str) -> str:
        """Writes the cells in place; every token's table as i64[T, L, 2], unknown slots 0."""
        writer = self._writer
        shape = ["blocks", self._block_size, KV_HEADS, HEAD_SIZE]
        past = writer.input(f"past_key_values.{layer}.{kind}", TensorProto.FLOAT, shape)
        present = writer.output(f"present.{layer}.{kind}", TensorProto.FLOAT, shape)
        writer.node("ScatterND", [past, "slot_mapping", cell], present)
        writer.node("Gather", [present, "block_table"], cell + ".blocks", axis=0)
        writer.node("Reshape", [cell + ".blocks", "cells"], cell + ".all")
        writer.node("Where", ["known", cell + ".all", "zero_float"], cell + ".known")
        return writer.node("Cast", [cell + ".known"], cell + ".whole", to=TensorProto.INT64)

    def _hash(self, p: str, keys: str, values: str) -> str:
        """sum over positions of (key + 31 * value) . weights, mod a prime; then squared, to mix layers."""
        writer = self._writer
        writer.node("Mul", [values, writer.constant("thirty_one", np.array(31))], p + "v31")
        writer.node("Add", [keys, p + "v31"], p + "both")
        writer.node("Mul", [p + "both", "place_weights"], p + "weighted")
        writer.node("ReduceSum", [p + "weighted", "axes_12"], p + "sum", keepdims=0)
        writer.node("Mod", [p + "sum", "prime"], p + "mod")
        writer.node("Mul", [p + "mod", p + "mod"], p + "square")
        return writer.node("Mod", [p + "square", "prime"], p + "out")
