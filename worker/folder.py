"""ModelFolder: what the worker reads from a folder in onnxruntime-genai's layout, checked at once.

Sizes and names come from genai_config.json and from the graph's own inputs. Must not run the model nor read
its weights. Whatever this worker could not serve is refused by name, with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from producer.errors import UsageError
from worker.graph_file import REBUILD, GraphFile, Port, file_within

CONFIG_FILE = "genai_config.json"
Kind = Literal["cpu-paged", "cuda-paged"]

_PAST = ("past_key_names", "past_value_names")
_PRESENT = ("present_key_names", "present_value_names")
_DEFAULT_NAMES = {
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
}
_REQUIRED: dict[Kind, frozenset[str]] = {
    "cpu-paged": frozenset({"input_ids", "position_ids", "slot_mapping", "block_table", "logits_indices"}),
    "cuda-paged": frozenset(
        {"input_ids", "cumulative_sequence_lengths", "past_sequence_lengths", "block_table"}
    ),
}
_OPTIONAL: dict[Kind, frozenset[str]] = {
    "cpu-paged": frozenset(),
    "cuda-paged": frozenset({"attention_metadata", "logits_indices"}),
}
_REASONS = {
    "attention_mask": "the graph keeps one dense cache per batch; rows cannot join and leave. "
    "Build a paged one with `worker build`",
    "block_table_windowed": "sliding-window caches are not supported",
    "inputs_embeds": "image and audio models are not supported",
    "rope_cache_switch": "LongRoPE, which changes with the longest row of a batch, is not supported",
}
_UNSUPPORTED_SECTIONS = ("encoder", "vision", "speech", "embedding", "mtp")
_UNSUPPORTED_DECODER = ("sliding_window", "pipeline")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model folder as read; see ``load``."""

    path: Path
    name: str  # what a row's ``model`` may say: the folder's name,
    aliases: tuple[str, ...]  # or the same without the precision at its end
    kind: Kind
    graph: GraphFile
    names: Mapping[
        str, str
    ]  # config's word for an input or output -> its name in the graph, %d for the layer
    vocab_size: int
    context_length: int  # most tokens of a row, prompt and output together
    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int  # slots per cache block
    eos_ids: tuple[int, ...]
    bos_id: int | None
    search: Mapping[str, Any]  # the model's own sampling defaults, under genai's names

    @classmethod
    def load(cls, path: Path) -> ModelFolder:
        """Reads and checks the folder. Raises UsageError naming the file and key at fault, and what to do."""
        if not path.is_dir():
            raise UsageError(f"{path}: no such model folder. Make one with `make model` or `worker build`.")
        config = Config.read(file_within(path, CONFIG_FILE, "the model's config"))
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
            bos_id=next(iter(config.ids("model.bos_token_id", missing_ok=True)), None),
            search=config.search(),
        )
        _check_ports(folder)
        return folder

    def layer_names(self, word: str) -> list[str]:
        """Graph names of a per-layer input or output, such as "past_key_names". [num_layers]"""
        return [self.names[word].replace("%d", str(layer)) for layer in range(self.num_layers)]


