"""Versions as files: real actor processes load what the learner wrote, without any process group."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from stillhouse.protocol.messages import WeightsRef
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.snapshot import snapshots
from tests.patience import PATIENCE_S, eventually
from tests.sim.weights.weight_actors import ActorFleet
from tests.weights.fleet_learner import FleetLearner, version

NAMES = ("actor-0", "actor-1")


def weights(step: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    return [("w", torch.randn(300, 256, generator=generator)), ("half", torch.randn(64, generator=generator).half())]


@pytest.fixture
def learner(tmp_path: Path) -> Iterator[FleetLearner]:
    with ActorFleet() as fleet:
        yield FleetLearner(fleet, tmp_path / "weights", "folder", weights)


def test_every_version_is_a_file_that_every_member_loads_and_no_process_group_is_made(
    learner: FleetLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_store(*_: object) -> None:
        raise AssertionError("a folder needs no store")

    monkeypatch.setattr("stillhouse.weights.transports.collective.host_store", no_store)
    with learner.start(every_version=True) as publisher:
        learner.fleet.start(NAMES)
        publisher.membership(learner.fleet.membership())
        for step in range(1, 6):
            publisher.publish(version(step), weights(step))
        assert publisher.wait_idle(PATIENCE_S)
        learner.delivered(5)
        stats = publisher.stats
    assert learner.announced == [version(step) for step in range(1, 6)]
    assert (stats.members, stats.skipped_versions_total, stats.dropped_total) == (2, 0, {})
    assert stats.snapshots_total == 5 and snapshots(learner.folder) == [version(4), version(5)]
    assert {plan.backend for plan in learner.plans} == {"folder"}
    assert stats.broadcast_bytes == sum(tensor.nbytes for _, tensor in weights(1))


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_file_that_was_damaged_is_refused_counted_and_written_anew(
    learner: FleetLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stillhouse.weights import snapshot

    write, written = snapshot.write_content, 0

    def write_and_damage(*args: Any, **kwargs: Any) -> WeightsRef:
        nonlocal written
        ref = write(*args, **kwargs)
        written += ref.version == version(2)
        if ref.version == version(2) and written == 1:
            damage(Path(ref.path))
        return ref

    monkeypatch.setattr(snapshot, "write_content", write_and_damage)
    with learner.start() as publisher:
        learner.fleet.start(NAMES)
        publisher.membership(learner.fleet.membership())
        publisher.publish(version(1), weights(1))
        learner.delivered(1)
        assert publisher.wait_idle(PATIENCE_S)
        publisher.publish(version(2), weights(2))
        learner.delivered(2)
        assert publisher.wait_idle(PATIENCE_S)
        assert publisher.stats.dropped_total == {"refused": 2}
        eventually(lambda: publisher.stats.members == 2, "both are back")
        for name in NAMES:
            report = learner.fleet.report(name)
            assert report.failure is None and report.stats["snapshots_refused_total"] == 1


def test_a_member_that_hangs_is_left_out_and_the_others_have_the_version(learner: FleetLearner) -> None:
    with learner.start(broadcast_timeout_s=1.0, rejoin_delay_s=60.0) as publisher:
        learner.publish_past(publisher, NAMES, NAMES[0])
        assert publisher.wait_idle(PATIENCE_S)
        assert publisher.stats.dropped_total == {"no_answer": 1}


def test_a_folder_that_cannot_be_written_is_counted_and_no_version_is_announced_before_it_can(
    learner: FleetLearner,
) -> None:
    learner.folder.write_text("a file where the folder should be")
    with learner.start() as publisher:
        learner.fleet.start(NAMES)
        publisher.membership(learner.fleet.membership())
        publisher.publish(version(1), weights(1))
        eventually(lambda: publisher.stats.failed_groups_total > 0, "a version that could not be sent")
        assert learner.announced == [] and publisher.stats.snapshot_failures_total > 0
        assert publisher.stats.dropped_total == {}
        learner.folder.unlink()
        learner.delivered(1)
        assert publisher.wait_idle(PATIENCE_S)
    assert learner.announced == [version(1)]


def test_a_transport_of_another_package_is_taken_by_its_name(learner: FleetLearner) -> None:
    with learner.start(transport="stillhouse.weights.transports.folder:FolderTransport"):
        pass
    with pytest.raises(
        ValueError, match=r"weights\.transport: got 'carrier_pigeon', expected one of auto, collective, wir"
    ):
        learner.start(transport="carrier_pigeon")


def test_a_transport_in_a_module_of_the_working_directory_is_found(
    learner: FleetLearner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As engines, environments and divergences are: the launcher starts Python without the directory on its path."""
    (tmp_path / "my_own_transport.py").write_text(
        "from stillhouse.weights.transports.folder import FolderTransport\nSLOW = 'not a transport'\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path not in ("", str(tmp_path))])
    with learner.start(transport="my_own_transport:FolderTransport"):
        pass
    with pytest.raises(ValueError, match="my_own_transport:SLOW is a str, expected a callable"):
        learner.start(transport="my_own_transport:SLOW")


@pytest.mark.parametrize(("field", "value"), [("backend", "nccl"), ("verify", "reload")])
def test_what_a_folder_cannot_do_is_refused(field: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{field} = {value} with transport = folder"):
        msgspec.convert({"transport": "folder", field: value}, WeightsConfig)
