"""What a worker says: one line an event on stderr, never one a row.

Owns the form of a line: time, level, who, what. Must not know what happened.
"""

from __future__ import annotations

import logging
import sys
import time


class Lines(logging.Formatter):
    """``2026-07-30T12:00:00.123Z INFO worker: text``. A message stays on one line, whatever is in it."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback's lines follow it."""
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in record.getMessage())
        name = record.name.removeprefix("worker.")
        line = f"{clock}.{int(record.msecs):03d}Z {record.levelname} {name}: {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up(level: int = logging.INFO) -> None:
    """Send the worker's own lines to stderr; of libraries only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("worker").setLevel(level)
