"""Processors that may be used: the fewest that affinity or any control group allows. And how busy they are."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from stillhouse.protocol.processors import has_quota, share_used, usable_cores


class Groups:
    """Files of control groups, as the kernel shows them to a process."""

    def __init__(self, root: Path, of_process: str) -> None:
        self.root, self._groups = root, root / "sys/fs/cgroup"
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(of_process)

    def write(self, file: str, text: str) -> None:
        (self._groups / file).parent.mkdir(parents=True, exist_ok=True)
        (self._groups / file).write_text(text)


def test_a_control_group_limits_the_cores(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/\n")
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0)), "the uppermost group has no such file"
    groups.write("cpu.max", "50000 100000\n")
    assert usable_cores(tmp_path) == 0.5
    groups.write("cpu.max", "max 100000\n")
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))


def test_the_limit_of_a_service_and_of_the_groups_above_it_hold(tmp_path: Path) -> None:
    """systemd-run -p CPUQuota=..., whose group is not the uppermost."""
    groups = Groups(tmp_path, "0::/run.slice/train.service\n")
    groups.write("run.slice/train.service/cpu.max", "30000 100000\n")
    assert usable_cores(tmp_path) == 0.3
    groups.write("run.slice/cpu.max", "20000 100000\n")
    assert usable_cores(tmp_path) == 0.2


@pytest.mark.parametrize("group", ["", "/docker/4f2"])
def test_the_first_version_of_control_groups_limits_the_cores_too(tmp_path: Path, group: str) -> None:
    """A container may see its own group as the uppermost, under a path that is not there."""
    lines = ["5:memory:/other", "4:cpu,cpuacct:/docker/4f2", "3:cpuset:/", "0::/"]
    groups = Groups(tmp_path, "".join(f"{line}\n" for line in lines))
    groups.write(f"cpu{group}/cpu.cfs_period_us", "100000\n")
    groups.write(f"cpu{group}/cpu.cfs_quota_us", "-1\n")
    assert usable_cores(tmp_path) == len(os.sched_getaffinity(0))
    groups.write(f"cpu{group}/cpu.cfs_quota_us", "40000\n")
    assert usable_cores(tmp_path) == 0.4


def test_a_quota_is_told_from_affinity(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/\n")
    assert not has_quota(tmp_path)
    groups.write("cpu.max", "50000 100000\n")
    assert has_quota(tmp_path)


@pytest.mark.parametrize(("own", "used"), [({1}, 1.0), ({0}, 0.1), ({0, 1}, 0.55), ({2}, 0.55)])
def test_only_processors_that_may_be_used_are_looked_at(
    own: set[int], used: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def percent(*, percpu: bool) -> list[float]:
        assert percpu
        return [10.0, 100.0]

    monkeypatch.setattr(psutil, "cpu_percent", percent)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: own)  # pyright: ignore[reportUnknownLambdaType]
    assert share_used() == pytest.approx(used)
