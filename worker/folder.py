"""ModelFolder: what the worker reads from a folder in onnxruntime-genai's layout, checked at once.

Sizes and names come from genai_config.json and from the graph's own inputs. Must not run the model nor read
its weights. Whatever this worker could not serve is refused by name, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from producer.errors import UsageError
from worker.genai_config import CONFIG_FILE, GenaiConfig
from worker.graph_file import GraphFile, Port
from worker.own_files import REBUILD, file_within

Kind = Literal["cpu-paged", "cuda-paged"]

_PAST = ("past_key_names", "past_value_names")
_PRESENT = ("present_key_names", "present_value_names")
_DEFAULT_NAMES = {
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
}
_I32, _I64 = frozenset({"INT32"}), frozenset({"INT64"})
_STEP_DTYPES: dict[Kind, dict[str, frozenset[str]]] = {
    "cpu-paged": {
        "input_ids": _I64,
        "position_ids": _I64,
        "slot_mapping": _I64,
        "block_table": _I32,
        "logits_indices": _I64,
    },
    "cuda-paged": {
        "input_ids": _I64,
        "cumulative_sequence_lengths": _I32,
        "past_sequence_lengths": _I32,
        "block_table": _I32,
        "attention_metadata": _I32,
        "logits_indices": _I32 | _I64,
    },
}
_OPTIONAL: dict[Kind, frozenset[str]] = {
    "cpu-paged": frozenset(),
    "cuda-paged": frozenset({"attention_metadata", "logits_indices"}),
}
_CACHE_DTYPES: dict[Kind, frozenset[str]] = {
    "cpu-paged": frozenset({"FLOAT"}),
    "cuda-paged": frozenset({"FLOAT16", "BFLOAT16"}),  # all that PagedAttention takes without scales
}
_LOGITS_DTYPES = {kind: dtypes | {"FLOAT"} for kind, dtypes in _CACHE_DTYPES.items()}
_MAX_BATCH = 256  # rows of one PagedAttention call
_NUM_BOUNDS = 3  # attention_metadata: most new tokens of a row, longest context, least longest context
_REASONS = {  # patterns of input names
    "attention_mask": "the graph keeps one dense cache per batch; rows cannot join and leave. "
    "Build a paged one with `worker build`",
    "block_table_windowed": "sliding-window caches are not supported",
    "inputs_embeds": "image and audio models are not supported",
    r".*_scale": "quantised caches are not supported",
    r"past\.\d+\.(conv|recurrent)|state_update.*": "layers with a state of another kind are not supported",
}
_UNSUPPORTED_SECTIONS = ("encoder", "vision", "speech", "embedding", "mtp")
_UNSUPPORTED_DECODER = ("sliding_window", "pipeline")
_SWITCH = re.compile(r"-?\d+(\.\d+)?|true|false", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model folder as read; see ``load``."""

    path: Path
    name: str  # what a row's ``model`` may say: the folder's name,
    aliases: tuple[str, ...]  # or the same without the precision at its end
    kind: Kind
    graph: GraphFile
    names: Mapping[str, str]  # config's word for an input or output: its name in the graph, %d the layer
    vocab_size: int
    context_length: int  # most tokens of a row, prompt and output together
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int  # slots per cache block
    session_config: Mapping[str, str]  # entries the graph wants in its ONNX Runtime session's options
    eos_ids: tuple[int, ...]
    search: Mapping[str, Any]  # the model's own sampling defaults, under genai's names

    @classmethod
    def load(cls, path: Path) -> ModelFolder:
        """Reads and checks the folder. Raises UsageError naming the file and key at fault, and what to do."""
        _check_is_one(path)
        config = GenaiConfig.read(file_within(path, CONFIG_FILE, "the model's config"))
        _refuse_unsupported(config)
        file = file_within(path, config.text("model.decoder.filename"), "model.decoder.filename")
        graph = GraphFile.read(file, path)
        names = _names(config)
        name = path.resolve().name
        folder = cls(
            path=path,
            name=name,
            aliases=_aliases(name),
            kind=_kind(graph, names),
            graph=graph,
            names=names,
            vocab_size=config.size("model.vocab_size"),
            context_length=config.size("model.context_length"),
            num_layers=config.size("model.decoder.num_hidden_layers"),
            num_kv_heads=config.size("model.decoder.num_key_value_heads"),
            head_size=config.size("model.decoder.head_size"),
            block_size=_block_size(graph, names, config),
            eos_ids=config.ids("model.eos_token_id"),
            search=config.search(),
            session_config=_session_config(config),
        )
        _check_ports(folder)
        return folder

    @property
    def step_inputs(self) -> Mapping[str, str]:
        """Config's words for the step's inputs that this graph takes, each with its ONNX type ("INT32")."""
        named = {word: self.names[word] for word in _STEP_DTYPES[self.kind]}
        inputs = self.graph.inputs
        return {word: inputs[name].dtype for word, name in named.items() if name in inputs}

    @property
    def is_pruned(self) -> bool:
        """Whether the graph gives logits for chosen tokens only; else every token of a run has its row."""
        return "logits_indices" in self.step_inputs

    @property
    def has_attention_metadata(self) -> bool:
        """Whether runs are told their bounds in CPU memory; without, attention reads them off the device."""
        return "attention_metadata" in self.step_inputs

    @property
    def kv_dtype(self) -> str:
        """ONNX type of the cache: FLOAT on the CPU, FLOAT16 or BFLOAT16 on CUDA."""
        return self.graph.inputs[self.layer_names("past_key_names")[0]].dtype

    @property
    def logits_dtype(self) -> str:
        """ONNX type of the logits: FLOAT, FLOAT16 or BFLOAT16."""
        return self.graph.outputs[self.names["logits"]].dtype

    @property
    def max_batch(self) -> int | None:
        """Most rows of one run; None where the graph sets no bound."""
        return _MAX_BATCH if self.kind == "cuda-paged" else None

    def layer_names(self, word: str) -> list[str]:
        """Graph names of a per-layer input or output, such as "past_key_names". [num_layers]"""
        return [self.names[word].replace("%d", str(layer)) for layer in range(self.num_layers)]


