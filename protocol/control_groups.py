"""The control groups of this process. Containers, services of systemd and jobs of Slurm have their limits there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def groups_with(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Folders of this process's control group and of all above it: the limit of each holds. Some may not be there.
    `controller`: cpu, memory. `root`: of proc and sys. In a container the groups above its own are not to be seen, and
    its own may be mounted as the uppermost."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            mounted = root / "sys/fs/cgroup"
            if number != "0":  # version 1: each controller has groups of its own
                if controller not in controllers.split(","):
                    continue
                mounted /= controller
            inside = Path(path.lstrip("/"))
            for group in (inside, *inside.parents):
                yield mounted / group
