"""Adapters on their way to a server: what a server sees of them when it is told to load one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor

from stillhouse.engines.sglang.adapters import ServerAdapters
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.protocol.messages import Membership, WeightVersion
from stillhouse.weights.publisher import Publisher
from stillhouse.weights.receiver import WeightReceiver
from stillhouse.weights.roster import GroupMembers
from stillhouse.weights.wire import PIECE_BYTES
from tests.patience import PATIENCE_S, eventually
from tests.sim.weights.fake_server import FakeServer, FakeServerEngine
from tests.weights.fleet_learner import quick

CONFIG = {"r": 8, "peft_type": "LORA"}


def adapters(step: int) -> list[tuple[str, Tensor]]:
    """Larger than one piece, with tensors of several sizes and in an order that is not that of their sizes."""
    generator = torch.Generator().manual_seed(step)
    shapes = {"b": (7,), "large": (PIECE_BYTES // 4 + 5,), "a": (3, 5)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


class Actor:
    """One actor process: a new engine, sink and receiver of the same server."""

    def __init__(self, server: FakeServer, folder: Path, number: int) -> None:
        self.incarnation = f"incarnation-{number}"
        self.engine = FakeServerEngine(server.url, SGLangConfig(control_timeout_s=PATIENCE_S))
        self.sink = ServerAdapters(cast("Any", self.engine), student="/nowhere", folder=folder)
        self.receiver = WeightReceiver(self.sink, name="actor-0")
        self.receiver.start()

    def close(self) -> None:
        self.receiver.close()
        self.engine.close()


class Rig:
    """A learner that publishes adapters, and an actor on a host of its own: of the learner's files it sees only what
    the transport brings."""

    def __init__(self, folder: Path) -> None:
        self.weights, self.copies = folder / "weights", folder / "adapters"
        self.server = FakeServer({})
        self.actors = [Actor(self.server, self.copies, 0)]
        self.published: list[WeightVersion] = []
        self.publisher = Publisher(
            quick("wire"),
            snapshot_dir=self.weights,
            post_plan=lambda plan: self.actors[-1].receiver.handle_plan(plan),
            published=lambda version, _: self.published.append(version),
            members=GroupMembers(kind="adapters", adapter_config=msgspec.json.encode(CONFIG)),
        )
        self.begin()

    def begin(self) -> None:
        self.publisher.membership(Membership(("actor-0",), (self.actors[-1].incarnation,)))

    def restart_actor(self) -> None:
        self.actors[-1].close()
        self.actors.append(Actor(self.server, self.copies, len(self.actors)))
        self.begin()

    def deliver(self, step: int) -> None:
        self.publisher.publish(WeightVersion(0, step), adapters(step))
        assert self.publisher.wait_idle(PATIENCE_S)
        assert self.published[-1] == WeightVersion(0, step), self.publisher.stats

    def expect_loaded(self, *steps: int) -> None:
        """These versions, and no other, and a copy of each."""
        eventually(lambda: len(self.server.adapters) == len(steps), "others are unloaded")
        for step in steps:
            folder, config, tensors = self.server.adapters[self.actors[-1].engine.labels.of(WeightVersion(0, step))]
            assert folder == str(self.copies / f"0.{step}") and config == CONFIG
            assert tensors.keys() == dict(adapters(step)).keys()
            assert all(torch.equal(tensors[name], tensor) for name, tensor in adapters(step))
        eventually(
            lambda: sorted(path.name for path in self.copies.iterdir()) == sorted(f"0.{step}" for step in steps),
            "copies of what is unloaded are gone",
        )

    def close(self) -> None:
        self.publisher.close()
        for actor in self.actors:
            actor.close()
        self.server.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def test_a_server_loads_each_version_from_a_copy_of_its_own_with_its_configuration(rig: Rig) -> None:
    for step in (1, 2, 3):
        rig.deliver(step)
        rig.expect_loaded(step)
    assert not rig.weights.exists() and rig.publisher.stats.dropped_total == {}


def test_an_actor_that_starts_again_uses_what_its_server_has_and_removes_what_it_has_not(rig: Rig) -> None:
    rig.deliver(1)
    (rig.copies / ".tmp-0.2").mkdir()  # the actor died while it copied this
    (rig.copies / "0.7").mkdir()  # the server has unloaded it, or was started again
    rig.restart_actor()
    eventually(lambda: rig.actors[-1].engine.version == WeightVersion(0, 1), "the newest version")
    rig.expect_loaded(1)
    assert [path for path, _ in rig.server.calls].count("/load_lora_adapter") == 1
    rig.deliver(2)
    rig.expect_loaded(2)
