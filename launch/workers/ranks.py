"""The process of a learner of several ranks (`learner.ranks`).

They are processes of their own, started and watched by torch's elastic launcher
(the one of `torchrun`), which runs in the learner's process: it gives each rank its number and a store to meet in, and
if one ends with an error or is killed, it ends the others. They are not started again here. The learner then ends, and
its supervisor starts it again as it does with any learner: all ranks go on from the newest checkpoint, under a new
epoch, while buffer and actors stay.

Rank 0 has the loop and the links, and its exit code is the learner's. The others follow it (learner.ranks.follow)."""

from __future__ import annotations

import logging
import math
import os
import signal
import tempfile
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec

from launch.config.run import RunConfig
from launch.processes.lifeline import die_with_parent
from launch.workers.main_process import outcome_of, prepare
from protocol.context import ExitCode, RoleContext

log = logging.getLogger(__name__)
CHECK_EVERY_S: Final = 0.2
"""Interval at which the elastic launcher looks whether a rank has ended."""


def main(ctx: RoleContext[RunConfig]) -> int:
    """Entry point of the learner's process. It is spawned and not forked: it only starts and watches ranks."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with tempfile.TemporaryDirectory(prefix="stillhouse-ranks-") as folder:  # where ranks leave what they failed with
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ctx.config.learner.ranks,
            run_id=ctx.incarnation,
            role="learner",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=CHECK_EVERY_S,
            start_method="spawn",
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            shutdown_timeout=math.ceil(ctx.config.launch.shutdown_grace_s),
        )
        logging.getLogger("torch.distributed.elastic").setLevel(logging.WARNING)
        try:
            return int(elastic_launch(config, run_rank)(ctx, os.getpid())[0])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            log.error("rank %d ended first, with exit code %d", rank, failure.exitcode)
            return failure.exitcode if rank == 0 and failure.exitcode > 0 else ExitCode.FAILED
        except SignalException as asked:
            log.info("asked to leave by signal %d", asked.sigval)
            return ExitCode.TERMINATED


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
    log.info("%s of %s starts, pid %d", name, os.environ["WORLD_SIZE"], os.getpid())
    if code := outcome_of(name, partial(_joined, ctx)):
        os._exit(code)
    return code


def _joined(ctx: RoleContext[RunConfig]) -> int:
    import torch

    from learner.ranks import follow
    from learner.ranks.group import RankGroup
    from learner.worker import main as learner_main
    from models.loading import resolve_device

    learner = ctx.config.learner
    device = torch.device(resolve_device(learner.device))
    ranks = RankGroup(device=device, timeout_s=learner.rank_timeout_s, replicas=learner.replicas)
    if ranks.rank:
        code = follow.main(ctx, ranks)
    else:
        try:
            code = learner_main(ctx, ranks)
        finally:
            ranks.lead("end")
    ranks.close()
    return code


def _on_device(config: RunConfig, local_rank: int) -> RunConfig:
    """Each rank has a GPU of its own, from that of rank 0 on."""
    kind, _, first = config.learner.device.partition(":")
    if kind != "cuda":
        return config
    device = f"cuda:{int(first or 0) + local_rank}"
    return msgspec.structs.replace(config, learner=msgspec.structs.replace(config.learner, device=device))