def _check_is_one(path: Path) -> None:
    """A folder, and not one of model folders."""
    if not path.is_dir():
        raise UsageError(f"{path}: no such model folder. Make one with `make model` or `worker build`.")
    inside = sorted(config.parent for config in path.glob(f"*/{CONFIG_FILE}"))
    if inside and not (path / CONFIG_FILE).exists():
        raise UsageError(f"{path} holds model folders and is none itself: name one, such as {inside[0]}.")


def _refuse_unsupported(config: GenaiConfig) -> None:
    for key in ("search.num_beams", "search.batch_size"):
        if config.get(key) not in (None, 1):
            raise config.wrong(key, "1 or left out: this worker does its own batching and no beam search")
    unsupported = [f"model.{name}" for name in _UNSUPPORTED_SECTIONS]
    unsupported += [f"model.decoder.{name}" for name in _UNSUPPORTED_DECODER]
    for key in unsupported:
        if config.get(key):
            raise config.wrong(key, "left out: this worker serves plain text decoders with one kind of layer")
    layer_types = config.get("model.decoder.layer_types") or []
    if not isinstance(layer_types, list) or layer_types != ["full_attention"] * len(layer_types):
        raise config.wrong("model.decoder.layer_types", "full_attention throughout, the only kind served")
    for group in config.items("model.decoder.state_groups"):
        if group.get("kind") != "paged_kv":
            raise config.wrong("model.decoder.state_groups", "of kind paged_kv alone, the only state served")


def _session_config(config: GenaiConfig) -> dict[str, str]:
    """Entries such as "ep.cuda.fpa_intb_gemm": as in genai, what is a dotted name in session_options.

    Numbers and switches only: ONNX Runtime also has entries that name files to read or write.
    """
    key = "model.decoder.session_options"
    entries = {name: _entry(value) for name, value in config.section(key).items() if "." in name}
    if odd := [name for name, value in entries.items() if not _SWITCH.fullmatch(value)]:
        raise UsageError(
            f"{config.path}: {key} sets {odd[0]!r} to what is neither a number nor true or false."
        )
    return entries


def _entry(value: Any) -> str:
    """A JSON value as ONNX Runtime takes it: text, and a switch is 1 or 0."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _names(config: GenaiConfig) -> dict[str, str]:
    """Config's words for inputs and outputs: the graph's names for them, given or genai's defaults."""
    words = {word for dtypes in _STEP_DTYPES.values() for word in dtypes}
    names = {word: word for word in words | {"logits"}} | _DEFAULT_NAMES
    for section in ("inputs", "outputs"):
        given = config.section(f"model.decoder.{section}")
        names |= {word: str(name) for word, name in given.items() if word in names}
    return names


