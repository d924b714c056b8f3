"""Actors are killed, stopped, continued and restarted at random while versions are published."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.publisher import Publisher
from tests.patience import PATIENCE_S
from tests.sim.weights.weight_actors import ActorFleet, Fault, digest_of

CONFIG = WeightsConfig(
    bucket_bytes=1 << 16,
    join_timeout_s=3.0,
    broadcast_timeout_s=2.0,
    answer_grace_s=1.0,
    join_window_s=0.1,
    rejoin_delay_s=0.05,
)
NAMES = tuple(f"actor-{index}" for index in range(6))
CHAOS_S = 12.0
RECOVERY_S = PATIENCE_S


def weights(step: int) -> list[tuple[str, Tensor]]:
    """0.6 MB."""
    generator = torch.Generator().manual_seed(step)
    return [
        ("embed", torch.randn(400, 256, generator=generator)),
        ("half", torch.randn(1_000, 100, generator=generator).bfloat16()),
    ]


class Chaos:
    """One random act at a time; remembers whom it did what."""

    def __init__(self, fleet: ActorFleet, publisher: Publisher, seed: int) -> None:
        self.fleet, self.publisher, self.random = fleet, publisher, random.Random(seed)
        self.stopped: set[str] = set()
        self.dead: set[str] = set()
        self.step = 0

    def act(self) -> None:
        chance, name = self.random.random(), self.random.choice(NAMES)
        if chance < 0.15 and name not in self.dead:
            at_operation = self.random.choice([None, *range(8)])
            self.fleet.order(name, Fault(signal.SIGKILL, at_operation))
            self.dead.add(name)
        elif chance < 0.3 and name not in self.dead:
            self.fleet.signal(name, signal.SIGSTOP)
            self.stopped.add(name)
        elif chance < 0.5 and self.stopped:
            self.go_on(self.random.choice(sorted(self.stopped)))
        elif chance < 0.7 and self.dead:
            self.restart(self.random.choice(sorted(self.dead)))
            noticed = self.random.random() < 0.5  # the buffer may not have noticed yet who died
            self.publisher.membership(self.fleet.membership(without=sorted(self.dead) if noticed else ()))
        else:
            self.publish()

    def publish(self) -> None:
        self.step += 1
        self.publisher.publish(WeightVersion(0, self.step), weights(self.step))

    def go_on(self, name: str) -> None:
        self.fleet.signal(name, signal.SIGCONT)
        self.stopped.discard(name)

    def restart(self, name: str) -> None:
        self.fleet.signal(name, signal.SIGKILL)
        self.fleet.start([name])
        self.dead.discard(name)
        self.stopped.discard(name)

    def make_whole(self) -> None:
        for name in sorted(self.dead):
            self.restart(name)
        for name in sorted(self.stopped):
            self.go_on(name)
        self.publisher.membership(self.fleet.membership())


@pytest.mark.slow
def test_once_peace_returns_every_actor_has_the_newest_version_and_none_ever_had_a_wrong_one(tmp_path: Path) -> None:
    announced: list[WeightVersion] = []
    with (
        ActorFleet() as fleet,
        Publisher(
            CONFIG,
            snapshot_dir=tmp_path,
            post_plan=fleet.post_plan,
            published=lambda version, broadcast_s: announced.append(version),
            expected_actors=len(NAMES),
        ) as publisher,
    ):
        fleet.start(NAMES)
        publisher.membership(fleet.membership())
        chaos = Chaos(fleet, publisher, seed=2)
        end_s = time.monotonic() + CHAOS_S
        while time.monotonic() < end_s:
            chaos.act()
            time.sleep(chaos.random.random() * 0.2)
        chaos.make_whole()
        chaos.publish()
        newest = WeightVersion(0, chaos.step)
        fleet.wait_for(newest, RECOVERY_S)
        assert publisher.wait_idle(RECOVERY_S)
        for actor in fleet.actors.values():
            versions = [staged.version for staged in actor.staged]
            assert versions == sorted(set(versions))
            assert versions[-1] == newest
            for staged in actor.staged:
                assert staged.digest == digest_of(weights(staged.version.step))
            assert fleet.report(actor.name).failure is None
        assert announced == sorted(set(announced))
        assert announced[-1] == newest
        assert publisher.stats.members == len(NAMES)
        assert publisher.stats.failed_groups_total > 0, "nothing broke: this proved nothing"
