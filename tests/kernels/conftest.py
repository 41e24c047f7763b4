"""GPU tests are skipped where there is no CuPy or no device."""

from __future__ import annotations

import pytest


def gpu_is_there() -> bool:
    try:
        import cupy

        return int(cupy.cuda.runtime.getDeviceCount()) > 0
    except Exception:  # no CuPy, no driver, no device: each has its own exception
        return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not gpu_is_there():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and CuPy"))
