"""genai_config.json, in onnxruntime-genai's layout, for a graph of ours.

Must not know how the graph computes; the names come from the modules that draw it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from worker.build.attention import (
    BLOCK_SIZE,
    PAST_KEYS,
    PAST_VALUES,
    PRESENT_KEYS,
    PRESENT_VALUES,
)
from worker.build.gguf_source import GgufSource
from worker.build.onnx_writer import GRAPH_FILE

_NEUTRAL_SEARCH = {"do_sample": True, "num_beams": 1, "batch_size": 1, "repetition_penalty": 1.0}
_SAMPLING_KEYS = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}  # ours: GGUF's


def write_config(source: GgufSource, folder: Path) -> None:
    text = json.dumps(genai_config(source), indent=2)
    (folder / "genai_config.json").write_text(text + "\n", encoding="utf-8")


def genai_config(source: GgufSource) -> dict[str, Any]:
    """The whole document. Token ids the GGUF does not name are left out."""
    sizes = source.architecture
    model: dict[str, Any] = {
        "type": "llama",
        "vocab_size": sizes.vocab_size,
        "context_length": sizes.context_length,
        "eos_token_id": _eos_ids(source),
        "decoder": _decoder(source),
    }
    for name, key in (("bos", "bos"), ("pad", "padding")):
        token_id = source.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            model[f"{name}_token_id"] = token_id
    engine = {"dynamic_batching": {"block_size": BLOCK_SIZE}}
    return {"model": model, "search": _search(source), "engine": engine}


def _decoder(source: GgufSource) -> dict[str, Any]:
    sizes = source.architecture
    return {
        "filename": GRAPH_FILE,
        "hidden_size": sizes.hidden_size,
        "head_size": sizes.head_size,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "num_hidden_layers": sizes.num_layers,
        "inputs": {
            "input_ids": "input_ids",
            "position_ids": "position_ids",
            "slot_mapping": "slot_mapping",
            "block_table": "block_table",
            "logits_indices": "logits_indices",
            "past_key_names": PAST_KEYS.format("%d"),
            "past_value_names": PAST_VALUES.format("%d"),
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": PRESENT_KEYS.format("%d"),
            "present_value_names": PRESENT_VALUES.format("%d"),
        },
    }


def _eos_ids(source: GgufSource) -> list[int]:
    """Every id that ends a text: end of sequence, and end of turn or message where the model has its own."""
    keys = ("eos", "eot", "eom")
    ids = [source.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
    return list(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))


def _search(source: GgufSource) -> dict[str, Any]:
    """The model's own sampling advice where the GGUF carries it, else values that change nothing."""
    advice = {name: source.get(f"general.sampling.{key}") for name, key in _SAMPLING_KEYS.items()}
    given = {name: value for name, value in advice.items() if value is not None}
    return _NEUTRAL_SEARCH | given | {"max_length": source.architecture.context_length}
