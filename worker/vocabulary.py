"""What tokenizer.json says of single tokens: the bytes each writes, and which of them are control tokens.

Owns the control tokens' secret names: inside this process every control token is called by a name nobody can
guess, so text that spells ``<|im_end|>`` is text, and only the chat template, which is told the names, can
mean the token. Must not know templates or rows.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from producer.errors import UsageError

Description = dict[str, Any]  # tokenizer.json, parsed
LONGEST_NAME = 32  # characters of a secret name, at most
SPACE = "\u2581"  # how SentencePiece vocabularies write a space


def secret_names(description: Description, control: Iterable[str]) -> dict[str, str]:
    """{control token: secret name} for every token flagged special and every added token in ``control``.

    A name is 64 random bits and the token's id between two noncharacters; normalizers leave it as it is.
    """
    wanted, nonce = set(control), secrets.token_hex(8)
    return {
        token["content"]: f"\ufdd0{nonce}:{token['id']}\ufdd1"
        for token in description["added_tokens"]
        if token["special"] or token["content"] in wanted
    }


def rename(description: Description, names: Mapping[str, str]) -> None:
    """Calls the control tokens by their secret names, in place.

    In the model's own vocabulary too: Unigram models, and BPE with ignore_merges, find a token's text there.
    """
    for token in description["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = description["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocab.items()}
    else:  # Unigram: [token, score] by id
        model["vocab"] = [[names.get(token, token), score] for token, score in vocab]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])


def token_bytes(description: Description) -> list[bytes]:
    """By id: the bytes a token writes; text is these joined, then decoded as UTF-8. Before ``rename``.

    Joined, not tokenizers' decode: it drops the space before a first word, and cannot show half a character.
    Raises UsageError for a kind of vocabulary whose tokens do not each stand for fixed bytes.
    """
    vocab = description["model"]["vocab"]
    pairs = vocab.items() if isinstance(vocab, dict) else ((token, i) for i, (token, _) in enumerate(vocab))
    kinds = {part["type"] for part in parts(description.get("decoder"))}
    if "ByteLevel" in kinds:
        written = {token_id: _byte_level(token) for token, token_id in pairs}
    elif kinds & {"Metaspace", "ByteFallback"}:
        written = {token_id: _sentence_piece(token) for token, token_id in pairs}
    else:
        found = ", ".join(sorted(kinds)) or "none"
        raise UsageError(f"tokenizer.json: byte-level and SentencePiece decoders are served, not {found}")
    written |= {token["id"]: token["content"].encode() for token in description["added_tokens"]}
    return [written.get(token_id, b"") for token_id in range(max(written) + 1)]


def parts(component: Any) -> Iterator[dict[str, Any]]:
    """A decoder or pre-tokenizer, or the parts of a Sequence of them."""
    for part in (component or {}).get("decoders") or (component or {}).get("pretokenizers") or [component]:
        if part:
            yield part


def _byte_level(token: str) -> bytes:
    try:
        return token.translate(_GPT2_BYTES).encode("latin-1")
    except UnicodeEncodeError:  # a token that is not in GPT-2's alphabet stands for itself
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    if byte := re.fullmatch("<0x([0-9A-F]{2})>", token):
        return bytes.fromhex(byte[1])
    return token.replace(SPACE, " ").encode()


def _gpt2_bytes() -> dict[int, int]:
    """{character: byte} of GPT-2's alphabet: printable bytes are themselves, the rest U+0100 and after."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return dict(zip(printable, printable, strict=True)) | {0x100 + i: byte for i, byte in enumerate(others)}


_GPT2_BYTES = _gpt2_bytes()
