"""What a launcher has decided before it starts anything. Made once, by launch.run or launch.join.command."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from engines.sglang.http import API_KEY_VARIABLE
from launch.checks.placement import NOWHERE, Placement
from launch.config.run import RunConfig
from launch.servers.plan import ServerPlan, nccl_environment
from launch.workers.roles import ENTRIES
from protocol.context import WorkerRole


def _new_key() -> str:
    return secrets.token_hex(32)  # letters and digits: a key that began with - would be taken for an argument


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """What is started, and how."""

    config: RunConfig
    began_s: float
    """Monotonic time at which the user's command started."""
    resume: bool = False
    """Go on from the newest checkpoint in the run folder."""
    preload: tuple[str, ...] = ()
    """Modules that workers need and a backend may import once for all of them."""
    entries: Mapping[WorkerRole, str] = field(default_factory=lambda: ENTRIES)
    """Role -> `module:function` of its main."""
    servers: tuple[ServerPlan, ...] = ()
    """Inference servers, started with the workers."""
    placement: Placement = NOWHERE
    """Devices of embedded workers."""
    api_key: str = field(default_factory=_new_key, repr=False)
    """Which the servers ask for."""

    @property
    def environment(self) -> dict[str, str]:
        """What workers get beside their host's environment. Holds the servers' key: on no command line, in no log."""
        return nccl_environment(self.config) | ({API_KEY_VARIABLE: self.api_key} if self.servers else {})
