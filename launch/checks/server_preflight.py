"""Checks the inference servers of a run before it starts: where they run or will run, and whether they can."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import msgspec

from stillhouse.engines.provider import ServerFacts
from stillhouse.launch.checks.adapters import choose_adapters
from stillhouse.launch.checks.memory import estimate, staged
from stillhouse.launch.checks.placement import NOWHERE, Placement, place_run, shares_memory, wrong_nccl
from stillhouse.launch.config.pools import WorkerGroup
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.machine.devices import fill_devices, fill_dtype, torch_devices
from stillhouse.launch.machine.machine import NO_GPUS, Interpreters, Machine
from stillhouse.launch.servers.attached import ask_servers, grouped
from stillhouse.launch.servers.plan import (
    ServerPlan,
    contradictions,
    launched_groups,
    plan_servers,
    with_server,
)
from stillhouse.protocol.addresses import free_port, is_local

HIGHEST_PORT: Final = 65535
replace = msgspec.structs.replace


class Found(NamedTuple):
    """The servers and the placement of a run."""

    config: RunConfig
    """The configuration, in which every server's `device` is cpu or cuda, `weights.backend` gloo or nccl, and
    `weights.adapters` on or off."""
    placement: Placement
    plans: tuple[ServerPlan, ...]
    """Servers to start."""
    attached: list[tuple[str, ServerFacts]]
    """(worker, features of its running server)."""
    mistakes: list[str]
    not_here: list[str]
    """Requirements of a pretended machine that this one does not meet."""
    memory: list[str]
    """A line to print per GPU in use: its estimated memory; empty if that is unknown."""

    def report(self) -> list[str]:
        """Lines for `--check`: what running servers can do, and where everything else will run."""
        lines = [grouped(self.attached)] if self.attached else []
        for plan in self.plans:
            added = f", with {' '.join(plan.added)}" if plan.added else ""
            lines.append(f"{plan.name}: on {plan.place}, by {plan.launch.python}{added}")
        return [*lines, self.placement.text or "devices are chosen by each worker", *self._order()]

    def _order(self) -> Iterator[str]:
        seats = self.placement.places.seats
        names = {gpu: name for plan in self.plans for gpu, name in zip(plan.devices, plan.gpus, strict=True)}
        for gpu, name in names.items():
            here = [plan.name for plan in self.plans if gpu in plan.devices]
            others = [who for who, seat in seats.items() if seat == gpu]
            if len(here) > 1 or others:
                yield f"GPU {name}: starts {', then '.join([*here, *([', '.join(others)] if others else [])])}"
        if self.config.launch.share == "turns":
            who = ", ".join([*seats, *(plan.name for plan in self.plans)])
            yield f"in turns: {who}; each loads its model in its first turn, and then leaves the device"


def check_servers(
    config: RunConfig,
    machine: Machine = NO_GPUS,
    interpreters: Interpreters | None = None,
    why: Mapping[str, str] | None = None,
    *,
    learner_here: bool = True,
) -> Found:
    """Check the servers. `config`: models are folders, no engine is auto. Running servers and interpreters are probed
    only if the run uses servers. `why`, `learner_here`: see `place_run`."""
    interpreters = interpreters or Interpreters()
    config = fill_devices(config)
    attached = ask_servers(config)
    config, mistakes = attached.config, list(attached.mistakes)
    for group in launched_groups(config):
        server = group.settings.server
        if server.device == "auto":
            config = with_server(config, group.key, replace(server, device="cuda" if machine.gpus else "cpu"))
    facts = [facts for worker, facts in attached.servers if worker.startswith("actor")]
    config, of_adapters, wrong = choose_adapters(config, facts)
    mistakes += wrong
    not_here: list[str] = []
    for group in launched_groups(config):
        lacking, others = _lacking(group, machine, interpreters, turns=config.launch.share == "turns")
        (not_here if machine.pretended else mistakes).extend(lacking)
        mistakes += others
    mistakes += _unfound_gpus(config, machine, interpreters)
    mistakes += contradictions(config)
    plans: tuple[ServerPlan, ...] = ()
    placement = NOWHERE
    memory: list[str] = []
    if not mistakes:
        try:
            place = functools.partial(
                place_run, machine=machine, interpreters=interpreters, why=why or {}, learner_here=learner_here
            )
            placement = place(config)
            config = fill_dtype(config, placement.device("actor", 0))
            if shares_memory(config, placement.places):
                by_ipc = staged(replace(config, weights=replace(config.weights, transport="ipc")), machine, placement)
                config = config if estimate(by_ipc, machine, placement).mistakes else by_ipc
            config = staged(config, machine, placement)
            placement = place(config)
            placement = placement._replace(text="; ".join(filter(None, (placement.text, of_adapters))))
        except ValueError as error:
            mistakes.append(str(error))
        else:
            mistakes += wrong_nccl(config, placement.places, interpreters)
            memory, too_large, limits = estimate(config, machine, placement)
            mistakes += too_large
            plans = plan_servers(config, machine.gpus, placement.places.servers, _added(config, interpreters, limits))
            order = {worker: place for place, worker in enumerate(limits)}
            plans = tuple(sorted(plans, key=lambda plan: order.get(plan.worker, -1)))
            config = replace(config, weights=replace(config.weights, backend=placement.weights.backend))
    return Found(config, placement, plans, attached.servers, mistakes, not_here, memory)


def _added(
    config: RunConfig, interpreters: Interpreters, limits: Mapping[str, tuple[str, ...]]
) -> dict[str, tuple[str, ...]]:
    """Worker -> the arguments that are chosen for its server."""
    added: dict[str, tuple[str, ...]] = {}
    for group in launched_groups(config):
        server, servers = group.settings.server, group.servers
        suited = servers.suited(server, interpreters.look(servers.choose_python(server), servers.modules))
        if group.role == "actor" and config.learner.routing_replay:
            suited = (*suited, *servers.experts_args)
        if config.launch.share == "turns":
            suited = (*suited, *servers.turns_args(server))
        added |= {worker: (*suited, *limits.get(worker, ())) for worker in group.workers}
    return added


def _unfound_gpus(config: RunConfig, machine: Machine, interpreters: Interpreters) -> Iterator[str]:
    """Refuse to run on the CPU by accident: the machine has a GPU driver, but its GPUs cannot be found."""
    if not machine.unlisted:
        return
    servers = [group.settings.server.device for group in launched_groups(config)]
    embedded = [device for _, device in torch_devices(config)] if interpreters.own().has_gpu_code else []
    if any(device != "cpu" for device in (*servers, *embedded)):
        yield (
            f"device: got {config.device}, but the GPUs of this machine cannot be found: {machine.unlisted}; expected "
            "nvidia-smi in PATH, or device = cpu to run on the CPU"
        )


def _lacking(
    group: WorkerGroup, machine: Machine, interpreters: Interpreters, *, turns: bool
) -> tuple[list[str], list[str]]:
    """Returns (what this machine lacks but another may have, what is wrong on any machine)."""
    key, server, servers = group.key, group.settings.server, group.servers
    lacking: list[str] = []
    others: list[str] = []
    if server.device == "cuda" and not machine.gpus and not machine.unlisted:
        others.append(
            f"{key}.server.device: got cuda, but nvidia-smi shows no GPU that CUDA_VISIBLE_DEVICES allows; use cpu"
        )
    python = servers.choose_python(server)
    look = interpreters.look(python, servers.modules)
    if missing := servers.lacks(key, server, python, look):
        lacking.append(missing)
    elif turns and server.device == "cuda" and (gone := {*servers.turns_modules} & {*look.missing}):
        lacking.append(f"launch.share: got turns, and {python} has no {', '.join(gone)}, by which servers free a GPU")
    last = server.port + group.n - 1
    if server.port and last > HIGHEST_PORT:
        others.append(f"{key}.server.port: got {server.port}, and {group.n} servers would need ports up to {last}")
    if not is_local(server.host) and not servers.launch(server).certificate:
        others.append(
            f"{key}.server.host: got {server.host}, which other machines can reach, and HTTP is not encrypted; "
            f"expected 127.0.0.1, or a certificate that is valid for the address: --{key}.server.args="
            "--ssl-certfile,FILE,--ssl-keyfile,FILE"
        )
    try:
        free_port(server.host)
    except OSError as error:
        others.append(
            f"{key}.server.host: cannot listen on {server.host!r} ({error}); expected an address of this machine"
        )
    return lacking, others
