"""`engine = auto`: SGLang where GPUs and an interpreter with SGLang are found, the embedded engine otherwise.

Decided once, before all other checks, so that what comes behind sees torch or sglang only, and config.yaml of the run
has what was chosen.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from engines.sglang.config import ServerConfig
from launch.config.pools import teacher_pools
from launch.config.run import RunConfig
from launch.machine.devices import fill_devices
from launch.machine.interpreter import Interpreters, choose_python, lacks_sglang
from launch.machine.machine import Machine

ENGINE_NAMES: Final = {"torch": "embedded", "sglang": "SGLang servers"}
replace = msgspec.structs.replace


class Engines(NamedTuple):
    """What was chosen."""

    config: RunConfig
    """Each engine is torch or sglang."""
    why: dict[str, str]
    """actor, teacher or pools.NAME -> the reason; only where it was auto."""


def choose_engines(config: RunConfig, machine: Machine, interpreters: Interpreters) -> Engines:
    """`config`: as the user gave it. An explicit engine is left as it is."""
    filled = fill_devices(config)
    why: dict[str, str] = {}
    actor = config.actor
    if actor.engine == "auto":
        engine, why["actor"] = _choose(filled.actor.server, filled.actor.urls, "", machine, interpreters)
        actor = replace(actor, engine=engine)
    average = config.learner.ema.pool if config.learner.ema.decay else None
    pools = dict(config.pools)
    teacher = config.teacher
    for pool in teacher_pools(filled):
        own = pool.config.teacher
        if own.engine != "auto":
            continue
        unfit = "it grades with the student's average" if pool.name == average else ""
        engine, why[pool.key] = _choose(own.server, own.urls, unfit, machine, interpreters)
        if config.pools:
            pools[pool.name] = replace(pools[pool.name], engine=engine)
        else:
            teacher = replace(teacher, engine=engine)
    if teacher.engine == "auto":  # of nobody: all pools have their own, or there is no teacher
        teacher = replace(teacher, engine="torch")
    return Engines(replace(config, actor=actor, teacher=teacher, pools=pools), why)


def _choose(
    server: ServerConfig, urls: tuple[str, ...], unfit: str, machine: Machine, interpreters: Interpreters
) -> tuple[Literal["torch", "sglang"], str]:
    """(engine, why). `unfit`: what only the embedded engine can do; empty: nothing."""
    if urls:
        return "sglang", "urls are given"
    if unfit:
        return "torch", unfit
    if server.device == "cpu":
        return "torch", "device is cpu"
    if not machine.gpus:
        return "torch", "no GPU"
    on_gpu = replace(server, device="cuda")
    python = choose_python(on_gpu)
    if lacking := lacks_sglang("", on_gpu, python, interpreters.look(python)):
        found = lacking.partition(": ")[2].partition(",")[0].partition(";")[0]
        return "torch", f"GPUs, but {found}"
    return "sglang", f"GPUs, and SGLang in {python}"
