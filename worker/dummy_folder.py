"""What a model folder says, for the model without weights: bytes are tokens, an answer is the prompt again.

Owns the dummy's vocabulary. Must not know Redis or how rows run.
"""

from __future__ import annotations

from collections.abc import Sequence

from worker.chat import ChatTemplate
from worker.tokenizer import Tokenizer

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


class DummyFolder:
    """The sizes RowPreparer asks a model folder for. Token i < 256 is the byte i."""

    name = "dummy"
    aliases: Sequence[str] = ()
    echo_id = 256
    eos_id = 257
    vocab_size = 258
    context_length = 8192
    eos_ids: tuple[int, ...] = (eos_id,)


def dummy_tokenizer() -> Tokenizer:
    """UTF-8 bytes as token ids; the two control tokens write nothing."""
    written = [bytes([value]) for value in range(256)] + [b"", b""]
    return Tokenizer(str.encode, written, (), (), ChatTemplate(TEMPLATE, {}, {}))
