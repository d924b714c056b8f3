"""What each SGLang server of a run is started with: model, interpreter, GPUs, arguments, environment."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import psutil

from engines.config import ServerConfig
from engines.provider import EngineRole, ServerEngine
from launch.config.pools import WorkerGroup, engine_of, worker_groups
from launch.config.run import RunConfig
from launch.machine.gpus import LEARNER, Groups, Places
from protocol.addresses import is_local

OPTIONAL_ARGS: Final = ("--incremental-streaming-output",)
"""Of every server whose version has them."""
FAILED_GROUPS: Final = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""In servers: a weight group that fails is aborted, and the server lives. By torch's default (3) its watchdog would end
the process, after waiting for a dump four times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC, a minute (ProcessGroupNCCL.hpp and
`Watchdog::runLoop` in ProcessGroupNCCL.cpp)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """One server, before it has a port and a key."""

    worker: str
    """Whose it is, e.g. `actor-0`."""
    model: str
    python: Path
    shim: bool
    """Forked from sglang_server's zygote; else a process of its own."""
    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES is to say it; empty on a CPU."""
    args: tuple[str, ...]
    """Of sglang.launch_server, all but model, address and key. The user's come last, so they win."""
    host: str
    port: int
    """0: any."""
    start_timeout_s: float

    @property
    def name(self) -> str:
        return f"server-{self.worker}"

    @property
    def place(self) -> str:
        """For people."""
        return f"GPU {', '.join(self.gpus)}" if self.gpus else "CPU"


def servers_of(config: RunConfig, role: EngineRole) -> ServerEngine:
    """Of a role that has servers."""
    servers = engine_of(config, role).servers
    assert servers is not None
    return servers


def urls_of(config: RunConfig, role: EngineRole) -> tuple[str, ...]:
    return config.actor.urls if role == "actor" else config.teacher.urls


def server_config(config: RunConfig, role: EngineRole) -> ServerConfig:
    return config.actor.server if role == "actor" else config.teacher.server


def plan_servers(config: RunConfig, visible: Sequence[str], gpus: Mapping[str, Groups]) -> tuple[ServerPlan, ...]:
    """All servers that this run starts. `config`: models are folders, `server.device` is cpu or cuda; `visible`: names
    of the GPUs; `gpus`: of the servers of each group (launch.machine.gpus.Places.servers), those on a CPU left out."""
    named = {key: [[visible[gpu] for gpu in group] for group in groups] for key, groups in gpus.items()}
    return tuple(plan for group in launched_groups(config) for plan in _plans(group, named.get(group.key, ())))


def server_groups(config: RunConfig) -> tuple[WorkerGroup, ...]:
    """All that have servers, started or running."""
    return tuple(group for group in worker_groups(config) if group.engine.servers is not None)


def launched_groups(config: RunConfig) -> tuple[WorkerGroup, ...]:
    """Those whose servers the launcher starts."""
    return tuple(group for group in server_groups(config) if not urls_of(group.config, group.role))


def with_server(config: RunConfig, key: str, server: ServerConfig) -> RunConfig:
    """Other settings for the servers of one group."""
    replace = msgspec.structs.replace
    if key == "actor":
        return replace(config, actor=replace(config.actor, server=server))
    if key == "teacher":
        return replace(config, teacher=replace(config.teacher, server=server))
    name = key.partition(".")[2]
    return replace(config, pools={**config.pools, name: replace(config.pools[name], server=server)})


def _plans(group: WorkerGroup, gpus: Sequence[Sequence[str]]) -> Iterator[ServerPlan]:
    """`gpus`: of each server of the group; empty on a CPU."""
    role, config = group.role, group.config
    server = server_config(config, role)
    launch = servers_of(config, role).launch(server)
    for index in range(count(config, role)):
        yield ServerPlan(
            worker=f"{role}-{group.first + index}",
            model=config.models.student if role == "actor" else config.models.teacher,
            python=launch.python,
            shim=launch.forked,
            gpus=tuple(gpus[index]) if gpus else (),
            args=launch.arguments,
            host=server.host,
            port=server.port + index if server.port else 0,
            start_timeout_s=server.start_timeout_s,
        )


