"""A Ray cluster of several nodes on this machine, in a process of its own: `python -m tests.launch.ray.nodes NODES`.

NODES is a JSON list with the resources of the nodes, as Ray names them; GPUs need not exist. Prints its address, then
obeys lines of stdin and answers each with a line: `remove` ends the first of the further nodes as if its machine had
died, `remove PID` the one whose raylet that is, `add` adds one like the last, `free` answers with what is free on all
nodes, and the end of stdin ends all.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil

from tests.patience import PATIENCE_S

ROOT: Final = Path(__file__).parents[3]
PLAIN: Final[Mapping[str, int]] = {"num_cpus": 2}
MEMORY: Final[Mapping[str, int]] = {"memory": 4 << 30, "object_store_memory": 100 << 20}


def main() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    first, *beside = json.loads(sys.argv[1])
    cluster: Any = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={**MEMORY, **first, "include_dashboard": False}
    )
    further = [cluster.add_node(**MEMORY, **node) for node in beside]
    print(cluster.address, flush=True)
    for line in sys.stdin:
        answer: Any = "done"
        match line.split():
            case ["remove", *pids]:
                node = next(one for one in further if not pids or _raylet(one) == int(pids[0]))
                further.remove(node)
                cluster.remove_node(node, allow_graceful=False)
            case ["free"]:
                ray: Any = importlib.import_module("ray")
                ray.init(address=cluster.address, log_to_driver=False)
                answer = dict(ray.available_resources())
                ray.shutdown()  # a node to which this process is connected could not be removed
            case _:
                further.append(cluster.add_node(**MEMORY, **beside[-1]))
        print(json.dumps(answer), flush=True)
    cluster.shutdown()


def _raylet(node: Any) -> int:
    return node.all_processes["raylet"][0].process.pid


class Nodes:
    """The cluster, from outside."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process, self.address = process, address

    def order(self, what: str) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def free(self, resource: str) -> float:
        """How much of it no placement group holds, by Ray's count."""
        return self.order("free").get(resource, 0.0)

    def joins(self) -> dict[str, psutil.Process]:
        """Host of a run -> its join, by the processes of this machine alone."""
        found: dict[str, psutil.Process] = {}
        for process in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.Error):
                words = process.cmdline()
                if "stillhouse.launch.stages.child" in words:
                    found[words[words.index("--name-prefix") + 1]] = process
        return found


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def raylet_of(process: psutil.Process) -> int:
    """The node on which it runs: the pid of its raylet."""
    return next(parent.pid for parent in process.parents() if parent.name() == "raylet")


@contextmanager
def ray_nodes(*further: Mapping[str, int], first: Mapping[str, int] = PLAIN) -> Generator[Nodes]:
    """Two further nodes like the first one if none are named."""
    command = [sys.executable, "-m", "tests.launch.ray.nodes", json.dumps([first, *(further or [first, first])])]
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
