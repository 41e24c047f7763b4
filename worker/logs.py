"""What a worker says: one line an event on stderr, never one a row.

Owns the form of a line, and that no password is ever in one. Must not know what happened.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping
from typing import Any

from producer.screen import printable
from worker.settings import LogFormat

# Nobody here logs a URL unredacted, but a library's error might. Passwords may hold @ / : # ? unescaped.
_SECRET = re.compile(r"(\w+://[^\s:/@]*:)\S*@")


def named(name: str, **fields: str | int | float) -> Mapping[str, Any]:
    """``extra=`` of a line that somebody may want to find by name; its fields are the JSON form's own."""
    return {"event": {"event": name, **fields}}


class Lines(logging.Formatter):
    """``2026-07-30T12:00:00.123Z INFO worker: text``. A message stays on one line, whatever is in it."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback's lines follow it."""
        line = f"{_clock(record)} {record.levelname} {_who(record)}: {printable(redact(record.getMessage()))}"
        return f"{line}\n{redact(self.formatException(record.exc_info))}" if record.exc_info else line


class Json(logging.Formatter):
    """One object a line: time, level, logger, message, the fields of a named event, perhaps a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _clock(record),
            "level": record.levelname,
            "logger": _who(record),
            "message": redact(record.getMessage()),
            **getattr(record, "event", {}),
        }
        if record.exc_info:
            entry["traceback"] = redact(self.formatException(record.exc_info))
        return json.dumps(entry, default=str)


def redact(text: str) -> str:
    """No password of a URL in it."""
    return _SECRET.sub(r"\1***@", text)


def _clock(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _who(record: logging.LogRecord) -> str:
    return record.name.removeprefix("worker.")


def set_up(form: LogFormat = "text") -> None:
    """Send the worker's own lines to stderr; of libraries only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Json() if form == "json" else Lines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("worker").setLevel(logging.INFO)
