"""A Ray cluster of several nodes on this machine, in a process of its own: `python -m tests.launch.ray.nodes`.

Prints its address, then obeys lines of stdin: `remove` ends the first of the further nodes as if its machine had died,
`add` adds one, and the end of stdin ends all.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tests.patience import PATIENCE_S

ROOT: Final = Path(__file__).parents[3]
CPUS: Final = 2
FURTHER: Final = 2


def main() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    node = {"num_cpus": CPUS, "memory": 4 << 30, "object_store_memory": 100 << 20}
    cluster: Any = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={**node, "include_dashboard": False}
    )
    further = [cluster.add_node(**node) for _ in range(FURTHER)]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "remove":
            cluster.remove_node(further.pop(0), allow_graceful=False)
        else:
            further.append(cluster.add_node(**node))
        print("done", flush=True)
    cluster.shutdown()


class Nodes:
    """The cluster, from outside."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process, self.address = process, address

    @property
    def environment(self) -> Mapping[str, str]:
        """For a launcher that uses the cluster."""
        return {**os.environ, "RAY_ADDRESS": self.address, "OMP_NUM_THREADS": "1"}

    def order(self, what: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"


@contextmanager
def ray_nodes() -> Generator[Nodes]:
    command = [sys.executable, "-m", "tests.launch.ray.nodes"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        yield Nodes(process, process.stdout.readline().strip())
    finally:
        process.stdin.close()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


if __name__ == "__main__":
    main()
