"""Sizes as people write them, and as they are shown."""

from __future__ import annotations

import pytest

from producer.errors import UsageError
from producer.sizes import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("1k", 1024), ("512MB", 512 << 20), ("2GiB", 2 << 30), (" 1 T ", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "--x") == size


@pytest.mark.parametrize("text", ["", "0", "-1", "lots", "1X", "1e9", "M", "0.5", "9" * 400, "9999999999T"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="--x wants a size such as 512M"):
        parse_bytes(text, "--x")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KB"), (64 << 20, "64 MB"), (1_600_000_000, "1.5 GB")],
)
def test_sizes_as_shown(size: int, text: str) -> None:
    assert show_bytes(size) == text
