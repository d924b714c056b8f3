"""Places the parts of a run: an engine for each role, a device for each process, and the backend that carries weights.

The launcher decides all of it before anything starts; these are pure functions of what is installed and what was asked
for. `engine = auto` is decided first, so that everything behind it, and config.yaml of the run, has engines by name.
Each embedded worker receives its device in StartRole; the learner reads the weight backend from its configuration.

NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected", initTransportsRank in its init.cc; asked for,
members on a shared GPU say that they are hosts of their own, launch.servers.plan) and ranks with different versions
("Mismatched NCCL version detected", bootstrap.cc and init.cc), and it needs a GPU on every rank. gloo works with all
layouts, more slowly, because weights go through host memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

from stillhouse.engines.config import ServerConfig
from stillhouse.engines.provider import AutoFacts
from stillhouse.engines.registry import AUTO, AUTO_ORDER, EMBEDDED, find_engine
from stillhouse.launch.checks.threads import Threads, plan_threads
from stillhouse.launch.config.pools import engine_of, teacher_pools, worker_groups
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.machine.devices import fill_devices
from stillhouse.launch.machine.gpus import LEARNER, RANK, Places, Seat, Wanted, place
from stillhouse.launch.machine.machine import Interpreters, Machine
from stillhouse.launch.machine.torch_build import TorchBuild
from stillhouse.launch.servers.plan import launched_groups
from stillhouse.protocol.addresses import is_local
from stillhouse.protocol.context import WorkerRole

replace = msgspec.structs.replace
EMBEDDED_COST: Final = (
    "SGLang is meant for GPUs; the embedded engine goes through Python for each token: 751 to 3,045 tokens/s with 1.7 "
    "billion parameters on an H100, where it was measured"
)
Backend: TypeAlias = Literal["gloo", "nccl"]


class Member(NamedTuple):
    """What the learner, or an actor (or its server), contributes to the weight group."""

    who: str
    gpus: tuple[int, ...] | None
    """One rank on each; empty: on the CPU; None: unknown, because the user started its server."""
    nccl: str | None
    """Version that its interpreter loads; None: unknown."""
    python: str
    """Its interpreter. Members with the same interpreter have the same NCCL, known or not."""


class Choice(NamedTuple):
    backend: Backend
    why: str
    shared: bool = False
    """NCCL among members of which some share a GPU: over sockets, each as a host of its own."""


def choose_weight_backend(wanted: Literal["auto", "gloo", "nccl"], learner: Member, actors: Sequence[Member]) -> Choice:
    """Choose nccl if it can work, else gloo. Under `auto`, a shared GPU and anything unknown mean gloo. Raises
    ValueError if `wanted` is nccl and it cannot work."""
    if wanted == "gloo":
        return Choice("gloo", "as configured")
    if impossible := next(_impossible(learner, actors), None):
        if wanted == "nccl":
            raise ValueError(f"weights.backend: got nccl, but {impossible}; use gloo or auto")
        return Choice("gloo", impossible)
    shared = next(_shared(learner, actors), None)
    if wanted == "nccl":
        why = f"as configured; {shared}, so it goes over NCCL's sockets" if shared else "as configured"
        return Choice("nccl", why, shared is not None)
    if shared:
        return Choice("gloo", f"{shared}, and NCCL takes one rank per GPU and host")
    if unknown := next(_unknown(learner, actors), None):
        return Choice("gloo", unknown)
    return Choice("nccl", f"a GPU each, NCCL {learner.nccl or 'of one interpreter'}")


def _shared(learner: Member, actors: Sequence[Member]) -> Iterator[str]:
    holders: dict[int, str] = dict.fromkeys(learner.gpus or (), "the learner")
    for actor in actors:
        for gpu in actor.gpus or ():
            if gpu in holders:
                yield f"{holders[gpu]} and {actor.who} share GPU {gpu}"
            holders[gpu] = actor.who


def _impossible(learner: Member, actors: Sequence[Member]) -> Iterator[str]:
    for member in (learner, *actors):
        if member.gpus == ():
            yield f"{'the learner' if member is learner else member.who} is on the CPU"
    for actor in actors:
        if actor.nccl and learner.nccl and actor.nccl != learner.nccl:
            yield (
                f"the learner has NCCL {learner.nccl} ({learner.python}) and {actor.who} {actor.nccl} "
                f"({actor.python}), and NCCL takes equal versions only"
            )


def _unknown(learner: Member, actors: Sequence[Member]) -> Iterator[str]:
    if not actors:
        yield "actors that join may have no GPU of their own"
    for actor in actors:
        if actor.gpus is None:
            yield f"the GPU and the NCCL of {actor.who} are not known, because the user started its server"
    for member in (learner, *actors):
        if member.nccl is None and any(actor.python != learner.python for actor in actors):
            yield f"no installed wheel says which NCCL {member.python} has, and it must be the same for all"


class Placement(NamedTuple):
    """The device and the threads of each process, and the weight backend."""

    places: Places = Places({}, {})
    weights: Choice = Choice("gloo", "nothing is placed")
    threads: Threads = Threads()
    text: str = ""
    """One line to print; empty: nothing was placed."""

    def device(self, role: WorkerRole, index: int) -> str:
        """Torch device of an embedded worker; empty if none was assigned, and for servers."""
        who = _seat(role, index)
        if who not in self.places.seats:
            return ""
        gpu = self.gpu(role, index)
        return "cpu" if gpu is None else f"cuda:{gpu}"

    def gpu(self, role: WorkerRole, index: int) -> int | None:
        """The GPU of an embedded worker, by its position; None if it has none, and for servers."""
        return self.places.seats.get(_seat(role, index))

    def threads_of(self, role: WorkerRole, index: int) -> int:
        """Native threads of a worker; of each rank, for a learner of several."""
        return self.threads.each.get(_seat(role, index), 1)


def _seat(role: WorkerRole, index: int) -> str:
    return LEARNER if role == "learner" else f"{role}-{index}"


NOWHERE = Placement()
"""No device is assigned: each worker resolves `auto` in the configuration itself."""


def place_run(
    config: RunConfig,
    machine: Machine,
    interpreters: Interpreters,
    why: Mapping[str, str],
    *,
    learner_here: bool = True,
) -> Placement:
    """Assign devices, threads and the weight backend. `config`: no engine is auto, `server.device` is cpu or cuda,
    models are folders. `why`: reasons of the chosen engines. `learner_here`: the learner, or ranks of it, are on this
    machine. Raises ValueError if something does not fit."""
    own = interpreters.own()
    n = min(1, len(machine.gpus)) if config.launch.share == "turns" else len(machine.gpus)
    places = place(n, list(_seats(config, usable=n > 0 and (own.has_gpu_code or machine.pretended))), _wanted(config))
    members = list(_actors(config, places, interpreters))
    gpu = places.seats[LEARNER]
    learner = Member(LEARNER, () if gpu is None else (gpu,), own.nccl_version, sys.executable)
    wanted = config.weights.backend if config.weights.makes_groups else "gloo"
    weights = choose_weight_backend(wanted, learner, members)
    if config.weights.way == "ipc" and gpu is not None and (elsewhere := [*_elsewhere(config, places)]):
        raise ValueError(
            f"weights.transport: got ipc, expected all actors on the learner's GPU {machine.gpus[gpu]} alone, and "
            f"{', '.join(elsewhere)} is not; use auto"
        )
    threads = plan_threads(config, places.seats, machine.cores, learner_here=learner_here)
    lines = list(_described(config, machine, places, weights, why, own))
    text = "; ".join(filter(None, (*lines[0 if learner_here else 1 :], threads.text)))
    return Placement(places, weights, threads, text)


def shares_memory(config: RunConfig, places: Places) -> bool:
    """Whether weights can go by memory of the one GPU of the learner and all actors, and nothing else is asked for."""
    weights = config.weights
    asked = weights.transport != "auto" or weights.backend != "auto"
    asked |= config.launch.share == "turns"  # two buckets would stay on the device, whoever's turn it is
    if asked or weights.adapters == "on" or not is_local(weights.host):
        return False
    servers = engine_of(config, "actor").servers
    if servers is not None and not servers.takes_ipc:
        return False
    one_gpu = places.seats.get(LEARNER) is not None and config.learner.ranks == 1
    return one_gpu and config.actors > 0 and not config.actor.urls and not [*_elsewhere(config, places)]


def _elsewhere(config: RunConfig, places: Places) -> Iterator[str]:
    """The actors that are not, or not only, on the learner's GPU."""
    gpu = places.seats.get(LEARNER)
    servers = places.servers.get("actor", ())
    for index in range(config.actors):
        who = f"actor-{index}"
        on = servers[index] if index < len(servers) else (places.seats.get(who),)
        if on != (gpu,):
            yield who


