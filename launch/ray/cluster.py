"""The Ray cluster of a run: an existing one (RAY_ADDRESS), or one that is started here and ends with the run."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from launch.config.cluster import HostConfig
from launch.errors import LaunchError
from launch.ray.host import JoiningHost

ADDRESS_VARIABLE: Final = "RAY_ADDRESS"
REPO_ROOT: Final = Path(__file__).resolve().parents[2]
RESERVE_S: Final = 60.0
"""How long the run waits for its own place on this node."""
LOOPBACK: Final = "127.0.0.1"
ON_LOOPBACK_VARIABLE: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""With 0, Ray takes the loopback address for its node's, on Linux too, and all its processes listen only there. Its own
option for a node's address turns 127.0.0.1 into the machine's. Ray reads it when it is imported."""


@dataclass(slots=True)
class RayCluster:
    """A connection to Ray. `close` ends what was started on it."""

    ray: Any
    """The module."""
    address: str
    """This node's address, at which the other nodes reach the run."""
    ours: bool
    """Started here: all of it is on this machine."""

    @classmethod
    def connect(cls) -> RayCluster:
        """Raises LaunchError without the package, or when there is no cluster at RAY_ADDRESS."""
        if importlib.util.find_spec("ray") is None:
            raise LaunchError(
                "launch.backend: got ray, but the package ray is not installed here; pip install 'stillhouse[ray]' "
                "(in a clone: make ray)"
            )
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = os.environ.get(ADDRESS_VARIABLE, "")
        if not address:
            os.environ[ON_LOOPBACK_VARIABLE] = "0"
        ray: Any = importlib.import_module("ray")
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "CRITICAL", "namespace": "stillhouse"}
        try:
            if address:
                ray.init(address=address, **options)
            else:
                ray.init(address="local", include_dashboard=False, **options)
        except Exception as error:  # Ray's own, of many kinds
            where = f"at {ADDRESS_VARIABLE}={address}" if address else "that could be started here"
            raise LaunchError(f"launch.backend: no Ray cluster {where}: {str(error).strip()}") from error
        return cls(ray, str(ray.util.get_node_ip_address()) if address else LOOPBACK, not address)

    def reserve(self, host: HostConfig) -> Any:
        """Hold what the run itself needs of this node, as long as the handle lives; the GPUs that Ray gives it become
        those of this process. Raises LaunchError when this node does not have as much."""
        affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        here = affinity(self.ray.get_runtime_context().get_node_id(), soft=False)
        holder = self.ray.remote(_Holder).options(**self._wanted(host), scheduling_strategy=here).remote()
        ready, _ = self.ray.wait([answer := holder.gpus.remote()], timeout=RESERVE_S)
        if not ready:
            raise LaunchError(
                f"cluster.learner: this node has {self.free()} free, expected {said_of(host)} for the run itself; "
                "give the node more, or set cluster.learner.cpus, gpus and memory_gib"
            )
        gpus: Sequence[int] = self.ray.get(answer)
        if host.gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        return holder

    def place(self, host: HostConfig, files: Mapping[str, bytes], words: Sequence[str]) -> Any:
        """Ask Ray for a host; returns at once. Its first answer comes when Ray has found room."""
        variables = {"PYTHONPATH": str(REPO_ROOT), "PYTHONUNBUFFERED": "1"}
        if not host.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ""  # Ray hides GPUs only from those that asked for some
        options = self._wanted(host) | {"runtime_env": {"env_vars": variables}, "max_restarts": 0}
        return self.ray.remote(_RayHost).options(**options).remote(dict(files), list(words))

    def free(self) -> str:
        """What is free on the whole cluster, for a message."""
        free: Mapping[str, float] = self.ray.available_resources()
        return (
            f"{free.get('CPU', 0):.0f} CPUs, {free.get('GPU', 0):.0f} GPUs and {free.get('memory', 0) / 2**30:.0f} GiB"
        )

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self.ray.shutdown()

    @staticmethod
    def _wanted(host: HostConfig) -> dict[str, Any]:
        return {"num_cpus": host.cpus, "num_gpus": host.gpus, "memory": host.memory_gib << 30}


def said_of(host: HostConfig) -> str:
    """Its resources, for a message."""
    return f"{host.cpus} CPUs, {host.gpus} GPUs and {host.memory_gib} GiB"


class _Holder:
    """An actor of Ray that only occupies resources."""

    def gpus(self) -> list[int]:
        return list(importlib.import_module("ray").get_gpu_ids())


class _RayHost(JoiningHost):
    """JoiningHost in a process of Ray, which knows its node."""

    def __init__(self, files: Mapping[str, bytes], words: Sequence[str]) -> None:
        super().__init__(files, words, str(importlib.import_module("ray").util.get_node_ip_address()))
