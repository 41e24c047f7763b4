"""Text to token ids and back, by the model folder's tokenizer.json. Lives in the parent process.

Owns BOS, what counts as a control token, and the rule that control tokens written in a text stay text. Must
not know rows, sampling or Redis.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from producer.errors import UsageError
from worker.chat import ChatTemplate, template_source
from worker.own_files import file_within
from worker.vocabulary import LONGEST_NAME, Description, rename, secret_names, token_bytes
from worker.words import PROBE, Encode, WordEncoder, encodes_words_apart

# Rows are encoded one at a time and the cores are the engine's; threads would also make a later fork unsafe.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

CONFIG_FILE = "tokenizer_config.json"
BRACKETED = re.compile(r"\W+\w.*\W", re.DOTALL)  # <|user|>, [INST]: no run of spaces or newlines


class Tokenizer:
    """Build it with ``load``.

    ``bos``: ids put before a plain prompt; ``template``: the folder's chat template or None; ``longest``:
    most characters of text one token can stand for.
    """

    def __init__(
        self,
        encode: Encode,
        written: Sequence[bytes],
        hidden: Iterable[int],
        bos: Sequence[int],
        template: ChatTemplate | None,
    ) -> None:
        self.bos = tuple(bos)
        self.template = template
        self.longest = max(LONGEST_NAME, *map(len, written))  # bytes, so characters are no more
        self._encode = encode
        self._all = list(written)
        self._shown = list(written)
        for token_id in hidden:
            self._shown[token_id] = b""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json and the chat template. UsageError names the file."""
        path = folder / "tokenizer.json"
        description = _read(folder, path.name)
        config = _read(folder, CONFIG_FILE) if (folder / CONFIG_FILE).exists() else {}
        try:
            return cls._from(description, config, template_source(folder, config))
        except UsageError:
            raise
        except Exception as error:  # the library raises bare Exceptions, templates anything
            raise UsageError(f"{path} or its chat template cannot be used: {error}") from error

    @classmethod
    def _from(cls, description: Description, config: Mapping[str, Any], source: str | None) -> Tokenizer:
        written = token_bytes(description)
        variables = _special_texts(config)
        names = secret_names(description, {*variables.values(), *_turn_texts(description, source, variables)})
        rename(description, names)
        library = tokenizers.Tokenizer.from_str(json.dumps(description, ensure_ascii=False))
        library.no_truncation()  # a file saved while training may carry both
        library.no_padding()
        ids = {name: _id_of(library, name, token) for token, name in names.items()}
        return cls(
            _encoder(library, description, written, ids),
            written,
            ids.values(),
            _bos(library, config, names),
            None if source is None else ChatTemplate(source, variables, names),
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, BOS first where the model wants one. Special tokens in ``text`` are text."""
        return [*self.bos, *self._encode(text)]

    def encode_rendered(self, text: str) -> list[int]:
        """Ids of what ``template`` rendered. BOS is the template's to write, as in transformers."""
        return list(self._encode(text))

    def written(self, token_id: int, skip_special: bool = True) -> bytes:
        """The bytes of one token, perhaps part of a character; an id that has no token writes nothing."""
        table = self._shown if skip_special else self._all
        return table[token_id] if token_id < len(table) else b""

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
        table = self._shown if skip_special else self._all
        size = len(table)
        return b"".join([table[i] for i in ids if i < size]).decode("utf-8", "replace")


def _read(folder: Path, name: str) -> dict[str, Any]:
    path = file_within(folder, name, f"the model's {name}")
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} is not a JSON object: build the model folder again with `worker build`")
    return value


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """{"bos_token": "<s>", ...}: what chat templates may call by name."""
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        token = config.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            found[name] = text
    return found


def _turn_texts(description: Description, source: str | None, variables: Mapping[str, str]) -> list[str]:
    """Added tokens that open or close a chat turn: control tokens, whatever flag the folder gives them."""
    turn = "" if source is None else ChatTemplate(source, variables, {}).turn()
    texts = [token["content"] for token in description["added_tokens"]]
    return [text for text in texts if BRACKETED.fullmatch(text) and text in turn]


def _encoder(
    library: tokenizers.Tokenizer, description: Description, written: Sequence[bytes], ids: Mapping[str, int]
) -> Encode:
    """Text to ids, without BOS: by words where that gives the same. ``ids``: {secret name: control token}."""

    def encode(text: str) -> list[int]:
        found: list[int] = library.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return found

    by_words = WordEncoder(encode, written, ids)
    return by_words if encodes_words_apart(description) and encode(PROBE) == by_words(PROBE) else encode


def _id_of(library: tokenizers.Tokenizer, name: str, token: str) -> int:
    token_id: int | None = library.token_to_id(name)
    if token_id is None or not name.endswith(f":{token_id}\ufdd1"):
        raise UsageError(f"tokenizer.json gives the control token {token!r} two ids")
    return token_id


def _bos(library: tokenizers.Tokenizer, config: Mapping[str, Any], names: Mapping[str, str]) -> Sequence[int]:
    """Ids before a plain prompt: as add_bos_token says, else what tokenizer.json itself puts in front."""
    if isinstance(wanted := config.get("add_bos_token"), bool):
        text = _special_texts(config).get("bos_token", "")
        bos = library.token_to_id(names.get(text, text))
        if not wanted:
            return []
        if bos is None:
            raise UsageError(
                "tokenizer_config.json: add_bos_token is true, but bos_token is no token of the model"
            )
        return [bos]
    bare: list[int] = library.encode("a", add_special_tokens=False).ids
    full: list[int] = library.encode("a").ids
    return next(full[:i] for i in range(len(full)) if full[i : i + len(bare)] == bare)