def _seats(config: RunConfig, *, usable: bool) -> Iterator[Seat]:
    def device(asked: str) -> str:
        return asked if asked != "auto" and (usable or asked == "cpu") else "cuda" if usable else "cpu"

    yield Seat(LEARNER, "learner.device", device(config.learner.device))
    for rank in range(1, config.learner.ranks_each):
        yield Seat(f"{RANK}{rank}", "learner.ranks", device(config.learner.device))

    groups = worker_groups(config)
    for group in (*groups[1:], groups[0]):  # teachers before actors (launch.machine.gpus.place)
        where = group.engine.device(group.role, group.settings)
        key, on = (f"{group.key}.{where.key}", device(where.device)) if where is not None else (group.key, "cpu")
        if group.engine.servers is None:
            yield from (Seat(who, key, on) for who in group.workers)


def _wanted(config: RunConfig) -> list[Wanted]:
    groups = [(group, group.settings.server) for group in launched_groups(config)]
    return [Wanted(group.key, group.n, server.tp, server.gpus) for group, server in groups if server.device == "cuda"]


def _actors(config: RunConfig, places: Places, interpreters: Interpreters) -> Iterator[Member]:
    """The actors as members of the weight group."""
    actor = config.actor
    servers = engine_of(config, "actor").servers
    if servers is None:
        for index in range(config.actors):
            gpu = places.seats[f"actor-{index}"]
            yield Member(
                f"actor-{index}", () if gpu is None else (gpu,), interpreters.own().nccl_version, sys.executable
            )
    elif actor.server.device == "cpu":
        yield from (Member(f"actor-{index}", (), None, "") for index in range(config.actors))
    elif actor.urls:
        yield from (Member(f"actor-{index}", None, None, url) for index, url in enumerate(actor.urls))
    else:
        python = servers.choose_python(actor.server)
        version = interpreters.look(python, servers.modules).torch.nccl_version
        for index, gpus in enumerate(places.servers["actor"]):
            yield Member(f"actor-{index}", gpus, version, str(python))