def count(config: RunConfig, role: EngineRole) -> int:
    return config.actors if role == "actor" else config.teachers


def contradictions(config: RunConfig) -> Iterator[str]:
    """Of the user's own arguments with the rest of the configuration. `server.device` is cpu or cuda."""
    for key, role, _, own in launched_groups(config):
        yield from servers_of(own, role).contradictions(key, role, server_config(own, role))


def overfull_gpus(config: RunConfig, places: Places) -> Iterator[str]:
    """GPUs that a server shares with others without leaving them room: unless it is told, it takes nearly all of it."""
    others: dict[int, list[str]] = {}
    for who, gpu in places.seats.items():
        if gpu is not None:
            others.setdefault(gpu, []).append("the learner" if who == LEARNER else who)
    servers: dict[int, list[tuple[str, str, float | None]]] = {}
    for key, role, first, own in launched_groups(config):
        fraction = servers_of(own, role).memory_fraction(server_config(own, role).args)
        for index, group in enumerate(places.servers.get(key, ())):
            for gpu in group:
                servers.setdefault(gpu, []).append((key, f"server-{role}-{first + index}", fraction))
    for gpu, here in sorted(servers.items()):
        beside = others.get(gpu, [])
        names = [*beside, *(name for _, name, _ in here)]
        if len(names) < 2:
            continue
        for key, name, fraction in here:
            if fraction is None:
                yield (
                    f"{key}.server.args: {name} shares GPU {gpu} with "
                    f"{', '.join(other for other in names if other != name)}, and without --mem-fraction-static takes "
                    f"nearly all of its memory; expected e.g. --{key}.server.args=--mem-fraction-static,0.3"
                )
        total = sum(fraction or 0.0 for _, _, fraction in here)
        if total > 1.0 or (beside and total >= 1.0):
            yield (
                f"{here[0][0]}.server.args: the servers on GPU {gpu} take {total:g} of its memory together "
                f"(--mem-fraction-static), expected less than 1 with {', '.join(names)} on it"
            )


def server_environment(config: RunConfig, temporary: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What all servers get beside this process's environment: their sockets' files in a folder that is removed at the
    end, and gloo on the interface towards the learner (it would look the host name up otherwise)."""
    told = {"TMPDIR": str(temporary)}
    if "GLOO_SOCKET_IFNAME" not in base and (interface := _interface_for(config.weights.host)):
        told["GLOO_SOCKET_IFNAME"] = interface
    told |= {name: value for name, value in FAILED_GROUPS.items() if name not in base}
    return told | nccl_environment(config, base)


def nccl_environment(config: RunConfig, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What NCCL must find alike on all sides of the weight group: in the learner, in embedded actors and in servers.

    NCCL_SOCKET_IFNAME: on one machine the loopback, which NCCL passes over by itself where there is another interface.
    What the actors' servers set themselves (`ServerEngine.nccl_environment`), the others must have, too. What the user
    has set is left alone: all sides inherit it."""
    told: dict[str, str] = {}
    if is_local(config.weights.host) and (interface := interface_of(config.weights.host)):
        told["NCCL_SOCKET_IFNAME"] = interface
    if (servers := engine_of(config, "actor").servers) is not None:
        told |= servers.nccl_environment(config.actor.server)
    return {name: value for name, value in told.items() if name not in base}


def _interface_for(learner_host: str) -> str | None:
    """By which the learner publishes, or, where that is another machine, by which it is reached."""
    if (own := interface_of(learner_host)) is not None:
        return own
    try:
        with socket.socket(socket.AF_INET6 if ":" in learner_host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((learner_host, 9))  # sends nothing; the kernel chooses the way
            return interface_of(str(probe.getsockname()[0]))
    except OSError:
        return None


def interface_of(host: str) -> str | None:
    """Name of the network interface that has this address, None where none has."""
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
    """Where this machine finds a server that listens on `host`: all addresses means loopback too."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def url_of(host: str, port: int) -> str:
    host = reachable_host(host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
