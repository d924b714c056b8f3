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
    ServedRole,
    ServerPlan,
    count,
    free_port,
    launched_roles,
    plan_servers,
    server_config,
)

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
    roles = launched_roles(config)
    gpus = visible_gpus() if any(server_config(config, role).device != "cpu" for role in roles) else ()
    for role in roles:
        config = _with_device(config, role, gpus)
    for role in roles:
        mistakes += _lacking(config, role, gpus)
    plans: tuple[ServerPlan, ...] = ()
    if not mistakes:
        try:
            plans = plan_servers(config, gpus)
        except ValueError as error:
            mistakes.append(str(error))
    return Found(config, plans, attached.features, mistakes)


def _with_device(config: RunConfig, role: ServedRole, gpus: Sequence[str]) -> RunConfig:
    replace = msgspec.structs.replace
    server = server_config(config, role)
    if server.device == "auto":
        server = replace(server, device="cuda" if gpus else "cpu")
    if role == "actor":
        return replace(config, actor=replace(config.actor, server=server))
    return replace(config, teacher=replace(config.teacher, server=server))


def _lacking(config: RunConfig, role: ServedRole, gpus: Sequence[str]) -> Iterator[str]:
    server = server_config(config, role)
    if server.device == "cuda" and not gpus:
        yield f"{role}.server.device: got cuda, but nvidia-smi shows no GPU that CUDA_VISIBLE_DEVICES allows; use cpu"
    if lacking := lacks_sglang(role, server, choose_python(server)):
        yield lacking
    last = server.port + count(config, role) - 1
    if server.port and last > HIGHEST_PORT:
        yield f"{role}.server.port: got {server.port}, and {count(config, role)} servers would need ports up to {last}"
    try:
        free_port(server.host)
    except OSError as error:
        yield f"{role}.server.host: cannot listen on {server.host!r} ({error}); expected an address of this machine"