def wrong_nccl(config: RunConfig, places: Places, interpreters: Interpreters) -> Iterator[str]:
    """Report interpreters for GPUs whose NCCL wheel is for another CUDA version than their torch."""
    if any(gpu is not None for gpu in places.seats.values()) and (wrong := interpreters.own().wrong_wheel()):
        yield f"learner.device: {sys.executable} {wrong}, or say device = cpu"
    for group in launched_groups(config):
        server, servers = group.settings.server, group.servers
        python = servers.choose_python(server)
        if server.device == "cuda" and (wrong := interpreters.look(python, servers.modules).torch.wrong_wheel()):
            yield f"{group.key}.server.python: {python} {wrong}"


def _described(
    config: RunConfig, machine: Machine, places: Places, weights: Choice, why: Mapping[str, str], own: TorchBuild
) -> Iterator[str]:
    def gpus(who: Sequence[str]) -> str:
        on = [places.seats[name] for name in who]
        names = [machine.gpus[gpu] for gpu in on if gpu is not None]
        return f"GPU {', '.join(names)}" if names else "the CPU"

    cpu_build = machine.gpus and not own.has_gpu_code and not machine.pretended
    ranks = f" of {config.learner.ranks} ranks" if config.learner.ranks > 1 else ""
    on = gpus([who for who in places.seats if who == LEARNER or who.startswith(RANK)])
    yield f"learner{ranks} on {on}" + (f" (torch {own.version} has no CUDA)" if cpu_build else "")
    for group in worker_groups(config):
        if not group.n:
            continue
        if servers := places.servers.get(group.key, ()):
            where = f"GPU {', '.join('+'.join(machine.gpus[gpu] for gpu in each) for each in servers)}"
        elif group.engine.servers is None:
            where = gpus(group.workers)
        else:
            where = "the CPU" if group.settings.server.device == "cpu" else "GPUs of their own"
        pool = f" of {group.key.removeprefix('pools.')}" if group.key.startswith("pools.") else ""
        chosen = f" (auto: {why[group.key]})" if group.key in why else ""
        yield f"{group.role}s{pool}: {group.engine.title} on {where}{chosen}"
    copies = " from copies in host memory" if config.weights.staging == "host" else ""
    if config.weights.way == "ipc":
        yield f"weights by memory that the learner shares{copies} (weights.transport ipc)"
    elif config.weights.way == "wire":
        yield "weights over encrypted connections to the learner (weights.transport wire)"
    else:
        yield f"weights by {weights.backend}{copies if weights.backend == 'nccl' else ''} ({weights.why})"


