"""Devices, without torch: what `device` in the configuration means, and whether it is available."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, TypeVar

import msgspec

from stillhouse.launch.config.pools import worker_groups
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.machine.machine import Machine
from stillhouse.launch.machine.torch_build import TorchBuild
from stillhouse.models.description import resolve_dtype
from stillhouse.protocol.context import WorkerRole
from stillhouse.teachers.config import PoolConfig

StructT = TypeVar("StructT", bound=msgspec.Struct)
replace = msgspec.structs.replace


def fill_devices(config: RunConfig) -> RunConfig:
    """Replace every `auto` below by the run's `device`."""
    if config.device == "auto":
        return config
    device, actor, teacher = config.device, config.actor, config.teacher
    actor = replace(actor, torch=_filled(actor.torch, device), server=_filled(actor.server, device))
    teacher = _filled(replace(teacher, server=_filled(teacher.server, device)), device)
    pools = {name: _filled_pool(pool, device) for name, pool in config.pools.items()}
    return replace(config, learner=_filled(config.learner, device), actor=actor, teacher=teacher, pools=pools)


def fill_dtype(config: RunConfig, device: str) -> RunConfig:
    """Decide actor.torch.dtype by the actors' device (empty: there are none here), for all who must know it."""
    torch = config.actor.torch
    if torch.dtype != "auto" or not device:
        return config
    return replace(config, actor=replace(config.actor, torch=replace(torch, dtype=resolve_dtype("auto", device))))


def _filled(struct: StructT, device: Literal["cpu", "cuda"]) -> StructT:
    return replace(struct, device=device) if getattr(struct, "device", None) == "auto" else struct


def _filled_pool(pool: PoolConfig, device: Literal["cpu", "cuda"]) -> PoolConfig:
    return _filled(replace(pool, server=_filled(pool.server, device) if pool.server else None), device)


def on_device(config: RunConfig, role: WorkerRole, device: str) -> RunConfig:
    """The worker's configuration with the device that the launcher chose for it."""
    if role == "learner":
        return replace(config, learner=replace(config.learner, device=device))
    if role == "actor":
        return replace(config, actor=replace(config.actor, torch=replace(config.actor.torch, device=device)))
    return replace(config, teacher=replace(config.teacher, device=device))


def lacking_cuda(config: RunConfig, machine: Machine, own: TorchBuild) -> Iterator[str]:
    """One line for the learner and for each embedded engine that is configured for CUDA when there is no GPU, or none
    that this interpreter's torch (`own`) can use."""
    wanted = {key: device for key, device in torch_devices(config) if device.startswith("cuda")}
    if machine.pretended or (machine.gpus and own.has_gpu_code):
        return
    if machine.gpus:
        why = f"but this torch, {own.version}, is a build without CUDA; install one with it, or use cpu"
    elif machine.unlisted:
        why = f"but the GPUs of this machine cannot be found: {machine.unlisted}; put nvidia-smi into PATH, or use cpu"
    else:
        why = "but this machine shows no GPU (nvidia-smi lists none); use auto or cpu"
    for key, device in wanted.items():
        named = "device" if config.device == "cuda" else key
        yield f"{named}: got {device}, {why}"
        if named == "device":
            return


def torch_devices(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, device) for the learner and all embedded engines."""
    config = fill_devices(config)
    yield "learner.device", config.learner.device
    for group in worker_groups(config):
        if (where := group.engine.device(group.role, group.settings)) is not None:
            yield f"{group.key}.{where.key}", where.device
