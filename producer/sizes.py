"""Sizes in bytes as people write them, and spans of time within what Redis and RQ can count."""

from __future__ import annotations

import re

from producer.errors import UsageError

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
MAX_BYTES = 2**63
SECONDS = {"seconds": 1, "hours": 3600, "days": 86_400}
MAX_SECONDS = 3650 * 86_400


def parse_bytes(text: str, flag: str) -> int:
    """``512M``, ``2G``, ``1073741824``: powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    size = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not 1 <= size < MAX_BYTES:  # a number of hundreds of digits is inf
        raise UsageError(f"{flag} wants a size such as 512M or 2G, not {text!r}")
    return int(size)


def check_seconds(value: float, name: str, *, least: float = 0, unit: str = "seconds") -> float:
    """A span given in ``unit``, in seconds. Raises UsageError for NaN, infinity and what is out of bounds."""
    seconds = value * SECONDS[unit]
    if not least <= seconds <= MAX_SECONDS:  # NaN compares false
        most = f"{MAX_SECONDS // SECONDS[unit]:,} {unit}"
        raise UsageError(f"{name} wants at least {least:g} and at most {most}, not {value:g}")
    return seconds


def show_bytes(size: int) -> str:
    """``1.5 GB``, powers of 1024, as ``parse_bytes`` reads them."""
    value, unit = float(size), ""
    for bigger in ("K", "M", "G", "T"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.0f} {unit}B" if value >= 10 or not unit else f"{value:.1f} {unit}B"
