"""The Ray cluster of a run: an existing one (RAY_ADDRESS), or one that is started here and ends with the run.

Ray finds a node for each host and counts its resources; a host is an actor of Ray that asks for them."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stillhouse import SOURCES
from stillhouse.launch.config.cluster import HostConfig
from stillhouse.launch.errors import ConfigError, LaunchError
from stillhouse.launch.ray.host import JoiningHost
from stillhouse.launch.topology import HostGroup, resources

ADDRESS_VARIABLE: Final = "RAY_ADDRESS"
GIB: Final = 2**30
LOOPBACK: Final = "127.0.0.1"
ON_LOOPBACK_VARIABLE: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, Ray takes the loopback address for its node's, on Linux too, and all its processes listen only there. Its own
option for a node's address turns 127.0.0.1 into the machine's. Ray reads it when it is imported."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class RayCluster:
    """A connection to Ray. `close` ends what was started on it."""

    ray: Any
    """The module."""
    address: str
    """This node's address, at which the other nodes reach the run."""
    ours: bool
    """Started here: all of it is on this machine."""
    holder: Any = None
    """Keeps what the run itself needs."""

    @classmethod
    def connect(cls, pretended_gpus: int | None = None) -> RayCluster:
        """`pretended_gpus`: those of a cluster that is started here; None: what Ray finds. Raises LaunchError without
        the package, or when there is no cluster at RAY_ADDRESS."""
        if importlib.util.find_spec("ray") is None:
            raise LaunchError(
                "launch.backend: got ray, but the package ray is not installed here; pip install -e '.[ray]' "
                "(in a clone: make ray)"
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = os.environ.get(ADDRESS_VARIABLE, "")
        if not address:
            os.environ[ON_LOOPBACK_VARIABLE] = "0"
        ray: Any = importlib.import_module("ray")
        setattr(importlib.import_module("ray._private.worker"), "print_to_stdstream", _to_the_log)  # noqa: B010
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL", "namespace": "stillhouse"}
        try:
            if address:
                ray.init(address=address, **options)
            else:
                ray.init(address="local", include_dashboard=False, num_gpus=pretended_gpus, **options)
        except Exception as error:  # Ray's own, of many kinds
            where = f"at {ADDRESS_VARIABLE}={address}" if address else "that could be started here"
            raise LaunchError(f"launch.backend: no Ray cluster {where}: {str(error).strip()}") from error
        here = str(ray.util.get_node_ip_address()) if address else LOOPBACK
        return cls(ray, here, not address)

    def check(self, groups: Sequence[HostGroup]) -> None:
        """Raise ConfigError if all nodes together have less than the hosts need."""
        hosts = [group.host for group in groups for _ in group.workers]
        needed = [sum(host.cpus for host in hosts), sum(host.gpus for host in hosts)]
        needed.append(sum(host.memory_gib for host in hosts))
        has = _counted(self.ray.cluster_resources())
        if any(n > there for n, there in zip(needed, has, strict=True)):
            where = "that is started on this machine" if self.ours else f"at {os.environ[ADDRESS_VARIABLE]}"
            raise ConfigError(
                f"launch.backend: the Ray cluster {where} is too small: all hosts need {resources(*needed)}, and its "
                f"nodes have {resources(*has)}. Add nodes{f' and name them by {ADDRESS_VARIABLE}' * self.ours}, or ask "
                "for less: fewer workers, or cluster.learner, cluster.actors and cluster.teachers with fewer cpus, "
                "gpus and memory_gib"
            )

    def hold(self, host: HostConfig, limit_s: float) -> None:
        """Keep what the run itself needs on this node; the GPUs that Ray gives it become those of this process. Raises
        LaunchError when there is no room within the limit."""
        strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
        here = strategies.NodeAffinitySchedulingStrategy(self.ray.get_runtime_context().get_node_id(), soft=False)
        self.holder = self.ray.remote(_Holder).options(**_options(host), scheduling_strategy=here).remote()
        try:
            got: Sequence[int] = self.ray.get(self.holder.gpus.remote(), timeout=limit_s)
        except self.ray.exceptions.RayError as error:
            raise LaunchError(
                f"launch.backend: this node of Ray had no room for the run itself within {limit_s:.0f} s "
                f"(launch.ready_timeout_s): {resources(host.cpus, host.gpus, host.memory_gib)}, section "
                f"cluster.learner; free are {self.free()} on all nodes"
            ) from error
        if host.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, got))

    def place(self, host: HostConfig, files: Mapping[str, bytes], words: Sequence[str]) -> Any:
        """Start a host where it has room; returns at once. Its first answer comes when Ray has found that."""
        shown = {"PYTHONPATH": str(SOURCES), "PYTHONUNBUFFERED": "1"}
        if not host.gpus:
            shown["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides GPUs only from those that asked for some
        options = _options(host) | {"runtime_env": {"env_vars": shown}, "max_restarts": 0}
        options["scheduling_strategy"] = "SPREAD"
        return self.ray.remote(_RayHost).options(**options).remote(dict(files), list(words))

    def free(self) -> str:
        """What is free on the whole cluster, for a message."""
        return resources(*_counted(self.ray.available_resources()))

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self.ray.shutdown()


def _options(host: HostConfig) -> dict[str, Any]:
    return {"num_cpus": host.cpus, "num_gpus": host.gpus, "memory": host.memory_gib * GIB}


def _counted(found: Mapping[str, float]) -> tuple[int, int, int]:
    """CPUs, GPUs and GiB in Ray's own words for resources."""
    return int(found.get("CPU", 0)), int(found.get("GPU", 0)), int(found.get("memory", 0) // GIB)


def _to_the_log(data: Mapping[str, Any], **_options: Any) -> None:
    """What Ray reports of its nodes (one that died, with all its state) goes into the launcher's log. Ray would print
    it on the console, whatever log_to_driver says."""
    for line in data["lines"]:
        log.info("Ray reports: %s", line)


class _Holder:
    """An actor of Ray that only says which GPUs Ray has given to it, and keeps them."""

    def gpus(self) -> list[int]:
        return list(importlib.import_module("ray").get_gpu_ids())


class _RayHost(JoiningHost):
    """JoiningHost in a process of Ray, which knows its node."""

    def __init__(self, files: Mapping[str, bytes], words: Sequence[str]) -> None:
        super().__init__(files, words, str(importlib.import_module("ray").util.get_node_ip_address()))
