"""The Ray cluster of a run: an existing one (RAY_ADDRESS), or one that is started here and ends with the run."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from stillhouse import SOURCES
from stillhouse.launch.config.cluster import HostConfig
from stillhouse.launch.errors import ConfigError, LaunchError
from stillhouse.launch.ray.host import JoiningHost
from stillhouse.launch.ray.reservation import Look, Reservation
from stillhouse.launch.ray.room import ADVICE, GIB, Node, said_of_layout, spread_over, too_small
from stillhouse.launch.topology import HostGroup, resources

ADDRESS_VARIABLE: Final = "RAY_ADDRESS"
START_S: Final = 60.0
"""How long a process of Ray may take to start."""
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
    reservation: Reservation
    holder: Any = None
    """Keeps the run's own GPUs."""

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
        return cls(ray, here, not address, Reservation(ray.get_runtime_context().get_node_id()))

    def check(self, groups: Sequence[HostGroup]) -> list[str]:
        """Where the hosts could be, for the user. Raises ConfigError when the cluster is too small, even if nothing
        else runs there."""
        nodes = self.nodes()
        layout = spread_over(groups, nodes)
        if layout.missing:
            where = "that is started on this machine" if self.ours else f"at {os.environ[ADDRESS_VARIABLE]}"
            named = f"name a larger cluster by {ADDRESS_VARIABLE}, " if self.ours else ""
            small = too_small(groups, nodes, layout)
            raise ConfigError(f"launch.backend: the Ray cluster {where} is too small: {small}; {named}{ADVICE}")
        return list(said_of_layout(nodes, layout))

    def reserve(self, groups: Sequence[HostGroup], limit_s: float, say: Callable[[str], None]) -> None:
        """Hold what all hosts need, as long as this connection lives; the GPUs that Ray gives the run itself become
        those of this process. Raises LaunchError when there is no room within the limit, and at once for a cluster
        that can never have it."""
        if self.ours:
            self.check(groups)
        self.reservation.ask(groups)
        self.reservation.wait(groups, limit_s, Look(self.nodes, self.free), say)
        if groups[0].host.gpus:
            self.holder = self.ray.remote(_Holder).options(**self._options("run", groups[0].host)).remote()
            got: Sequence[int] = self.ray.get(self.holder.gpus.remote(), timeout=START_S)
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, got))

    def place(
        self,
        name: str,
        host: HostConfig,
        files: Mapping[str, bytes],
        words: Sequence[str],
        variables: Mapping[str, str],
    ) -> Any:
        """Start a host where it has room; returns at once. Its first answer comes when Ray has found that. `variables`:
        of the join's environment. They go with the files, because Ray shows everybody what is in a `runtime_env`."""
        shown = {"PYTHONPATH": str(SOURCES), "PYTHONUNBUFFERED": "1"}
        if not host.gpus:
            shown["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides GPUs only from those that asked for some
        options = self._options(name, host) | {"runtime_env": {"env_vars": shown}, "max_restarts": 0}
        return self.ray.remote(_RayHost).options(**options).remote(dict(files), list(words), dict(variables))

    def release(self, name: str) -> None:
        """Give back what a host had that has left."""
        self.reservation.release(name)

    def nodes(self) -> list[Node]:
        """All nodes that are alive, with what they have when they are empty; this one is the first."""
        here = self.ray.get_runtime_context().get_node_id()
        nodes = [
            Node(
                str(node["NodeManagerAddress"]),
                float(node["Resources"].get("CPU", 0)),
                float(node["Resources"].get("GPU", 0)),
                float(node["Resources"].get("memory", 0)),
                node["NodeID"] == here,
            )
            for node in self.ray.nodes()
            if node["Alive"]
        ]
        return sorted(nodes, key=lambda node: (not node.here, node.address))

    def free(self) -> str:
        """What is free on the whole cluster, for a message."""
        free: Mapping[str, float] = self.ray.available_resources()
        return resources(int(free.get("CPU", 0)), int(free.get("GPU", 0)), int(free.get("memory", 0) // GIB))

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self.ray.shutdown()

    def _options(self, name: str, host: HostConfig) -> dict[str, Any]:
        asked = {"num_cpus": host.cpus, "num_gpus": host.gpus, "memory": host.memory_gib * GIB}
        return {**asked, "scheduling_strategy": self.reservation.strategy(name, host)}


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

    def __init__(self, files: Mapping[str, bytes], words: Sequence[str], variables: Mapping[str, str]) -> None:
        super().__init__(files, words, str(importlib.import_module("ray").util.get_node_ip_address()), variables)
