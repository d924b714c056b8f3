"""Versions as memory that actors map: real processes and segments, which are gone afterwards whoever was killed."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from stillhouse.weights import shared_memory
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.control_messages import CpuHandle
from stillhouse.weights.errors import WeightsRefused
from stillhouse.weights.shared_memory import SEGMENTS, NoSharedMemory, export, open_memory, shareable
from tests.patience import PATIENCE_S, eventually
from tests.sim.weights.weight_actors import ActorFleet, fork_server
from tests.weights.fleet_learner import FleetLearner, version

NAMES = ("actor-0", "actor-1", "actor-2")
CPU: Final = torch.device("cpu")


def weights(step: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    rows = [(f"w{i}", torch.randn(30, 256, generator=generator)) for i in range(10)]
    return [*rows, ("half", torch.randn(61, generator=generator).half()), ("none", torch.zeros(0, 4))]


BUCKET_BYTES: Final = 65536
"""Two of the ten matrices: a version has five buckets."""
HEAD_BYTES: Final = 64
"""torch's count of the users of a segment."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The segments that this process makes."""
    found: list[Path] = []
    reserve: Callable[[Path, int], None] = vars(shared_memory)["_reserve"]

    def noted(segment: Path, n_bytes: int) -> None:
        found.append(segment)
        reserve(segment, n_bytes)

    monkeypatch.setattr(shared_memory, "_reserve", noted)
    return found


@pytest.fixture
def learner(tmp_path: Path, made: list[Path]) -> Iterator[FleetLearner]:
    with ActorFleet() as fleet, closing(FleetLearner(fleet, tmp_path / "weights", "ipc", weights)) as learner:
        yield learner


def gone(paths: list[Path]) -> bool:
    gc.collect()
    return not any(path.exists() for path in paths)


def test_every_version_reaches_every_member_out_of_two_segments_that_take_turns(
    learner: FleetLearner, made: list[Path]
) -> None:
    with learner.start(bucket_bytes=BUCKET_BYTES, every_version=True) as publisher:
        learner.fleet.start(NAMES)
        publisher.membership(learner.fleet.membership())
        for step in range(1, 6):
            publisher.publish(version(step), weights(step))
        assert publisher.wait_idle(PATIENCE_S)
        learner.delivered(5)
        stats = publisher.stats
    assert learner.announced == [version(step) for step in range(1, 6)]
    assert (stats.members, stats.skipped_versions_total, stats.dropped_total) == (3, 0, {})
    assert {(plan.backend, plan.port) for plan in learner.plans} == {("ipc", 0)}
    assert stats.snapshots_total == 0
    assert len(made) == 2 and all(path.stat().st_size <= BUCKET_BYTES + HEAD_BYTES for path in made)
    del publisher
    learner.publisher = None
    learner.fleet.close()
    eventually(lambda: gone(made), "segments are removed")


def test_a_member_that_hangs_is_left_out_and_the_others_have_the_version(learner: FleetLearner) -> None:
    with learner.start(bucket_bytes=BUCKET_BYTES, broadcast_timeout_s=2.0, rejoin_delay_s=60.0) as publisher:
        learner.begin(NAMES)
        learner.fleet.signal(NAMES[0], signal.SIGSTOP)
        publisher.publish(version(2), weights(2))
        learner.delivered(2, *NAMES[1:])
        assert publisher.wait_idle(PATIENCE_S)
        assert publisher.stats.dropped_total.total() == 1


def test_a_newcomer_gets_the_newest_version_and_who_has_it_gets_nothing(learner: FleetLearner) -> None:
    with learner.start(bucket_bytes=BUCKET_BYTES) as publisher:
        learner.begin(NAMES[:1])
        learner.fleet.start(NAMES[1:])
        publisher.membership(learner.fleet.membership())
        learner.delivered(1)


def test_bytes_that_change_while_a_member_copies_them_are_used_by_nobody(
    learner: FleetLearner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner overwrites them at once with a newer bucket, as for a member that is too late."""
    export: Callable[[Tensor], CpuHandle] = shared_memory.export
    damaged: list[bool] = []

    def overwritten(slot_b: Tensor) -> CpuHandle:
        if not damaged:
            slot_b[70] ^= 1
            damaged.append(True)
        return export(slot_b)

    monkeypatch.setattr(shared_memory, "export", overwritten)
    with learner.start(bucket_bytes=BUCKET_BYTES, rejoin_delay_s=0.1) as publisher:
        learner.fleet.start(NAMES[:1])
        publisher.membership(learner.fleet.membership())
        publisher.publish(version(1), weights(1))
        eventually(lambda: publisher.stats.dropped_total["refused"] == 1, "the member refuses")
        assert learner.announced in ([], [version(1)]) and damaged
        publisher.publish(version(2), weights(2))
        learner.delivered(2)


def send_memory(connection: Connection) -> None:
    run_B = shareable(1 << 16, CPU)
    run_B[7] = 9
    connection.send(export(run_B))
    connection.recv()


def receive_memory(connection: Connection, handle: CpuHandle) -> None:
    connection.send(int(open_memory(handle, handle.n_bytes)[7]))
    connection.recv()


def test_a_killed_receiver_and_then_a_killed_sender_leave_no_segment() -> None:
    def kill_when_it_has_said(main: Callable[..., None], *args: Any, meanwhile: Callable[[Any], None]) -> None:
        ours, theirs = fork_server().Pipe()
        process = fork_server().Process(target=main, args=(theirs, *args), daemon=True)
        process.start()
        try:
            assert ours.poll(PATIENCE_S)
            meanwhile(ours.recv())
        finally:
            process.kill()
            process.join()

    handles: list[CpuHandle] = []
    values: list[int] = []

    def receive(handle: CpuHandle) -> None:
        handles.append(handle)
        kill_when_it_has_said(receive_memory, handle, meanwhile=values.append)
        assert (SEGMENTS / handle.name.decode().lstrip("/")).exists(), "the sender still uses it"

    kill_when_it_has_said(send_memory, meanwhile=receive)
    (handle,) = handles
    assert values == [9]
    eventually(lambda: not (SEGMENTS / handle.name.decode().lstrip("/")).exists(), "the segment is removed")
    with pytest.raises(WeightsRefused, match="cannot be opened"):
        open_memory(handle, handle.n_bytes)


def test_memory_of_another_size_is_refused() -> None:
    handle = export(shareable(64, CPU))
    assert isinstance(handle, CpuHandle)
    with pytest.raises(WeightsRefused, match="has 64 bytes, expected 128"):
        open_memory(handle, 128)
    with pytest.raises(WeightsRefused, match="expected 4096"):
        open_memory(CpuHandle(handle.manager, handle.name, 4096), 4096)  # it would be read past its end: SIGBUS


def test_too_little_shared_memory_is_an_error_and_not_the_end_of_the_process() -> None:
    free = os.statvfs(SEGMENTS)
    with pytest.raises(NoSharedMemory, match="--shm-size"):
        shareable(free.f_bavail * free.f_frsize + (1 << 30), CPU)


def test_what_contradicts_it_is_refused() -> None:
    with pytest.raises(ValueError, match="ipc"):
        WeightsConfig(transport="ipc", backend="nccl")
    assert not WeightsConfig(transport="ipc").makes_groups
    WeightsConfig(transport="ipc", verify="reload")
