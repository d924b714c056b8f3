"""The configuration of a joining launcher: the run's, with what may differ on this host. It is checked before anything
starts, as launch.checks.preflight does for a run.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

import msgspec

from stillhouse.engines.provider import EngineRole
from stillhouse.engines.registry import EMBEDDED
from stillhouse.launch.checks.model_files import find_model, model_type, read_vocabulary
from stillhouse.launch.checks.placement import Placement, choose_engines
from stillhouse.launch.checks.server_preflight import check_servers
from stillhouse.launch.config.command_line import build_run, put_overrides
from stillhouse.launch.config.consistency import check_join, open_ports
from stillhouse.launch.config.keys import Key
from stillhouse.launch.config.pools import engine_of, teacher_pools
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import Plain, get, put
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.join.target import HOW_TO_LISTEN, Target
from stillhouse.launch.machine.devices import lacking_cuda
from stillhouse.launch.machine.machine import Interpreters, find_machine
from stillhouse.launch.processes.slots import worker_name
from stillhouse.launch.servers.plan import ServerPlan
from stillhouse.protocol.addresses import is_local
from stillhouse.protocol.handshake import vocab_fingerprint
from stillhouse.protocol.processors import usable_cores
from stillhouse.weights.config import NCCL_SOCKETS_ONLY, sockets_only

OWN_BRANCHES: Final = ("actors", "teachers", "models.", "actor.", "teacher.", "launch.")
"""Keys that a joining host may set; all others belong to the run."""
OF_THE_RUN: Final = (
    *("teacher.payload", "teacher.top_k", "teacher.top_k_of", "teacher.top_mass", "teacher.tail"),
    "teacher.tokenizer",
    "launch.prometheus",
)
"""Exceptions: the learner's objective needs the same value from every teacher, and the run's own
endpoint shows all workers."""
LEFT_OUT: Final = ("urls", "server.gpus", "server.host", "server.port")
"""Keys of actor and teacher that describe the run's own machine; they are reset to their defaults."""
ROLES: Final[tuple[EngineRole, ...]] = ("actor", "teacher")
MODELS: Final[Mapping[EngineRole, str]] = {"actor": "student", "teacher": "teacher"}
replace = msgspec.structs.replace


class Joining(NamedTuple):
    """What a joining launcher is to start."""

    config: RunConfig
    """`actors` and `teachers` count those that join; models are folders on this host."""
    roles: tuple[EngineRole, ...]
    model_types: tuple[str, ...]
    servers: tuple[ServerPlan, ...]
    placement: Placement
    """Devices of embedded engines."""
    warnings: tuple[str, ...]
    """What those who join open to the network, although it was allowed."""


def refuse_foreign(overrides: Sequence[tuple[Key, str]]) -> None:
    """Raise ConfigError for keys that a join cannot set, whichever run it joins."""
    mistakes = [
        f"--{key.name}: belongs to the run, which has set it; a join can set actors, teachers, and most of "
        "models.*, actor.*, teacher.* and launch.*"
        for key, _ in overrides
        if not key.name.startswith(OWN_BRANCHES) or key.name in OF_THE_RUN
    ]
    if mistakes:
        raise ConfigError(*mistakes)