def _kind(graph: GraphFile, names: Mapping[str, str]) -> Kind:
    """Which contract the graph's inputs fulfil. UsageError naming the first input that fits none."""
    past = "|".join(re.escape(names[word]).replace("%d", r"\d+") for word in _PAST)
    step_inputs = {name for name in graph.inputs if not re.fullmatch(past, name)}
    for kind, words in _STEP_DTYPES.items():
        allowed = {names[word] for word in words}
        if allowed - {names[word] for word in _OPTIONAL[kind]} <= step_inputs <= allowed:
            _refuse_control_flow(graph)
            return kind
    raise UsageError(f"{graph.path}: {_misfit(step_inputs, names)}.")


def _refuse_control_flow(graph: GraphFile) -> None:
    """LongRoPE is written as an If on the width of the step's block table, hence on a row's neighbours."""
    if "If" in graph.operators:
        raise UsageError(
            f"{graph.path}: the graph has a branch (If): LongRoPE, which changes with the longest row of a "
            "batch, is not supported."
        )


def _misfit(step_inputs: set[str], names: Mapping[str, str]) -> str:
    for name in sorted(step_inputs - set(names.values())):
        reasons = (reason for pattern, reason in _REASONS.items() if re.fullmatch(pattern, name))
        reason = next(reasons, "this worker does not know what to feed it")
        return f"input '{name}' is not supported: {reason}"
    wanted = " or ".join(", ".join(names[word] for word in words) for words in _STEP_DTYPES.values())
    return f"its inputs ({', '.join(sorted(step_inputs))}) are no paged decoder's: that takes {wanted}"


def _block_size(graph: GraphFile, names: Mapping[str, str], config: GenaiConfig) -> int:
    """A block size built into the graph, else the one in the config."""
    first = graph.inputs.get(names["past_key_names"].replace("%d", "0"))
    if first is not None and len(first.shape) == 4 and first.shape[1] is not None:
        return first.shape[1]
    return config.size("engine.dynamic_batching.block_size")


def _aliases(name: str) -> tuple[str, ...]:
    bare = re.sub(r"[-_.](fp32|fp16|bf16|q8|int8|int4|q4)$", "", name)
    return () if bare == name else (bare,)


def _check_ports(folder: ModelFolder) -> None:
    """The graph has every layer's cache in and out, of the config's shape, and logits of its vocabulary."""
    inputs, outputs = folder.graph.inputs, folder.graph.outputs
    cache = (None, folder.block_size, folder.num_kv_heads, folder.head_size)
    for words, ports, side in ((_PAST, inputs, "input"), (_PRESENT, outputs, "output")):
        for word in words:
            for name in folder.layer_names(word):
                _check_port(folder, f"{side} '{name}'", ports.get(name), _CACHE_DTYPES[folder.kind], cache)
    logits = folder.names["logits"]
    rows: tuple[int | None, ...] = (None, folder.vocab_size)
    _check_port(folder, f"output '{logits}'", outputs.get(logits), _LOGITS_DTYPES[folder.kind], rows)
    for word, dtypes in _STEP_DTYPES[folder.kind].items():
        name = folder.names[word]
        if name in inputs:
            port = inputs[name]
            shape = (_NUM_BOUNDS,) if word == "attention_metadata" else port.shape
            _check_port(folder, f"input '{name}'", port, dtypes, shape)


def _check_port(
    folder: ModelFolder, what: str, port: Port | None, dtypes: Set[str], shape: tuple[int | None, ...]
) -> None:
    """None in either shape matches anything."""
    path = folder.graph.path
    if port is None:
        raise UsageError(f"{path} has no {what}, which {CONFIG_FILE} asks for. {REBUILD}")
    matches = len(port.shape) == len(shape) and all(
        have is None or want is None or have == want for have, want in zip(port.shape, shape, strict=True)
    )
    if not matches:
        raise UsageError(f"{path}: {what} has shape {port.shape} where {CONFIG_FILE} says {shape}. {REBUILD}")
    if port.dtype not in dtypes:
        wanted = " or ".join(sorted(dtypes))
        raise UsageError(f"{path}: {what} is {port.dtype}; a {folder.kind} graph has {wanted}.")
