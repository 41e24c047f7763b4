"""The light room: files of rows in, results out. `from producer import Client` does it without a terminal.

Importing the package imports nothing else: the worker wants wire.py alone, a command line must start at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from producer.client import Client

__all__ = ["Client"]


def __getattr__(name: str) -> object:
    if name == "Client":
        from producer.client import Client

        return Client
    raise AttributeError(f"module 'producer' has no attribute {name!r}")
