"""Memory: how much this process may still take, of the machine or a container's limit, and who lacks it.

Must not know what the memory is for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUP_FILES = (  # limit, usage, and what of the usage is files' pages that give way, in memory.stat
    ("memory.max", "memory.current", "inactive_file"),  # control groups of version 2
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # and 1
)
_LACK = ("Failed to allocate memory", "bad_alloc", "out of memory")  # ONNX Runtime's arena, C++, CUDA


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int:
    """Bytes that can be taken without swapping, at most what the control groups still allow.

    Where nothing can be read (not Linux): 4 GiB, a guess that a small machine survives.
    """
    limits = [_machine(meminfo), *map(_allowance, _groups(cgroup, membership))]
    return min((value for value in limits if value is not None), default=4 << 30)


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


def _groups(mount: Path, membership: Path) -> Iterator[Path]:
    """The control groups that bound this process: its own and those around it.

    A container may see its own where they are mounted, whatever place the membership names.
    """
    yield from (mount, mount / "memory")
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for _, kinds, path in (line.split(":", 2) for line in lines):
        if kinds in ("", "memory"):  # version 2, and 1
            group = Path(path.lstrip("/"))
            yield from (mount / kinds / each for each in (group, *group.parents))


def _allowance(group: Path) -> int | None:
    """What a control group still allows; None when it sets no limit."""
    for limit, usage, cached in _CGROUP_FILES:
        try:
            most = (group / limit).read_text().strip()
            used = int((group / usage).read_text())
        except (OSError, ValueError):
            continue
        return max(0, int(most) - used + _counted(group / "memory.stat", cached)) if most.isdigit() else None
    return None


def _counted(stat: Path, name: str) -> int:
    try:
        pairs = (line.split() for line in stat.read_text().splitlines())
        return next((int(value) for key, value in pairs if key == name), 0)
    except (OSError, ValueError):
        return 0
