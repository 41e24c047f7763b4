"""Commands by which a person goes on: with the rest of a batch, with its results, or with a worker.

Owns their words: what is printed can be copied into a shell. Must not know Redis.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from producer.batch import DEFAULT_QUEUE
from producer.connection import default_url, redact

if TYPE_CHECKING:
    from producer.output import Output


def rest(
    files: Sequence[str], strict: bool, waited: Output | None, redis: str | None, **flags: str | float | None
) -> str:
    """How to go on with what is not queued yet; also where the batch has no record that says what it is.

    ``waited``: where the results go, if somebody waits for them.
    """
    from producer.sources import is_read_once

    stay = ["--wait", *waited.flags()] if waited else []
    words = [*files, *["--strict"] * strict, *stay, *flag_words(**flags, redis=shown(redis))]
    once = " (give the same input again)" if any(map(is_read_once, files)) else ""
    return f"queue the rest with: {_line('producer', 'submit', *words)}{once}"


def collect(batch_id: str, output: Output, redis: str | None) -> str:
    """The command that takes a batch's results to its end, into the same file as before."""
    flags = [*output.flags(), *flag_words(redis=shown(redis))]
    return _line("producer", "results", batch_id, "--follow", *flags)


def worker(queue: str, url: str) -> str:
    """The command that starts a worker of this queue."""
    own_queue = None if queue == DEFAULT_QUEUE else queue
    own_redis = None if url == default_url() else shown(url)
    return _line("worker", "run", "--model", "FOLDER", *flag_words(queue=own_queue, redis=own_redis))


def flag_words(**values: str | float | None) -> list[str]:
    """``--batch-id B`` of ``batch_id="B"``; nothing of what is not given."""
    given = ((f"--{name.replace('_', '-')}", value) for name, value in values.items() if value is not None)
    return [f"{word:g}" if isinstance(word, float) else word for pair in given for word in pair]


def shown(url: str | None) -> str | None:
    """The URL in a command that may be copied; *** stands for what is not to be printed."""
    return None if url is None else redact(url) + "?***" * ("?" in url)


def _line(*words: str) -> str:
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """As a shell takes it; what cannot be printed as bytes in ``$'...'``, which bash, zsh and ksh know."""
    if word.isprintable():
        return shlex.quote(word)
    return "$'" + "".join(map(_escaped, word)) + "'"


def _escaped(character: str) -> str:
    if character.isprintable() and character not in "\\'":
        return character
    return "".join(f"\\{byte:03o}" for byte in os.fsencode(character))