class Config:
    """genai_config.json; asks for a value by its dotted key and complains by it."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self._path, self._values = path, values

    @classmethod
    def read(cls, path: Path) -> Config:
        try:
            values = json.loads(path.read_bytes())
        except (ValueError, OSError) as error:
            raise UsageError(f"{path} cannot be read as JSON ({error}). {REBUILD}") from error
        if not isinstance(values, dict):
            raise UsageError(f"{path} is not a JSON object. {REBUILD}")
        return cls(path, values)

    def get(self, key: str) -> Any:
        """The value, or None where the config does not have it."""
        value: Any = self._values
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def wrong(self, key: str, wanted: str) -> UsageError:
        value = self.get(key)
        found = "is missing" if value is None else f"is {value!r}"
        return UsageError(f"{self._path}: {key} {found}; it must be {wanted}. {REBUILD}")

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text")
        return value

    def size(self, key: str) -> int:
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "a whole number above 0")
        return value

    def ids(self, key: str, missing_ok: bool = False) -> tuple[int, ...]:
        """One token id or a list of them, as a tuple without repetitions."""
        value = self.get(key)
        if value is None and missing_ok:
            return ()
        ids = value if isinstance(value, list) else [value]
        vocab_size = self.size("model.vocab_size")
        if not ids or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise self.wrong(key, f"one or several token ids below {vocab_size}")
        return tuple(dict.fromkeys(ids))

    def search(self) -> Mapping[str, Any]:
        """The ``search`` section, numbers and flags only."""
        section = self.get("search") or {}
        if not isinstance(section, dict) or not all(isinstance(v, int | float) for v in section.values()):
            raise self.wrong("search", "an object of numbers and flags")
        return section


def _refuse_unsupported(config: Config) -> None:
    for key in ("search.num_beams", "search.batch_size"):
        if config.get(key) not in (None, 1):
            raise config.wrong(key, "1 or left out: this worker does its own batching and no beam search")
    unsupported = [f"model.{name}" for name in _UNSUPPORTED_SECTIONS]
    unsupported += [f"model.decoder.{name}" for name in _UNSUPPORTED_DECODER]
    for key in unsupported:
        if config.get(key):
            raise config.wrong(key, "left out: this worker serves plain text decoders with one kind of layer")
    if set(config.get("model.decoder.layer_types") or ()) - {"full_attention"}:
        raise config.wrong("model.decoder.layer_types", "full_attention throughout, the only kind served")
    for name, group in (config.get("model.decoder.state_groups") or {}).items():
        if group.get("kind") != "paged_kv":
            raise config.wrong(f"model.decoder.state_groups.{name}.kind", "paged_kv, the only state served")


def _names(config: Config) -> dict[str, str]:
    """Config's words for inputs and outputs: the graph's names for them, given or genai's defaults."""
    words = {word for kind in _REQUIRED for word in _REQUIRED[kind] | _OPTIONAL[kind]}
    names = {word: word for word in words | {"logits"}} | _DEFAULT_NAMES
    for section in ("inputs", "outputs"):
        given = config.get(f"model.decoder.{section}") or {}
        names |= {word: str(name) for word, name in given.items() if word in names}
    return names


def _kind(graph: GraphFile, names: Mapping[str, str]) -> Kind:
    """Which contract the graph's inputs fulfil. UsageError naming the first input that fits none."""
    past = "|".join(re.escape(names[word]).replace("%d", r"\d+") for word in _PAST)
    step_inputs = {name for name in graph.inputs if not re.fullmatch(past, name)}
    known: set[str] = set()
    for kind, words in _REQUIRED.items():
        required = {names[word] for word in words}
        allowed = required | {names[word] for word in _OPTIONAL[kind]}
        if required <= step_inputs <= allowed:
            return kind
        known |= allowed
    raise UsageError(f"{graph.path}: {_misfit(step_inputs, known)}.")


def _misfit(step_inputs: set[str], known: set[str]) -> str:
    for name in sorted(step_inputs - known):
        reason = _REASONS.get(name, "this worker does not know what to feed it")
        return f"input '{name}' is not supported: {reason}"
    lists = " or ".join(", ".join(sorted(words)) for words in _REQUIRED.values())
    return f"its inputs ({', '.join(sorted(step_inputs))}) are no paged decoder's: that takes {lists}"


def _block_size(graph: GraphFile, names: Mapping[str, str], config: Config) -> int:
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
    cache = (None, folder.block_size, folder.num_kv_heads, folder.head_size)
    for words, ports, side in (
        (_PAST, folder.graph.inputs, "input"),
        (_PRESENT, folder.graph.outputs, "output"),
    ):
        for word in words:
            for name in folder.layer_names(word):
                _check_port(folder.graph.path, ports, side, name, cache)
    logits = (None, folder.vocab_size)
    _check_port(folder.graph.path, folder.graph.outputs, "output", folder.names["logits"], logits)


def _check_port(
    path: Path, ports: Mapping[str, Port], side: str, name: str, wanted: tuple[int | None, ...]
) -> None:
    """None in either shape matches anything."""
    port = ports.get(name)
    if port is None:
        raise UsageError(f"{path} has no {side} '{name}', which {CONFIG_FILE} asks for. {REBUILD}")
    matches = len(port.shape) == len(wanted) and all(
        have is None or want is None or have == want for have, want in zip(port.shape, wanted, strict=True)
    )
    if not matches:
        raise UsageError(
            f"{path}: {side} '{name}' has shape {port.shape} where {CONFIG_FILE} says {wanted}. {REBUILD}"
        )