def check_joining(target: Target, overrides: Sequence[tuple[Key, str]], prefix: str, *, ranks: int = 0) -> Joining:
    """Check everything; raises ConfigError with all mistakes. `ranks`: of the learner that join."""
    config = _resolved(target, overrides)
    asked = {"actor": config.actors, "teacher": config.teachers}
    roles: tuple[EngineRole, ...] = tuple(role for role in ROLES if asked[role])
    if not roles and not ranks:
        raise ConfigError("say how many workers join: --actors N, --teachers M, --learner-ranks K, or several of them")
    interpreters = Interpreters()
    # The run's own workers have all cores of its machine.
    machine = find_machine()._replace(cores=usable_cores() if target.elsewhere else 0.0)
    config, why_engines = choose_engines(config, machine, interpreters)
    mistakes: list[str] = target.check_keys(roles)
    folders: dict[EngineRole, Path] = {}
    for role in roles:
        key, named = f"models.{MODELS[role]}", getattr(config.models, MODELS[role])
        try:
            folders[role] = find_model(key, named)
        except ConfigError as error:
            of_run = named == getattr(target.config.models, MODELS[role])
            hint = f"; the run has it there, use --{key} FOLDER to say where it is here" if of_run else ""
            mistakes += [f"{mistake}{hint}" for mistake in error.mistakes]
    if ranks:
        mistakes += _ranks(target, config, ranks)
    if "teacher" in roles and config.teacher.tokenizer == "other":
        try:
            find_model("models.student", config.models.student, weights=False)
        except ConfigError as error:
            mistakes += [
                f"{mistake}; teachers with another tokenizer read the student's too" for mistake in error.mistakes
            ]
    mistakes += _vocabularies(target, config, folders)
    mistakes += check_join(config, folders.get("actor"))
    if "actor" in roles and target.elsewhere and is_local(config.weights.host):
        mistakes.append(
            f"weights.host: the learner sends weights on {config.weights.host}, which only its own "
            f"machine reaches; from here teachers can join, but no actors; {HOW_TO_LISTEN}"
        )
    models = {MODELS[role]: str(folder) for role, folder in folders.items()}
    config = replace(config, models=replace(config.models, **models))
    config = replace(config, launch=replace(config.launch, share="together"))  # turns are among the run's own workers
    here = _of_this_machine(config, roles, elsewhere=target.elsewhere and not ranks)
    mistakes += lacking_cuda(here, machine, interpreters.own())
    why = {role: why_engines[role] for role in roles if role in why_engines}
    servers = check_servers(here, machine, interpreters, why, learner_here=bool(ranks) or not target.elsewhere)
    mistakes += servers.mistakes
    if not mistakes and "actor" in roles:
        mistakes += _one_kind(target.config, servers.config)
        mistakes += _gpus_of_their_own(target, config, servers.placement)
    if mistakes:
        raise ConfigError(*mistakes)
    return Joining(
        config=servers.config,
        roles=roles,
        model_types=tuple(sorted({model_type(folder) for folder in folders.values()})),
        servers=tuple(_renamed(servers.plans, prefix)),
        placement=servers.placement,
        warnings=tuple(open_ports(target.config, actors="actor" in roles, ranks=ranks > 0)),
    )


def _ranks(target: Target, config: RunConfig, ranks: int) -> Iterator[str]:
    learner = target.config.learner
    if learner.hosts == 1:
        yield "--learner-ranks: the learner of this run has one host; expected a run with learner.hosts above 1"
    elif ranks != learner.ranks_each:
        yield (
            f"--learner-ranks: got {ranks}, expected {learner.ranks_each}: the run has {learner.ranks} ranks on "
            f"{learner.hosts} hosts (learner.ranks, learner.hosts)"
        )
    if not (target.home.parent / "run.json").is_file():
        yield ("--learner-ranks: expected the run's own folder as RUN, because all ranks write checkpoints into it")
    if target.elsewhere and is_local(config.weights.host):
        yield (
            f"weights.host: the learner's ranks meet at {config.weights.host}, which only the run's machine reaches; "
            f"{HOW_TO_LISTEN}"
        )
    if not Path(config.models.student).is_dir():
        yield f"models.student: no folder {config.models.student}, from which the ranks read the student's shape"


def _resolved(target: Target, overrides: Sequence[tuple[Key, str]]) -> RunConfig:
    plain = cast(Plain, msgspec.to_builtins(_of_pool(target, overrides)))
    defaults = cast(Plain, msgspec.to_builtins(RunConfig()))
    for key in (f"{role}.{name}" for role in ROLES for name in LEFT_OUT):
        put(plain, key, get(defaults, key))
    put(plain, "actors", None)
    put(plain, "teachers", None)
    mistakes = put_overrides(plain, overrides)
    for number, urls in (("actors", get(plain, "actor.urls")), ("teachers", get(plain, "teacher.urls"))):
        if get(plain, number) is None:
            put(plain, number, len(cast(list[object], urls)))
    return build_run(plain, mistakes)