class Engines(NamedTuple):
    """The chosen engines."""

    config: RunConfig
    """The configuration, in which no engine is auto."""
    why: dict[str, str]
    """actor, teacher or pools.NAME -> the reason, for each engine that was auto."""


def choose_engines(config: RunConfig, machine: Machine, interpreters: Interpreters) -> Engines:
    """Replace each `engine = auto` by the first engine of `AUTO_ORDER` that fits the machine, else the embedded one."""
    filled = fill_devices(config)
    why: dict[str, str] = {}
    actor = config.actor
    if actor.engine == AUTO:
        engine, why["actor"] = _choose(filled.actor.server, filled.actor.urls, "", "", machine, interpreters)
        if engine == EMBEDDED and machine.gpus:
            why["actor"] += f"; {EMBEDDED_COST}"
        actor = replace(actor, engine=engine)
    average = config.learner.ema.pool if config.learner.ema.decay else None
    pools = dict(config.pools)
    teacher = config.teacher
    for pool in teacher_pools(filled):
        own = pool.config.teacher
        if own.engine != AUTO:
            continue
        unfit = "it scores with the student's average" if pool.name == average else ""
        unfit = unfit or ("quantize is of embedded teachers" if own.quantize != "none" else "")
        engine, why[pool.key] = _choose(own.server, own.urls, own.api.url, unfit, machine, interpreters)
        if config.pools:
            pools[pool.name] = replace(pools[pool.name], engine=engine)
        else:
            teacher = replace(teacher, engine=engine)
    if teacher.engine == AUTO:  # unused: all pools have their own engine, or there is no teacher
        teacher = replace(teacher, engine=EMBEDDED)
    return Engines(replace(config, actor=actor, teacher=teacher, pools=pools), why)


def _choose(
    server: ServerConfig, urls: tuple[str, ...], api: str, in_process: str, machine: Machine, interpreters: Interpreters
) -> tuple[str, str]:
    """Returns (engine, reason). `in_process`: why the engine must run in the worker's process; empty: it need not."""
    why = ""
    for name in AUTO_ORDER:
        provider = find_engine(name)
        modules = provider.servers.modules if provider.servers is not None else ()
        look = functools.partial(interpreters.look, modules=modules)
        fits, why = provider.fits(AutoFacts(server, urls, api, in_process, bool(machine.gpus), look))
        if fits:
            return name, why
    return EMBEDDED, why
