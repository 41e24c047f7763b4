"""Model folders with nothing but text: a byte-level and a SentencePiece tokenizer of a few hundred tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1, 2
MERGES = ("t h", "th e", "Ġ the", "Ġ a", "i n", "in g", "s e", "u se", "use r", "Ċ Ċ", "l o", "lo w")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


@dataclass
class TinyModel:
    """What rows.py asks of a model folder."""

    name: str = "tiny"
    aliases: tuple[str, ...] = ("tiny-alias",)
    vocab_size: int = 320
    context_length: int = 64
    eos_ids: tuple[int, ...] = (2,)
    search: dict[str, Any] = field(default_factory=dict)


def byte_level(control: tuple[str, ...] = CONTROL, plain: tuple[str, ...] = ()) -> Tokenizer:
    """``control`` tokens, GPT-2's alphabet, merges; ``plain`` are added tokens without the special flag."""
    tokens = [*control, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES)]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Llama 2's make: a space in front, spaces as U+2581, bytes for unknown characters, BOS <s>."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdeghilnorst<>/.",
        "▁the",
    ]
    merges = [("▁t", "he"), ("▁", "t"), ("h", "e")]
    tokens += ["▁t", "he"]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges[::-1], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, template: str | None = CHATML, **config: Any) -> Path:
    """A folder with tokenizer.json and tokenizer_config.json; returns it."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False} | config
    if template is not None:
        config["chat_template"] = template
    given = {key: value for key, value in config.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    return folder
