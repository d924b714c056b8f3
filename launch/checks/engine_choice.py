"""`engine = auto`: the first engine of `engines.registry.AUTO_ORDER` that fits the machine, the embedded one otherwise.

Decided once, before all other checks, so that what comes behind sees engines by name, and config.yaml of the run has
what was chosen.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import msgspec

from engines.config import ServerConfig
from engines.provider import Wish
from engines.registry import AUTO, AUTO_ORDER, EMBEDDED, find_engine
from launch.config.pools import teacher_pools
from launch.config.run import RunConfig
from launch.machine.devices import fill_devices
from launch.machine.machine import Interpreters, Machine

replace = msgspec.structs.replace


class Engines(NamedTuple):
    """What was chosen."""

    config: RunConfig
    """No engine is auto."""
    why: dict[str, str]
    """actor, teacher or pools.NAME -> the reason; only where it was auto."""


def choose_engines(config: RunConfig, machine: Machine, interpreters: Interpreters) -> Engines:
    """`config`: as the user gave it. An explicit engine is left as it is."""
    filled = fill_devices(config)
    why: dict[str, str] = {}
    actor = config.actor
    if actor.engine == AUTO:
        engine, why["actor"] = _choose(filled.actor.server, filled.actor.urls, "", machine, interpreters)
        actor = replace(actor, engine=engine)
    average = config.learner.ema.pool if config.learner.ema.decay else None
    pools = dict(config.pools)
    teacher = config.teacher
    for pool in teacher_pools(filled):
        own = pool.config.teacher
        if own.engine != AUTO:
            continue
        unfit = "it grades with the student's average" if pool.name == average else ""
        engine, why[pool.key] = _choose(own.server, own.urls, unfit, machine, interpreters)
        if config.pools:
            pools[pool.name] = replace(pools[pool.name], engine=engine)
        else:
            teacher = replace(teacher, engine=engine)
    if teacher.engine == AUTO:  # of nobody: all pools have their own, or there is no teacher
        teacher = replace(teacher, engine=EMBEDDED)
    return Engines(replace(config, actor=actor, teacher=teacher, pools=pools), why)


def _choose(
    server: ServerConfig, urls: tuple[str, ...], in_process: str, machine: Machine, interpreters: Interpreters
) -> tuple[str, str]:
    """(engine, why). `in_process`: why only an engine in the worker's process will do; empty: any will."""
    why = ""
    for name in AUTO_ORDER:
        provider = find_engine(name)
        modules = provider.servers.modules if provider.servers is not None else ()
        look = functools.partial(interpreters.look, modules=modules)
        fits, why = provider.fits(Wish(server, urls, in_process, bool(machine.gpus), look))
        if fits:
            return name, why
    return EMBEDDED, why
