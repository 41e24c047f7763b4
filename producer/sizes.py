"""Sizes in bytes as people write them."""

from __future__ import annotations

import re

from producer.errors import UsageError

UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_bytes(text: str, flag: str) -> int:
    """``512M``, ``2G``, ``1073741824``: powers of 1024."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", text.strip().lower())
    if not match or float(match[1]) <= 0:
        raise UsageError(f"{flag} wants a size such as 512M or 2G, not {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def show_bytes(size: int) -> str:
    """``1.5 GB``, powers of 1024, as ``parse_bytes`` reads them."""
    value, unit = float(size), ""
    for bigger in ("K", "M", "G", "T"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.0f} {unit}B" if value >= 10 or not unit else f"{value:.1f} {unit}B"
