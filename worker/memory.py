"""How much memory this process may still take: the machine's and, in a container, its limit's."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Bytes that can be taken without swapping, at most what the control group still allows.

    Where neither can be read (not Linux): 4 GiB, a guess that a small machine survives.
    """
    found = [value for value in (_machine(meminfo), _container(cgroup)) if value is not None]
    return min(found, default=4 << 30)


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
