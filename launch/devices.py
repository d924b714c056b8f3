"""Devices without torch: which GPUs this process may use, and what `device` in the configuration means."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from launch.config import RunConfig
from launch.pools import teacher_pools
from teachers.config import PoolConfig

NVIDIA_SMI_TIMEOUT_S: Final = 20.0
GPU_NODES: Final = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Where one of these is, torch may find a GPU that nvidia-smi does not list."""
StructT = TypeVar("StructT", bound=msgspec.Struct)
replace = msgspec.structs.replace


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Names for CUDA_VISIBLE_DEVICES (numbers, or what that variable has) of the GPUs that a process started here sees;
    empty without a driver. As in CUDA, the first name that is no GPU ends the list."""
    command = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if command is None:
        return ()
    try:
        told = subprocess.run(
            [command, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True, env=environment
        )
    except (OSError, subprocess.SubprocessError):
        return ()
    lines = [line for line in told.stdout.splitlines() if line.startswith("GPU ")]
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(str(i) for i in range(len(lines)))
    names: list[str] = []
    for name in (part.strip() for part in chosen.split(",")):
        known = int(name) < len(lines) if name.isdecimal() else bool(name) and f"UUID: {name}" in told.stdout
        if not known:
            break
        names.append(name)
    return tuple(names)


def fill_devices(config: RunConfig) -> RunConfig:
    """`device` of the run for every device below that is still `auto`."""
    if config.device == "auto":
        return config
    device, actor, teacher = config.device, config.actor, config.teacher
    actor = replace(actor, torch=_filled(actor.torch, device), server=_filled(actor.server, device))
    teacher = _filled(replace(teacher, server=_filled(teacher.server, device)), device)
    pools = {name: _filled_pool(pool, device) for name, pool in config.pools.items()}
    return replace(config, learner=_filled(config.learner, device), actor=actor, teacher=teacher, pools=pools)


def _filled(struct: StructT, device: Literal["cpu", "cuda"]) -> StructT:
    return replace(struct, device=device) if getattr(struct, "device", None) == "auto" else struct


def _filled_pool(pool: PoolConfig, device: Literal["cpu", "cuda"]) -> PoolConfig:
    return _filled(replace(pool, server=_filled(pool.server, device) if pool.server else None), device)


def lacking_cuda(config: RunConfig) -> Iterator[str]:
    """A line for each embedded engine, and for the learner, that is to run on CUDA on a machine without any GPU."""
    wanted = {key: device for key, device in torch_devices(config) if device.startswith("cuda")}
    if not wanted or visible_gpus() or any(Path(node).exists() for node in GPU_NODES):
        return
    for key, device in wanted.items():
        named = "device" if config.device == "cuda" else key
        yield f"{named}: got {device}, but this machine shows no GPU (nvidia-smi lists none); use auto or cpu"
        if named == "device":
            return


def torch_devices(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(key, device) of the learner and of all embedded engines."""
    config = fill_devices(config)
    yield "learner.device", config.learner.device
    if config.actor.engine == "torch":
        yield "actor.torch.device", config.actor.torch.device
    for pool in teacher_pools(config):
        if pool.config.teacher.engine == "torch":
            yield f"{pool.key}.device", pool.config.teacher.device


def torch_gpu(device: str, n_visible: int) -> int | None:
    """Position of the GPU that a torch device means, None for none. `auto` means the first one where there is one."""
    kind, _, index = device.partition(":")
    if kind == "cpu" or n_visible == 0:
        return None
    return int(index) if index.isdecimal() else 0