def _of_pool(target: Target, overrides: Sequence[tuple[Key, str]]) -> RunConfig:
    """The run's configuration as teachers of the wanted pool see it. Raises ConfigError if the pool must be named."""
    run, wanted = target.config, {key.name: text for key, text in overrides}
    pools = {pool.name: pool.config for pool in teacher_pools(run)}
    name = wanted.get("teacher.pool", next(iter(pools)))
    if len(pools) > 1 and wanted.get("teachers", "0") != "0" and "teacher.pool" not in wanted:
        raise ConfigError(f"--pool: say which pool the teachers serve: {', '.join(pools)}")
    return replace(pools.get(name, run), pools={}, teachers=0)


def _vocabularies(target: Target, config: RunConfig, folders: Mapping[EngineRole, Path]) -> Iterator[str]:
    """Compare vocabularies, if the run's student can be read from here; the handshake with the buffer compares in any
    case."""
    student = Path(target.config.models.student) / "tokenizer.json"
    theirs = read_vocabulary(student)
    for role, folder in folders.items():
        if role == "teacher" and config.teacher.tokenizer == "other":
            continue
        ours = read_vocabulary(folder / "tokenizer.json")
        if ours is not None and theirs is not None and vocab_fingerprint(ours) != vocab_fingerprint(theirs):
            yield (
                f"models.{MODELS[role]}: {folder} has another vocabulary than the run's student, {student.parent}: "
                "the same ids would mean other text"
            )


def _one_kind(run: RunConfig, ours: RunConfig) -> Iterator[str]:
    """All actors of a run are in one weight group, and must be alike."""
    pairs = [("actor.engine", run.actor.engine, ours.actor.engine)]
    if run.actor.engine == ours.actor.engine and engine_of(run, "actor").servers is not None:
        pairs += [
            ("actor.server.tp", str(run.actor.server.tp), str(ours.actor.server.tp)),
            ("actor.server.device", run.actor.server.device, ours.actor.server.device),
        ]
    for key, theirs, here in pairs:
        if theirs != here:
            yield f"{key}: got {here}, expected {theirs}, as the run has it: all actors take the weights together"


def _of_this_machine(config: RunConfig, roles: Sequence[EngineRole], *, elsewhere: bool) -> RunConfig:
    """Roles that do not join need neither servers nor GPUs here; neither does a learner on another machine."""
    if "actor" not in roles:
        torch = replace(config.actor.torch, device="cpu")
        config = replace(config, actor=replace(config.actor, engine=EMBEDDED, torch=torch))
    if "teacher" not in roles:
        config = replace(config, teacher=replace(config.teacher, engine=EMBEDDED, device="cpu"))
    weights = replace(config.weights, backend="gloo")  # the run has chosen it; do not check it here
    device = "cpu" if elsewhere else config.learner.device
    return replace(config, weights=weights, learner=replace(config.learner, device=device))


def _gpus_of_their_own(target: Target, asked: RunConfig, placement: Placement) -> Iterator[str]:
    """NCCL allows one rank per GPU and host; two would break the whole group, again and again. Where it is told to use
    sockets only, as a run on a shared GPU tells it, each member is a host of its own."""
    if target.config.weights.backend != "nccl" or sockets_only(os.environ):
        return
    where = engine_of(asked, "actor").device("actor", asked.actor)
    key = "actor.server.gpus" if where is None else f"actor.{where.key}"
    places = placement.places
    gpus = [gpu for who, gpu in places.seats.items() if who.startswith("actor")]
    gpus += [gpu for group in places.servers.get("actor", ()) for gpu in group]
    if None in gpus or len(set(gpus)) < len(gpus):
        yield (
            f"{key}: the run sends weights by NCCL, which needs a GPU of its own for each actor; expected as many free "
            "GPUs here as actors that join, or a run with --weights.backend gloo; for a run whose members share GPUs, "
            f"set {' '.join(f'{name}={value}' for name, value in NCCL_SOCKETS_ONLY.items())}"
        )
    named = asked.actor.server.gpus or (where is not None and where.device.startswith("cuda:"))
    if not target.elsewhere and not named:
        yield (
            f"{key}: the run sends weights by NCCL, and has GPUs of this machine; expected {key} with GPUs that none "
            "of its learner and actors has"
        )


def _renamed(plans: Sequence[ServerPlan], prefix: str) -> Iterator[ServerPlan]:
    for plan in plans:
        role, _, index = plan.worker.rpartition("-")
        yield dataclasses.replace(plan, worker=worker_name(role, int(index), prefix))
