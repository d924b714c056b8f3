"""A run whose actors and teachers are on the nodes of a Ray cluster.

The launcher, the buffer and the learner (or its first ranks) run where the command is typed, on a node of the cluster.
Each other host of the topology (section `cluster`) is an actor of Ray with the host's resources, which joins the run as
`stillhouse join` does from anywhere. Ray finds the nodes and counts the resources; data never goes through Ray.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from stillhouse.buffer.config import BufferConfig
from stillhouse.launch.checks.preflight import replace
from stillhouse.launch.config.files import read_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.join.export import ROLES, files_to_join
from stillhouse.launch.join.target import listening_address, running_record
from stillhouse.launch.processes.local import LocalProcesses
from stillhouse.launch.ray.autoscale import Autoscaler
from stillhouse.launch.ray.backend import RayBackend
from stillhouse.launch.ray.cluster import RayCluster
from stillhouse.launch.ray.default_hosts import with_hosts
from stillhouse.launch.ray.hosts import RayHosts
from stillhouse.launch.ray.wanted import Wanted, read_wanted
from stillhouse.launch.topology import beside_the_learner, host_groups, said_of_groups, teachers_by_pool
from stillhouse.launch.workers.launch_plan import LaunchPlan, MakeBackend
from stillhouse.launch.workers.start_role import WorkFolder
from stillhouse.protocol.addresses import is_local
from stillhouse.weights.config import WeightsConfig


def check_on_ray(config: RunConfig, former: Path | None, pretended_gpus: int | None) -> tuple[RunConfig, list[str]]:
    """The configuration of the run itself, and where the hosts could be, in lines for the user. `pretended_gpus`: those
    of this machine, if no cluster is named. `former`: as in `on_ray`.

    Raises ConfigError for a configuration that cannot be spread or a cluster that is too small, and LaunchError without
    a cluster."""
    config = of_the_former(config, former)
    cluster = RayCluster.connect(pretended_gpus)
    try:
        config = with_hosts(config, cluster.nodes())
        return beside_the_learner(config), cluster.check(host_groups(config, one_machine=cluster.ours))
    finally:
        cluster.close()


@contextmanager
def on_ray(config: RunConfig, former: Path | None) -> Generator[tuple[RunConfig, MakeBackend]]:
    """Connect to Ray and reserve there what all hosts need. Gives the configuration of the run itself and the backend
    that adds the hosts. `former`: the folder of a run that is resumed, whose hosts.json has the numbers of workers.

    Raises ConfigError for a configuration that cannot be spread, and LaunchError without a cluster that has room."""
    config = of_the_former(config, former)
    cluster = RayCluster.connect()
    try:
        named, config = config, with_hosts(config, cluster.nodes())
        groups = host_groups(config, one_machine=cluster.ours)
        if config != named:
            _say("Ray: hosts by what the nodes have, as the section `cluster` names none:")
            print(*said_of_groups(groups), sep="\n", file=sys.stderr, flush=True)
        cluster.reserve(groups, config.launch.ready_timeout_s, _say)
        run = beside_the_learner(config)
        if not is_local(cluster.address):
            run = replace(
                run,
                buffer=replace(run.buffer, bind=f"tcp://{cluster.address}:0"),
                weights=replace(run.weights, host=cluster.address),
            )
        wanted = wanted_of(config)

        def make_backend(plan: LaunchPlan, folder: WorkFolder) -> RayBackend:
            def files() -> Mapping[str, bytes]:
                record = running_record(folder.path)
                return files_to_join(folder.path, record.name, listening_address(folder.path, record), ROLES)

            scaler = Autoscaler(config.cluster, folder.path, time.monotonic(), fewest=config.buffer.shards)
            hosts = RayHosts(
                cluster,
                plan.config,
                folder.path,
                wanted,
                files,
                decide=scaler.decide,
            )
            return RayBackend(LocalProcesses(plan, folder), hosts)

        yield run, make_backend
    finally:
        cluster.close()


def _say(text: str) -> None:
    """Before the run has a folder and a status."""
    print(f"stillhouse: {text}", file=sys.stderr, flush=True)


def wanted_of(config: RunConfig) -> Wanted:
    """The workers of roles that have hosts of their own."""
    cluster, teachers = config.cluster, teachers_by_pool(config)
    return Wanted(
        actors=config.actors if cluster.actors.each else 0,
        teachers=teachers.pop("", 0) if cluster.teachers.each else 0,
        pools=teachers if cluster.teachers.each else {},
    )


def of_the_former(config: RunConfig, former: Path | None) -> RunConfig:
    """The topology of a run that is resumed from this folder: its numbers of workers, where none are named now, and no
    address of the node on which it was."""
    if former is None or (wanted := read_wanted(former)) is None:
        return config
    recorded, cluster = read_config(former / "config.yaml"), config.cluster
    if config.buffer.bind == recorded.buffer.bind:
        config = replace(config, buffer=replace(config.buffer, bind=BufferConfig().bind))
    if config.weights.host == recorded.weights.host:
        config = replace(config, weights=replace(config.weights, host=WeightsConfig().host))
    if cluster.actors.each and not config.actors:
        config = replace(config, actors=wanted.actors)
    if cluster.teachers.each and not config.teachers:
        pools = {name: replace(pool, count=wanted.pools.get(name, 0)) for name, pool in config.pools.items()}
        config = replace(config, teachers=sum(wanted.teachers_by_pool.values()), pools=pools)
    return config
