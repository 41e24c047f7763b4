"""tokenizer.json and tokenizer_config.json out of GGUF metadata.

Byte-level BPE only, with the pre-tokenizers listed here; any other is refused by name, not done wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from producer.errors import UsageError
from worker.build.source import Source

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType
# Meta's Llama 3 splitting pattern (tokenizer.model's pat_str).
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> list[Any]:
    return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]


def _smollm() -> list[Any]:
    """Every digit is a token of its own; transformers' GGUF conversion forgets this."""
    return [pre_tokenizers.Digits(individual_digits=True), *_gpt2()]


def _llama3() -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(_LLAMA3), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


_PRE_TOKENIZERS: dict[str, Callable[[], list[Any]]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
}


def write_tokenizer(source: Source, folder: Path) -> None:
    """Writes both files. UsageError for a tokenizer that is no byte-level BPE or splits in an unknown way."""
    build_tokenizer(source).save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(source), ensure_ascii=False, indent=2)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def build_tokenizer(source: Source) -> Tokenizer:
    """The model's tokenizer: vocabulary, merges, splitting, special tokens, BOS when the model wants one."""
    kind, splitting = source.text("tokenizer.ggml.model"), source.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or splitting not in _PRE_TOKENIZERS:
        raise UsageError(
            f"{source.path}: tokenizer '{kind}' with pre-tokenizer '{splitting}' is not supported; "
            f"byte-level BPE with one of {', '.join(_PRE_TOKENIZERS)} is."
        )
    tokens: list[str] = source.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in source.get("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[splitting]())
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, source.get("tokenizer.ggml.token_type"))
    _add_bos(tokenizer, source, tokens)
    return tokenizer


def tokenizer_config(source: Source) -> dict[str, Any]:
    """Special tokens as text, whether BOS is added, and the chat template (Jinja) if the model has one."""
    tokens: list[str] = source.get("tokenizer.ggml.tokens")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(source.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.architecture.context_length,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        token_id = source.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = tokens[token_id]
    template = source.get("tokenizer.chat_template")
    return config if template is None else config | {"chat_template": template}


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    """Control tokens are special (skipped when decoding); user-defined ones are text that never splits."""
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        chosen = [token for token, its in zip(tokens, kinds, strict=True) if its == kind]
        added = [AddedToken(token, special=special, normalized=False) for token in chosen]
        tokenizer.add_special_tokens(added) if special else tokenizer.add_tokens(added)


def _add_bos(tokenizer: Tokenizer, source: Source, tokens: list[str]) -> None:
    bos = source.get("tokenizer.ggml.bos_token_id")
    if bos is not None and source.get("tokenizer.ggml.add_bos_token", False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
