"""A SkyPilot task for a run: the run on the first node, joins on the others, by a folder on a volume of all nodes.

SkyPilot gives all nodes of a task the same resources: those of the largest group."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from stillhouse.launch.render.yaml_text import yaml_text
from stillhouse.launch.topology import REJOIN_S, HostGroup, flags_of_the_run

RUNS: Final = "/runs"
"""Where the volume is mounted."""
CONFIG: Final = "/tmp/stillhouse.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyTask:
    """What to render."""

    name: str
    config: str
    """Path of the configuration on this machine, from where SkyPilot copies it; empty: none."""
    arguments: tuple[str, ...]
    """Keys of the run as words of a command line."""
    volume: str
    """SkyPilot's name of the volume; all nodes must be able to write to it."""
    accelerator: str
    """SkyPilot's name of the GPUs, e.g. H100; empty without GPUs."""
    groups: tuple[HostGroup, ...]
    port: int


def sky_task(task: SkyTask) -> str:
    """The task, as YAML."""
    hosts = [group.host for group in task.groups]
    gpus = max(host.gpus for host in hosts)
    resources: dict[str, Any] = {
        "cpus": f"{max(host.cpus for host in hosts)}+",
        "memory": f"{max(host.memory_gib for host in hosts)}+",
    }
    if gpus:
        resources["accelerators"] = {task.accelerator: gpus}
    described: dict[str, Any] = {
        "name": task.name,
        "num_nodes": sum(len(group.workers) for group in task.groups),
        "resources": resources,
        "volumes": {RUNS: task.volume},
    }
    if task.config:
        described["file_mounts"] = {CONFIG: task.config}
    described["run"] = "\n".join(_script(task)) + "\n"
    return yaml_text([described])


def _script(task: SkyTask) -> Iterator[str]:
    counts = flags_of_the_run(task.groups)
    config = f" --config {CONFIG}" if task.config else ""
    keys = f" {shlex.join(task.arguments)}" if task.arguments else ""
    yield f"RUN={RUNS}/{task.name}"
    yield 'first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)'
    yield "if [ $SKYPILOT_NODE_RANK = 0 ]; then"
    yield f"    exec stillhouse --run-dir $RUN --resume-or-start{config} --launch.status plain \\"
    yield f"        --buffer.bind tcp://$first:{task.port} --weights.host $first{keys}{counts}"
    yield "fi"
    shares = [(group, share) for group in task.groups for share in group.workers]
    yield "case $SKYPILOT_NODE_RANK in"
    for rank, (group, share) in enumerate(shares):
        if rank:
            yield f"{rank}) workers='{group.flag} {share}' ;;"
    yield "esac"
    yield "while true; do"
    yield "    until [ -f $RUN/run.json ]; do sleep 1; done"
    yield "    stillhouse join $RUN $workers --name-prefix node$SKYPILOT_NODE_RANK; code=$?"
    yield "    # 1, 75: the run broke off, or cannot be joined yet."
    yield f"    case $code in 1|75) sleep {REJOIN_S} ;; *) exit $code ;; esac"
    yield "done"
