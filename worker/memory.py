"""Memory: how much this process may still take, of the machine or a container's limit, and who lacks it.

Must not know what the memory is for.
"""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_LACK = ("Failed to allocate memory", "bad_alloc", "out of memory")  # ONNX Runtime's arena, C++, CUDA


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that can be taken without swapping, at most what the control group still allows.

    Where neither can be read (not Linux): 4 GiB, a guess that a small machine survives.
    """
    found = [value for value in (_machine(meminfo), _container(cgroup)) if value is not None]
    return min(found, default=4 << 30)


def is_lack(error: Exception) -> bool:
    """Whether a run of ONNX Runtime failed for want of memory. It has words for that and no exception."""
    return isinstance(error, MemoryError) or any(words in str(error) for words in _LACK)


def _machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    kib = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return next((int(value) * 1024 for value in kib), None)


def _container(cgroup: Path) -> int | None:
    """memory.max less memory.current of control groups version 2; None when there is no limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used) if limit.isdigit() else None
