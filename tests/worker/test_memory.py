"""What memory is free: of a machine and of control groups written by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from worker.memory import available_bytes

Write = Callable[[Path, int | str, int, int], None]


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    return path


def version_2(group: Path, limit: int | str, used: int, cached: int) -> None:
    """``cached`` of ``used`` are pages of files that nobody has looked at lately."""
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 7\nactive_file 9\ninactive_file {cached}\nslab 5\n")


def version_1(group: Path, limit: int | str, used: int, cached: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{2**63 - 4096 if limit == 'max' else limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {cached}\n")


VERSIONS = [(version_2, "", "0::"), (version_1, "memory", "4:memory:")]


@pytest.mark.parametrize(("write", "folder", "line"), VERSIONS)
def test_the_least_of_machine_and_container(
    write: Write, folder: str, line: str, meminfo: Path, tmp_path: Path
) -> None:
    """A container sees its own group where groups are mounted."""
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text(f"{line}/docker/0123\n")
    assert available_bytes(meminfo, mount, membership) == 4000 * 1024
    for limit, free in ((3_000_000, 2_000_000), (9_000_000, 4000 * 1024), ("max", 4000 * 1024)):
        write(mount / folder, limit, 1_000_000, 0)
        assert available_bytes(meminfo, mount, membership) == free
    write(mount / folder, 1_000_000, 1_000_001, 0)
    assert available_bytes(meminfo, mount, membership) == 0


@pytest.mark.parametrize(("write", "folder", "line"), VERSIONS)
def test_pages_of_files_that_give_way_are_free(
    write: Write, folder: str, line: str, meminfo: Path, tmp_path: Path
) -> None:
    """Of a model just read, say: the kernel drops them before it refuses anybody memory."""
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text(f"{line}/\n")
    write(mount / folder, 3_000_000, 2_900_000, 2_500_000)
    assert available_bytes(meminfo, mount, membership) == 2_600_000


@pytest.mark.parametrize(("write", "folder", "line"), VERSIONS)
def test_every_group_around_the_process_bounds_it(
    write: Write, folder: str, line: str, meminfo: Path, tmp_path: Path
) -> None:
    """A service of systemd, say, with a limit of its own or of its slice."""
    mount, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text(
        f"9:cpu,cpuacct:/elsewhere\n{line}/batch.slice/livebatch.service\n1:name=systemd:/\n"
    )
    write(mount / folder / "batch.slice/livebatch.service", "max", 1000, 0)
    write(mount / folder / "elsewhere", 2000, 1000, 0)
    assert available_bytes(meminfo, mount, membership) == 4000 * 1024
    write(mount / folder / "batch.slice", 3_000_000, 1_000_000, 400_000)
    assert available_bytes(meminfo, mount, membership) == 2_400_000
    write(mount / folder / "batch.slice/livebatch.service", 2_000_000, 1_000_000, 0)
    assert available_bytes(meminfo, mount, membership) == 1_000_000


def test_where_nothing_can_be_read_it_is_a_guess(tmp_path: Path) -> None:
    nothing = tmp_path / "none"
    assert available_bytes(nothing, nothing, nothing) == 4 << 30


def test_of_this_machine() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50
