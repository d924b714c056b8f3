"""A run whose actors and teachers are on the nodes of a Ray cluster.

The launcher, the buffer and the learner (or its first ranks) run where the command is typed, on a node of the cluster.
Each other host of the topology (section `cluster`) is an actor of Ray with the host's resources, which joins the run as
`stillhouse join` does from anywhere. Ray finds the nodes and counts the resources; data never goes through Ray.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from stillhouse.buffer.config import BufferConfig
from stillhouse.launch.checks.preflight import replace
from stillhouse.launch.config.files import read_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.join.invite import ROLES, files_to_join
from stillhouse.launch.join.target import listening_address, running_record
from stillhouse.launch.processes.local import LocalProcesses
from stillhouse.launch.ray.backend import RayBackend
from stillhouse.launch.ray.cluster import RayCluster
from stillhouse.launch.ray.hosts import RayHosts
from stillhouse.launch.topology import HostGroup, beside_the_learner, host_groups, said_of_groups
from stillhouse.launch.workers.launch_plan import LaunchPlan, MakeBackend
from stillhouse.launch.workers.start_role import WorkFolder
from stillhouse.protocol.addresses import is_local
from stillhouse.weights.config import WeightsConfig


def check_on_ray(config: RunConfig, former: Path | None, pretended_gpus: int | None) -> tuple[RunConfig, list[str]]:
    """The configuration of the run itself, and its hosts, in lines for the user. `pretended_gpus`: those of this
    machine, if no cluster is named. `former`: as in `on_ray`.

    Raises ConfigError for a configuration that cannot be spread or a cluster that is too small, and LaunchError without
    a cluster."""
    config = of_the_former(config, former)
    cluster = RayCluster.connect(pretended_gpus)
    try:
        groups = hosts_on_ray(config, one_machine=cluster.ours)
        cluster.check(groups)
        return beside_the_learner(config), ["Ray: its nodes have room for", *said_of_groups(groups)]
    finally:
        cluster.close()


@contextmanager
def on_ray(config: RunConfig, former: Path | None) -> Generator[tuple[RunConfig, MakeBackend]]:
    """Connect to Ray. Gives the configuration of the run itself and the backend that adds the hosts. `former`: the
    folder of a run that is resumed.

    Raises ConfigError for a configuration that cannot be spread, and LaunchError without a cluster that has room."""
    config = of_the_former(config, former)
    cluster = RayCluster.connect()
    try:
        groups = hosts_on_ray(config, one_machine=cluster.ours)
        if cluster.ours:  # nobody adds nodes to it
            cluster.check(groups)
        cluster.hold(groups[0].host, config.launch.ready_timeout_s)
        run = beside_the_learner(config)
        if not is_local(cluster.address):
            run = replace(
                run,
                buffer=replace(run.buffer, bind=f"tcp://{cluster.address}:0"),
                weights=replace(run.weights, host=cluster.address),
            )

        def make_backend(plan: LaunchPlan, folder: WorkFolder) -> RayBackend:
            def files() -> Mapping[str, bytes]:
                record = running_record(folder.path)
                return files_to_join(folder.path, record.name, listening_address(folder.path, record), ROLES)

            hosts = RayHosts(cluster, plan.config, folder.path, groups[1:], files)
            return RayBackend(LocalProcesses(plan, folder), hosts)

        yield run, make_backend
    finally:
        cluster.close()


def hosts_on_ray(config: RunConfig, *, one_machine: bool) -> tuple[HostGroup, ...]:
    """All groups of hosts; that of the run is the first. Raises ConfigError if there is none beside it."""
    groups: Sequence[HostGroup] = host_groups(config, one_machine=one_machine)
    if len(groups) > 1:
        return tuple(groups)
    raise ConfigError(
        f"launch.backend: got ray, but no role has workers on hosts of its own (actors = {config.actors}, "
        f"cluster.actors.each = {config.cluster.actors.each}, teachers = {config.teachers}, cluster.teachers.each = "
        f"{config.cluster.teachers.each}); set `each` to the number of workers on each host, and name the numbers "
        "again where a run is resumed: its config.yaml has what its own launcher started"
    )


def of_the_former(config: RunConfig, former: Path | None) -> RunConfig:
    """Without the addresses of the node on which a run was that is resumed from this folder."""
    if former is None or not (former / "config.yaml").is_file():
        return config
    recorded = read_config(former / "config.yaml")
    if config.buffer.bind == recorded.buffer.bind:
        config = replace(config, buffer=replace(config.buffer, bind=BufferConfig().bind))
    if config.weights.host == recorded.weights.host:
        config = replace(config, weights=replace(config.weights, host=WeightsConfig().host))
    return config
