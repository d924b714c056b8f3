"""Before a run on SGLang starts: where its servers are or will be, and whether all that they need is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from engines.sglang_features import Features
from launch.attached import ask_servers
from launch.config import RunConfig
from launch.devices import fill_devices, visible_gpus
from launch.interpreter import choose_python, lacks_sglang
from launch.server_features import grouped
from launch.server_plan import (
    ServerGroup,
    ServerPlan,
    count,
    launched_groups,
    plan_servers,
    server_config,
    with_server,
)
from protocol.ports import free_port

HIGHEST_PORT: Final = 65535


class Found(NamedTuple):
    """What the launcher goes on with."""

    config: RunConfig
    """Every `device` of a server is cpu or cuda."""
    plans: tuple[ServerPlan, ...]
    """To be started."""
    attached: list[tuple[str, Features]]
    """(worker, its running server)."""
    mistakes: list[str]

    def report(self) -> str:
        """For `--check`; empty without servers."""
        told = [grouped(self.attached)] if self.attached else []
        told += [f"{plan.name}: on {plan.place}, by {plan.python}" for plan in self.plans]
        return "\n".join(told)


def check_servers(config: RunConfig) -> Found:
    """`config`: models are folders. Running servers are asked, GPUs counted and interpreters looked at only where
    servers are wanted."""
    config = fill_devices(config)
    attached = ask_servers(config)
    config, mistakes = attached.config, list(attached.mistakes)
    launched = launched_groups(config)
    gpus = visible_gpus() if any(server_config(own, role).device != "cpu" for _, role, _, own in launched) else ()
    for key, role, _, own in launched:
        server = server_config(own, role)
        if server.device == "auto":
            config = with_server(config, key, msgspec.structs.replace(server, device="cuda" if gpus else "cpu"))
    for group in launched_groups(config):
        mistakes += _lacking(group, gpus)
    plans: tuple[ServerPlan, ...] = ()
    if not mistakes:
        try:
            plans = plan_servers(config, gpus)
        except ValueError as error:
            mistakes.append(str(error))
    return Found(config, plans, attached.features, mistakes)


def _lacking(group: ServerGroup, gpus: Sequence[str]) -> Iterator[str]:
    key, role, _, config = group
    server = server_config(config, role)
    if server.device == "cuda" and not gpus:
        yield f"{key}.server.device: got cuda, but nvidia-smi shows no GPU that CUDA_VISIBLE_DEVICES allows; use cpu"
    if lacking := lacks_sglang(key, server, choose_python(server)):
        yield lacking
    last = server.port + count(config, role) - 1
    if server.port and last > HIGHEST_PORT:
        yield f"{key}.server.port: got {server.port}, and {count(config, role)} servers would need ports up to {last}"
    try:
        free_port(server.host)
    except OSError as error:
        yield f"{key}.server.host: cannot listen on {server.host!r} ({error}); expected an address of this machine"
