"""A publisher for a fleet of actor processes, and what it announced."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from stillhouse.protocol.messages import WeightPlan, WeightVersion
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.publisher import Publisher
from tests.patience import PATIENCE_S
from tests.sim.weights.weight_actors import ActorFleet, digest_of
from tests.slow_link import SlowLink


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
    """`weights`: step -> the named tensors of its version. `changes`: of its configuration."""

    def __init__(
        self,
        fleet: ActorFleet,
        folder: Path,
        transport: str,
        weights: Callable[[int], list[tuple[str, Tensor]]],
        **changes: Any,
    ) -> None:
        self.fleet, self.folder = fleet, folder
        self.plans: list[WeightPlan] = []
        self.announced: list[WeightVersion] = []
        self.through: dict[str, int] = {}
        """Actor -> bytes per second of the link (tests.slow_link) that leads it to the learner."""
        self.links: dict[str, SlowLink] = {}
        self._weights = weights
        self._config = msgspec.structs.replace(quick(transport), **changes)
        self.publisher: Publisher | None = None

    def post_plan(self, plan: WeightPlan) -> None:
        self.plans.append(plan)
        self.fleet.post_plan(plan, self._rerouted)

    def _rerouted(self, name: str, plan: WeightPlan) -> WeightPlan:
        if name in self.through and name not in self.links:
            self.links[name] = SlowLink(plan.control, self.through[name])
        return plan if name not in self.links else msgspec.structs.replace(plan, control=self.links[name].address)

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
        for link in self.links.values():
            link.close()

    def start(self, post_plan: Callable[[WeightPlan], None] | None = None, **changes: Any) -> Publisher:
        self.publisher = Publisher(
            msgspec.structs.replace(self._config, **changes),
            snapshot_dir=self.folder,
            post_plan=post_plan or self.post_plan,
            published=lambda version, _: self.announced.append(version),
        )
        return self.publisher

    def publish(self, step: int) -> None:
        assert self.publisher is not None
        self.publisher.publish(version(step), self._weights(step))

    def begin(self, names: Sequence[str]) -> None:
        """These actors come, and have version 1."""
        assert self.publisher is not None
        self.fleet.start(names)
        self.publisher.membership(self.fleet.membership())
        self.publish(1)
        self.delivered(1)
        assert self.publisher.wait_idle(PATIENCE_S)

    def delivered(self, step: int, *names: str) -> None:
        """These actors (default: all) end up with exactly this version's tensors."""
        for staged in self.fleet.wait_for(version(step), PATIENCE_S, names or None).values():
            assert (staged.version, staged.digest) == (version(step), digest_of(self._weights(step)))

    def publish_past(self, publisher: Publisher, names: Sequence[str], stopped: str) -> None:
        """All actors have version 1; then `stopped` stands still, and the others have version 2."""
        self.begin(names)
        self.fleet.signal(stopped, signal.SIGSTOP)
        publisher.publish(version(2), self._weights(2))
        self.delivered(2, *(name for name in names if name != stopped))

    @property
    def port(self) -> int:
        """The learner's control port."""
        return int(self.plans[-1].control.rpartition(":")[2])
