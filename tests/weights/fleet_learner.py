"""A publisher for a fleet of actor processes, for the transports whose members make no process group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from protocol.messages import WeightPlan, WeightVersion
from tests.patience import PATIENCE_S
from tests.sim.weights.weight_actors import ActorFleet, digest_of
from weights.config import WeightsConfig
from weights.publisher import Publisher


def version(step: int) -> WeightVersion:
    return WeightVersion(0, step)


def quick(transport: str) -> WeightsConfig:
    """Patient with slow machines, and quick to rebuild a group."""
    return WeightsConfig(
        transport=transport,
        join_timeout_s=PATIENCE_S,
        broadcast_timeout_s=PATIENCE_S,
        answer_grace_s=1.0,
        join_window_s=0.05,
        rejoin_delay_s=0.2,
    )


class FleetLearner:
    """`weights`: step -> the named tensors of its version."""

    def __init__(
        self, fleet: ActorFleet, folder: Path, transport: str, weights: Callable[[int], list[tuple[str, Tensor]]]
    ) -> None:
        self.fleet, self.folder = fleet, folder
        self.plans: list[WeightPlan] = []
        self.announced: list[WeightVersion] = []
        self._weights = weights
        self._config = quick(transport)

    def post_plan(self, plan: WeightPlan) -> None:
        self.plans.append(plan)
        self.fleet.post_plan(plan)

    def start(self, **changes: Any) -> Publisher:
        return Publisher(
            msgspec.structs.replace(self._config, **changes),
            snapshot_dir=self.folder,
            post_plan=self.post_plan,
            published=lambda version, _: self.announced.append(version),
        )

    def delivered(self, step: int, *names: str) -> None:
        """These actors (default: all) end up with exactly this version's tensors."""
        for staged in self.fleet.wait_for(version(step), PATIENCE_S, names or None).values():
            assert (staged.version, staged.digest) == (version(step), digest_of(self._weights(step)))

    @property
    def port(self) -> int:
        """The learner's control port."""
        return int(self.plans[-1].control.rpartition(":")[2])
