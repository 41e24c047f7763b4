"""genai_config.json, in onnxruntime-genai's layout, for a graph of ours.

Must not know how the graph computes; the names come from the modules that draw it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from worker.build import attention, cuda_graph
from worker.build.attention import PAST_KEYS, PAST_VALUES, PRESENT_KEYS, PRESENT_VALUES
from worker.build.onnx_writer import GRAPH_FILE
from worker.build.source import Source

_NEUTRAL_SEARCH = {"do_sample": True, "num_beams": 1, "batch_size": 1, "repetition_penalty": 1.0}
_SAMPLING_KEYS = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}  # ours: GGUF's
# A kernel for few rows is tried beside cuBLAS, once per matrix shape and number of rows, and the faster kept.
# It sums in another order, so two processes may differ in last bits: a deterministic run sets this to "0".
_TUNE_MATRICES = {"ep.cuda.enable_gemm_auto_tune": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """What a kind of graph adds to the config. Inputs go by the graph's own names."""

    step_inputs: tuple[str, ...]
    block_size: int
    decoder: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    dynamic_batching: dict[str, Any] = field(default_factory=dict)


CPU = Contract(step_inputs=attention.STEP_INPUTS, block_size=attention.BLOCK_SIZE)


def cuda(num_layers: int, *, bounds: bool = True) -> Contract:
    """A paged CUDA graph; what genai's own engine asks for beyond our needs is there too."""
    left_out = () if bounds else ("attention_metadata",)
    options = {"log_id": "livebatch", "provider_options": [{"cuda": {"enable_cuda_graph": "0"}}]}
    return Contract(
        step_inputs=tuple(word for word in cuda_graph.STEP_INPUTS if word not in left_out),
        block_size=cuda_graph.PAGE_SIZE,
        decoder={
            "session_options": options | _TUNE_MATRICES,
            "state_groups": [{"kind": "paged_kv", "layer_ids": list(range(num_layers))}],
        },
        search={"past_present_share_buffer": True},
        dynamic_batching={"max_batch_size": 256, "gpu_utilization_factor": 0.6},
    )


def write_config(source: Source, folder: Path, contract: Contract = CPU) -> None:
    text = json.dumps(genai_config(source, contract), indent=2)
    (folder / "genai_config.json").write_text(text + "\n", encoding="utf-8")


def genai_config(source: Source, contract: Contract = CPU) -> dict[str, Any]:
    """The whole document. Token ids the source does not name are left out."""
    sizes = source.architecture
    model: dict[str, Any] = {
        "type": "llama",
        "vocab_size": sizes.vocab_size,
        "context_length": sizes.context_length,
        "eos_token_id": _eos_ids(source),
        "decoder": _decoder(source, contract),
    }
    for name, key in (("bos", "bos"), ("pad", "padding")):
        token_id = source.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            model[f"{name}_token_id"] = token_id
    batching = {"block_size": contract.block_size} | contract.dynamic_batching
    search = _search(source) | contract.search
    return {"model": model, "search": search, "engine": {"dynamic_batching": batching}}


def _decoder(source: Source, contract: Contract) -> dict[str, Any]:
    sizes = source.architecture
    decoder = {
        "filename": GRAPH_FILE,
        "hidden_size": sizes.hidden_size,
        "head_size": sizes.head_size,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "num_hidden_layers": sizes.num_layers,
        "inputs": {
            **{name: name for name in contract.step_inputs},
            "past_key_names": PAST_KEYS.format("%d"),
            "past_value_names": PAST_VALUES.format("%d"),
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": PRESENT_KEYS.format("%d"),
            "present_value_names": PRESENT_VALUES.format("%d"),
        },
    }
    return decoder | contract.decoder


def _eos_ids(source: Source) -> list[int]:
    """Every id that ends a text: end of sequence, and end of turn or message where the model has its own."""
    keys = ("eos", "eot", "eom")
    ids = [source.get(f"tokenizer.ggml.{key}_token_id") for key in keys]
    return list(dict.fromkeys(int(token_id) for token_id in ids if token_id is not None))


def _search(source: Source) -> dict[str, Any]:
    """The model's own sampling advice where the source carries it, else values that change nothing."""
    advice = {name: source.get(f"general.sampling.{key}") for name, key in _SAMPLING_KEYS.items()}
    given = {name: value for name, value in advice.items() if value is not None}
    return _NEUTRAL_SEARCH | given | {"max_length": source.architecture.context_length}
