"""The servers that a run starts: model, interpreter, GPUs, arguments and environment of each."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import msgspec
import psutil

from stillhouse.engines.config import ServerConfig
from stillhouse.engines.provider import Launch, ServerEngine
from stillhouse.launch.config.pools import WorkerGroup, engine_of, worker_groups
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.machine.gpus import Groups
from stillhouse.protocol.addresses import is_local
from stillhouse.weights.config import NCCL_SOCKETS_ONLY

FAILED_GROUPS: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""Makes a server survive the failure of its weight group, which is only aborted. With torch's default (3) the watchdog
would end the process, after waiting for a dump four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, a minute
(ProcessGroupNCCL.hpp and `Watchdog::runLoop` in ProcessGroupNCCL.cpp)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """One server, before it has a port and a key."""

    worker: str
    """The worker that it serves, e.g. `actor-0`."""
    model: str
    engine: ServerEngine
    launch: Launch
    gpus: tuple[str, ...]
    """Entries for CUDA_VISIBLE_DEVICES; empty on a CPU."""
    host: str
    port: int
    """0: any free port."""
    start_timeout_s: float
    devices: tuple[int, ...] = ()
    """The same GPUs by their positions among the visible ones."""
    added: tuple[str, ...] = ()
    """The arguments among `launch` that the launcher chose."""

    @property
    def name(self) -> str:
        return f"server-{self.worker}"

    @property
    def place(self) -> str:
        """For display."""
        return f"GPU {', '.join(self.gpus)}" if self.gpus else "CPU"


def plan_servers(
    config: RunConfig,
    visible: Sequence[str],
    gpus: Mapping[str, Groups],
    added: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> tuple[ServerPlan, ...]:
    """All servers that this run starts. `config`: models are folders, `server.device` is cpu or cuda. `visible`: names
    of the GPUs. `gpus`: by group (launch.machine.gpus.Places.servers), without servers on a CPU. `added`: worker ->
    arguments that the launcher chose for its server."""
    groups = launched_groups(config)
    return tuple(plan for group in groups for plan in _plans(group, visible, gpus.get(group.key, ()), added))


def server_groups(config: RunConfig) -> tuple[WorkerGroup, ...]:
    """Groups of workers that have servers, started by the launcher or already running."""
    return tuple(group for group in worker_groups(config) if group.engine.servers is not None)


def launched_groups(config: RunConfig) -> tuple[WorkerGroup, ...]:
    """Groups of workers whose servers the launcher starts."""
    return tuple(group for group in server_groups(config) if not group.settings.urls)


def with_server(config: RunConfig, key: str, server: ServerConfig) -> RunConfig:
    """Replace the server settings of one group."""
    replace = msgspec.structs.replace
    if key == "actor":
        return replace(config, actor=replace(config.actor, server=server))
    if key == "teacher":
        return replace(config, teacher=replace(config.teacher, server=server))
    name = key.partition(".")[2]
    return replace(config, pools={**config.pools, name: replace(config.pools[name], server=server)})


def _plans(
    group: WorkerGroup, visible: Sequence[str], gpus: Groups, added: Mapping[str, tuple[str, ...]]
) -> Iterator[ServerPlan]:
    """`gpus`: the GPUs of each server; empty on a CPU."""
    server = group.settings.server
    for index, worker in enumerate(group.workers):
        devices = gpus[index] if gpus else ()
        yield ServerPlan(
            worker=worker,
            model=group.model,
            engine=group.servers,
            launch=group.servers.launch(server, added.get(worker, ())),
            devices=devices,
            gpus=tuple(visible[gpu] for gpu in devices),
            host=server.host,
            port=server.port + index if server.port else 0,
            start_timeout_s=server.start_timeout_s,
            added=added.get(worker, ()),
        )


def contradictions(config: RunConfig) -> Iterator[str]:
    """Arguments of the user that contradict the rest of the configuration. `server.device` is cpu or cuda."""
    for group in launched_groups(config):
        yield from group.servers.contradictions(group.key, group.role, group.settings.server)


def server_environment(
    config: RunConfig, temporary: Path, base: Mapping[str, str] = os.environ, *, shared: bool = False
) -> dict[str, str]:
    """Variables that servers get in addition to this process's: a folder for socket files that is removed at the end,
    and the interface towards the learner for gloo, which would otherwise look up the host name."""
    added = {"TMPDIR": str(temporary)}
    if "GLOO_SOCKET_IFNAME" not in base and (interface := interface_for(config.weights.host)):
        added["GLOO_SOCKET_IFNAME"] = interface
    added |= {name: value for name, value in FAILED_GROUPS.items() if name not in base}
    return added | nccl_environment(config, base, shared=shared)


def nccl_environment(
    config: RunConfig, base: Mapping[str, str] = os.environ, *, shared: bool = False
) -> dict[str, str]:
    """Variables that must be the same on all sides of the weight group: the learner, embedded actors and servers.
    `shared`: some of them are on one GPU (`launch.checks.placement.Choice`).

    NCCL_SOCKET_IFNAME is the loopback if all are on one machine; NCCL would choose another interface if there is one.
    Variables that the actors' servers set for themselves (`ServerEngine.nccl_environment`) are set for all. Variables
    that the user has set are left alone: all sides inherit them."""
    added: dict[str, str] = {}
    if is_local(config.weights.host) and (interface := interface_of(config.weights.host)):
        added["NCCL_SOCKET_IFNAME"] = interface
    if (servers := engine_of(config, "actor").servers) is not None:
        added |= servers.nccl_environment(config.actor.server)
    if shared:
        added |= NCCL_SOCKETS_ONLY
    return {name: value for name, value in added.items() if name not in base}


def interface_for(learner_host: str) -> str | None:
    """The interface on which the learner publishes, or, if it is on another machine, by which it is reached."""
    if (own := interface_of(learner_host)) is not None:
        return own
    try:
        with socket.socket(socket.AF_INET6 if ":" in learner_host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((learner_host, 9))  # sends nothing; the kernel chooses the route
            return interface_of(str(probe.getsockname()[0]))
    except OSError:
        return None


def interface_of(host: str) -> str | None:
    """Name of the network interface with this address; None if there is none."""
    try:
        address = socket.gethostbyname(host)
        loopback = ipaddress.ip_address(address).is_loopback
    except (OSError, ValueError):
        return None
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return "lo" if loopback and sys.platform == "linux" else None


def reachable_host(host: str) -> str:
    """Address at which this machine reaches a server listening on `host`; a wildcard includes the loopback."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def url_of(host: str, port: int, scheme: Literal["http", "https"] = "http") -> str:
    host = reachable_host(host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
