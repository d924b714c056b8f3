"""The process of a learner of several ranks (`learner.ranks`), on each host that has some (`learner.hosts`).

They are processes of their own, started and watched by torch's elastic launcher
(the one of `torchrun`), which runs in the learner's process: it gives each rank its number and a store to meet in, and
if one ends with an error or is killed, it ends the others. They are not started again here. The learner then ends, and
its supervisor starts it again as it does with any learner: all ranks go on from the newest checkpoint, under a new
epoch, while buffer and actors stay.

Rank 0 has the loop and the links, and its exit code is the learner's. The others follow it (learner.follow)."""

from __future__ import annotations

import logging
import math
import os
import signal
import tempfile
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.servers.plan import interface_for
from stillhouse.launch.workers.hosts import LOOPBACK, FolderElsewhere, HostsMissing, Rendezvous, alone, joined, led
from stillhouse.launch.workers.main_process import outcome_of, prepare
from stillhouse.protocol.children import die_with_parent
from stillhouse.protocol.context import ExitCode, RoleContext
from stillhouse.tracing import events

log = logging.getLogger(__name__)
CHECK_EVERY_S: Final = 0.2
"""Interval at which the elastic launcher looks whether a rank has ended."""
LAUNCH_TIMEOUT_S: Final = 60.0
"""Limit of the elastic launchers' exchanges before ranks start."""
BACKEND: Final = "stillhouse-hosts"


def main(ctx: RoleContext[RunConfig]) -> int:
    """Entry point of the learner's process. It is spawned and not forked: it only starts and watches ranks."""
    if ctx.config.learner.hosts == 1:
        return _launch(ctx, alone(ctx))
    return _on_hosts(ctx, led(ctx))


def join(ctx: RoleContext[RunConfig]) -> int:
    """Entry point of the process on a host that joins (launch.join). Its folder is in the run's."""
    config = ctx.config
    if config.learner.device == "auto":
        from stillhouse.models.loading import resolve_device

        learner = msgspec.structs.replace(config.learner, device=resolve_device("auto"))
        ctx = replace(ctx, config=msgspec.structs.replace(config, learner=learner))
    return _on_hosts(ctx, joined(ctx, ctx.run_dir.parents[1]))


def _on_hosts(ctx: RoleContext[RunConfig], meeting: AbstractContextManager[Rendezvous]) -> int:
    """Whatever ends the ranks on one host ends them on all."""
    place: Rendezvous | None = None
    try:
        with meeting as place:
            code = _launch(ctx, place)
            if code:
                raise _Ended(code)
    except _Ended as ended:
        code = ended.code
    except HostsMissing as error:
        log.error("%s", error)
        return ExitCode.USELESS if isinstance(error, FolderElsewhere) else ExitCode.FAILED
    except SystemExit:
        if place is None or not place.lost:
            raise
        code = int(ExitCode.FAILED)
    if place is not None and place.lost:
        log.error("the learner's ranks here were ended: %s", place.lost[0])
        return ExitCode.FAILED
    return code


class _Ended(Exception):
    """A launch ended with this code, not 0."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _launch(ctx: RoleContext[RunConfig], place: Rendezvous) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="stillhouse-ranks-") as folder:  # where ranks leave what they failed with
        config = LaunchConfig(
            min_nodes=place.hosts,
            max_nodes=place.hosts,
            nproc_per_node=ctx.config.learner.ranks_each,
            run_id=place.incarnation,
            role="learner",
            rdzv_backend=_rendezvous_at(place),
            rdzv_endpoint=f"{place.host}:{place.port}",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=CHECK_EVERY_S,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            shutdown_timeout=math.ceil(ctx.config.launch.shutdown_grace_s),
        )
        logging.getLogger("torch.distributed.elastic").setLevel(logging.WARNING)
        try:
            return max(map(int, elastic_launch(config, run_rank)(ctx, os.getpid()).values()))
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            log.error("rank %d ended first, with exit code %d", rank, failure.exitcode)
            return failure.exitcode if rank == 0 and failure.exitcode > 0 else ExitCode.FAILED
        except SignalException as asked:
            log.info("asked to leave by signal %d", asked.sigval)
            return ExitCode.TERMINATED


def _rendezvous_at(place: Rendezvous) -> str:
    """Have torch's elastic launcher meet in a store that exists. Returns the name of the backend."""
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
    from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class InStore(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return BACKEND

    def make(asked: RendezvousParameters) -> RendezvousHandler:
        handler = InStore(place.host, place.port, place.node, place.hosts, asked.run_id, round(LAUNCH_TIMEOUT_S))
        handler._store = place.store  # pyright: ignore[reportPrivateUsage] - its own would listen on all addresses
        return handler

    rendezvous_handler_registry.register(BACKEND, make)
    return BACKEND


def run_rank(ctx: RoleContext[RunConfig], launcher_pid: int) -> int:
    """Entry point of a rank's process. Returns if it ends well, otherwise ends the process with its exit code at once:
    torch's own end would wait for ranks that are dead. `launcher_pid`: its parent."""
    die_with_parent(launcher_pid)
    rank = int(os.environ["RANK"])
    name = ctx.name if rank == 0 else f"{ctx.name} rank {rank}"
    prepare(name)
    if rank:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 needs them for its last checkpoint, and tells the end
    ctx = replace(ctx, config=_on_device(ctx.config, int(os.environ["LOCAL_RANK"])))
    choose_interfaces(ctx.config)
    if rank == 0 and ctx.config.launch.trace:
        events.begin(ctx.run_dir / events.FOLDER, role=ctx.role, worker=name, incarnation=ctx.incarnation)
    log.info("%s of %s starts, pid %d", name, os.environ["WORLD_SIZE"], os.getpid())
    code = outcome_of(name, partial(_joined, ctx))
    events.end()
    if code:
        os._exit(code)
    return code


def choose_interfaces(config: RunConfig) -> None:
    """Where the ranks' sockets listen, unless the user's environment says it. On one machine gloo would take the
    address of the host's name, which others may reach. NCCL's variable is left alone there: in rank 0 it
    holds for the group of the actors, too, and they may be on other machines."""
    alone = config.learner.hosts == 1
    if interface := interface_for(LOOPBACK if alone else config.weights.host):
        for library in ("GLOO",) if alone else ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)


def _joined(ctx: RoleContext[RunConfig]) -> int:
    import torch

    from stillhouse.learner import follow
    from stillhouse.learner.ranks.group import ProcessGroup
    from stillhouse.learner.worker import main as learner_main
    from stillhouse.models.loading import resolve_device

    learner = ctx.config.learner
    device = torch.device(resolve_device(learner.device))
    ranks = ProcessGroup(
        device=device,
        timeout_s=learner.rank_timeout_s,
        replicas=learner.replicas,
        context=learner.context_parallel,
    )
    if ranks.rank:
        code = follow.main(ctx, ranks)
    else:
        try:
            code = learner_main(ctx, ranks)
        finally:
            ranks.announce("end")
    ranks.close()
    return code


def _on_device(config: RunConfig, local_rank: int) -> RunConfig:
    """Each rank has a GPU of its own, from that of rank 0 on."""
    kind, _, first = config.learner.device.partition(":")
    if kind != "cuda":
        return config
    device = f"cuda:{int(first or 0) + local_rank}"
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, device=device))
