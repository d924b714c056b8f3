"""Memory of the host: the least that it has, or that any control group of this process allows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from stillhouse.launch.machine.machine import host_gib
from tests.patience import PATIENCE_S

GIB = 2**30
INSTALLED_GIB = psutil.virtual_memory().total / GIB


class Groups:
    """Files of control groups, as the kernel shows them to a process."""

    def __init__(self, root: Path, of_process: str) -> None:
        self._groups = root / "sys/fs/cgroup"
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(of_process)

    def limit(self, file: str, n_bytes: int | str) -> None:
        (self._groups / file).parent.mkdir(parents=True, exist_ok=True)
        (self._groups / file).write_text(f"{n_bytes}\n")


def test_without_a_limit_it_is_what_is_installed(tmp_path: Path) -> None:
    assert host_gib(tmp_path) == INSTALLED_GIB, "a system without control groups"
    groups = Groups(tmp_path, "0::/user.slice\n")
    assert host_gib(tmp_path) == INSTALLED_GIB, "groups without the controller of memory"
    groups.limit("user.slice/memory.max", "max")
    groups.limit("user.slice/memory.max", 1 << 62)
    assert host_gib(tmp_path) == INSTALLED_GIB, "more than there is"


def test_a_job_has_the_least_of_its_own_group_and_of_all_above_it(tmp_path: Path) -> None:
    """Slurm gives the job a limit, and each of its steps another one."""
    groups = Groups(tmp_path, "0::/slurm/job_7/step_0\n")
    groups.limit("slurm/job_8/memory.max", GIB // 8)  # of somebody else
    groups.limit("slurm/job_7/step_0/memory.max", "max")
    groups.limit("slurm/job_7/memory.max", GIB)
    assert host_gib(tmp_path) == 1.0
    groups.limit("slurm/job_7/step_0/memory.max", GIB // 2)
    assert host_gib(tmp_path) == 0.5
    groups.limit("slurm/memory.max", GIB // 4)
    assert host_gib(tmp_path) == 0.25


@pytest.mark.parametrize("group", ["", "/docker/4f2"])
def test_the_first_version_of_control_groups_limits_it_too(tmp_path: Path, group: str) -> None:
    """A container may see its own group as the uppermost, under a path that is not there."""
    groups = Groups(tmp_path, "5:memory:/docker/4f2\n4:cpu,cpuacct:/other\n0::/\n")
    groups.limit("memory/other/memory.limit_in_bytes", GIB // 8)
    groups.limit(f"memory{group}/memory.limit_in_bytes", 0x7FFFFFFFFFFFF000)
    assert host_gib(tmp_path) == INSTALLED_GIB, "no limit is a large number there"
    groups.limit(f"memory{group}/memory.limit_in_bytes", GIB)
    assert host_gib(tmp_path) == 1.0


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A control group of memory in this kernel, below that of this process, with one more group inside."""
    first = Path("/sys/fs/cgroup/memory")
    path = {
        line.split(":")[1]: line.split(":")[2]
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    }
    above = first / path["memory"].lstrip("/") if "memory" in path else Path("/sys/fs/cgroup") / path[""].lstrip("/")
    above = above if above.is_dir() else first if "memory" in path else Path("/sys/fs/cgroup")
    group = above / f"stillhouse-test-{os.getpid()}"
    try:
        (group / "inside").mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield group
    finally:
        (group / "inside").rmdir()
        group.rmdir()


def test_a_process_in_a_real_control_group_sees_the_limit_above_it(real_group: Path) -> None:
    file = next(
        (real_group / name for name in ("memory.max", "memory.limit_in_bytes") if (real_group / name).exists()), None
    )
    if file is None:
        pytest.skip("control groups made here have no controller of memory")
    file.write_text(str(GIB))
    code = (
        f"open({str(real_group / 'inside/cgroup.procs')!r}, 'w').write('0')\n"
        "from stillhouse.launch.machine.machine import host_gib\nprint(host_gib())"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert float(seen.stdout) == 1.0
