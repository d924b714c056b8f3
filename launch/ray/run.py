"""A run whose actors and teachers are on the nodes of a Ray cluster.

The launcher, the buffer and the learner (or its first ranks) run where the command is typed, on a node of the cluster.
Each other host of the topology (section `cluster`) is an actor of Ray with the host's resources, which joins the run as
`cluster.py join` does from anywhere. Ray finds the nodes and counts the resources; data never goes through Ray.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from launch.checks.preflight import replace
from launch.config.run import RunConfig
from launch.errors import ConfigError
from launch.join.export import ROLES, files_to_join
from launch.join.target import listening_address, running_record
from launch.processes.local import LocalProcesses
from launch.ray.autoscale import Autoscaler
from launch.ray.backend import RayBackend
from launch.ray.cluster import RayCluster
from launch.ray.hosts import RayHosts, Wanted, read_wanted
from launch.render.hosts import host_groups
from launch.workers.launch_plan import LaunchPlan, MakeBackend
from launch.workers.start_role import WorkFolder
from protocol.addresses import is_local


def beside_the_learner(config: RunConfig) -> RunConfig:
    """The configuration of the run itself: without the workers of roles that have hosts of their own."""
    cluster = config.cluster
    return replace(
        config,
        actors=0 if cluster.actors.each else config.actors,
        teachers=0 if cluster.teachers.each else config.teachers,
    )


@contextmanager
def on_ray(config: RunConfig, former: Path | None) -> Generator[tuple[RunConfig, MakeBackend]]:
    """Connect to Ray and hold the run's own resources there. Gives the configuration of the run itself and the backend
    that adds the hosts. `former`: the folder of a run that is resumed, whose hosts.json has the numbers of workers.

    Raises ConfigError for a configuration that cannot be spread, and LaunchError without a cluster that has room."""
    config = _with_former_numbers(config, former)
    cluster = RayCluster.connect()
    try:
        host_groups(config, one_machine=cluster.ours)
        if not (config.cluster.actors.each or config.cluster.teachers.each or config.learner.hosts > 1):
            raise ConfigError(
                "launch.backend: got ray, but cluster.actors.each and cluster.teachers.each are 0, so that Ray has "
                "nothing to place; set how many workers share a host of Ray's"
            )
        held = cluster.reserve(config.cluster.learner)
        run = beside_the_learner(config)
        if not is_local(cluster.address):
            run = replace(
                run,
                buffer=replace(run.buffer, bind=f"tcp://{cluster.address}:0"),
                weights=replace(run.weights, host=cluster.address),
            )
        wanted = Wanted(actors=config.actors - run.actors, teachers=config.teachers - run.teachers)

        def make_backend(plan: LaunchPlan, folder: WorkFolder) -> RayBackend:
            def files() -> Mapping[str, bytes]:
                record = running_record(folder.path)
                return files_to_join(folder.path, record.name, listening_address(folder.path, record), ROLES)

            scaler = Autoscaler(config.cluster, folder.path, time.monotonic())
            hosts = RayHosts(
                cluster,
                plan.config,
                folder.path,
                wanted,
                files,
                ranks=config.learner.hosts - 1,
                decide=scaler.decide,
            )
            return RayBackend(LocalProcesses(plan, folder), hosts)

        yield run, make_backend
        del held
    finally:
        cluster.close()


def _with_former_numbers(config: RunConfig, former: Path | None) -> RunConfig:
    if former is None or (wanted := read_wanted(former)) is None:
        return config
    cluster = config.cluster
    return replace(
        config,
        actors=wanted.actors if cluster.actors.each and not config.actors else config.actors,
        teachers=wanted.teachers if cluster.teachers.each and not config.teachers else config.teachers,
    )
