"""What NCCL's groups do that gloo's do not, with a group that only behaves like one: no GPU here.

The rules, and where torch says so, are in docs/decisions/nccl.md.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import stillhouse.weights.group_operations
from stillhouse.engines.torch.weights import EmbeddedWeights
from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights.buckets import EqualBuckets, PackedLayout, WholeTensors, manifest_of
from stillhouse.weights.control_messages import Agreed, Round
from stillhouse.weights.errors import GroupBroken, GroupInterrupted
from stillhouse.weights.group_operations import host_store, wait_for_device
from stillhouse.weights.transports.collective import WeightGroup
from stillhouse.weights.transports.servers import ServerGroup
from tests.patience import PATIENCE_S, eventually

HOST = "127.0.0.1"
NAMED = [("large", torch.arange(1_000, dtype=torch.float32))]
LAYOUT = EqualBuckets(manifest_of(NAMED), 1_024)
FAILED = "NCCL error: remote process exited or there was a network error"


class FakeWork:
    """Its end, or its failure, is said from outside."""

    def __init__(self, *, done: bool, error: str | None) -> None:
        self.done = done
        self.error = error

    def is_completed(self) -> bool:
        return self.done or self.error is not None

    def wait(self) -> bool:
        if self.error is not None:
            raise RuntimeError(self.error)
        return True


class FakeGroup:
    """What of ProcessGroupNCCL is used. Brings member's `hello` for group 1, and nothing else."""

    def __init__(self) -> None:
        self.timeout_s = 0.0
        self.timeouts_s: list[float] = []
        """The group's, when each operation was started."""
        self.asked_s: list[float] = []
        self.sent: list[Tensor] = []
        self.connecting = threading.Event()
        self.connected = threading.Event()
        self.connected.set()
        self.error: str | None = None
        self.hangs = False
        self.aborted = threading.Event()

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout_s = timeout.total_seconds()

    def broadcast(self, tensors: list[Tensor], options: Any) -> FakeWork:
        self.connecting.set()
        self.connected.wait()
        self.timeouts_s.append(self.timeout_s)
        self.sent.append(tensors[0])
        self.asked_s.append(options.timeout.total_seconds())
        if tensors[0].dtype == torch.int64 and tensors[0].numel() == 1:
            tensors[0].fill_(1)
        return FakeWork(done=not self.hangs, error=self.error)

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGroup]:
    fake = FakeGroup()

    def new_group(*_: object) -> FakeGroup:
        return fake

    monkeypatch.setattr(stillhouse.weights.group_operations, "new_nccl_group", new_group)
    yield fake
    fake.connected.set()  # whoever is stuck in it ends


def embedded(rank: int = 1, interrupted: Callable[[], str | None] = lambda: None) -> WeightGroup:
    return WeightGroup(
        host_store(HOST), group_epoch=1, rank=rank, world_size=2, backend="nccl", interrupted=interrupted
    )


def servers(interrupted: Callable[[], str | None] = lambda: None) -> ServerGroup:
    return ServerGroup(
        host_store(HOST),
        group_name="group-1",
        world_size=2,
        backend="nccl",
        device="cpu",
        address=HOST,
        interrupted=interrupted,
    )


# ---------------------------------------------------------------------- a failed operation is a completed one


def test_an_operation_that_failed_breaks_the_group_of_an_embedded_member(fake: FakeGroup) -> None:
    group = embedded()
    group.join(PATIENCE_S)
    fake.error = FAILED
    with pytest.raises(GroupBroken, match="remote process exited"):
        group.receive(1, LAYOUT, PATIENCE_S)
    group.close()


def test_an_operation_that_failed_breaks_the_group_of_rank_0(fake: FakeGroup) -> None:
    fake.error = FAILED
    group = embedded(rank=0)
    with pytest.raises(GroupBroken, match="remote process exited"):
        group.join(PATIENCE_S)
    group.close()


def test_an_operation_that_failed_breaks_the_group_of_the_servers(fake: FakeGroup) -> None:
    layout = PackedLayout(LAYOUT.manifest, 1_024)
    group = servers()
    group.join(PATIENCE_S)
    fake.error = FAILED
    views = layout.views(torch.zeros(layout.total_bytes, dtype=torch.uint8))
    with pytest.raises(GroupBroken, match="remote process exited"):
        group.send(1, layout, WholeTensors(views), PATIENCE_S)
    group.close()


def test_an_operation_that_hangs_misses_our_deadline_and_the_group_is_aborted_when_it_is_closed(
    fake: FakeGroup,
) -> None:
    group = embedded()
    group.join(PATIENCE_S)
    fake.hangs = True
    with pytest.raises(GroupBroken, match="missed its deadline"):
        group.receive(1, LAYOUT, 0.2)
    group.close()
    assert fake.aborted.wait(PATIENCE_S)


def test_a_group_that_cannot_be_aborted_is_kept_for_a_kernel_may_still_write_into_its_memory(
    fake: FakeGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def abort() -> None:
        raise RuntimeError("ProcessGroup abort timed out")

    kept: list[list[Any]] = []
    monkeypatch.setattr(stillhouse.weights.group_operations, "_never_freed", kept)
    monkeypatch.setattr(fake, "abort", abort)
    group = embedded()
    group.join(PATIENCE_S)
    group.close()
    eventually(lambda: bool(kept), "a group that is kept")
    assert kept[0][1] is fake
    assert "abort timed out" in caplog.text


def test_servers_are_sent_the_smallest_tensor_once_more(fake: FakeGroup) -> None:
    named = [("large", torch.arange(900.0)), ("small", torch.arange(4.0)), ("other", torch.arange(900.0))]
    layout = PackedLayout(manifest_of(named), 4_096)
    views = layout.views(torch.zeros(layout.total_bytes, dtype=torch.uint8))
    for (_, view), (_, tensor) in zip(views, named, strict=True):
        view.copy_(tensor)
    group = servers()
    group.join(PATIENCE_S)
    group.send(1, layout, WholeTensors(views), PATIENCE_S)
    assert [tensor.numel() for tensor in fake.sent] == [3_616, 3_600, 16]
    assert torch.equal(fake.sent[-1].view(torch.float32), torch.arange(4.0))
    group.close()


# ---------------------------------------------------------------------- whose deadline comes first


def test_torchs_own_limit_is_behind_the_deadline_of_every_operation(fake: FakeGroup) -> None:
    """NCCL looks at the group's timeout and not at the operation's; the group was joined with a short one."""
    group = embedded(rank=0)
    group.join(5.0)
    group.send(1, LAYOUT, WholeTensors(NAMED), 600.0)
    assert len(fake.timeouts_s) == 1 + LAYOUT.n_buckets + 1
    for group_s, asked_s in zip(fake.timeouts_s, fake.asked_s, strict=True):
        assert group_s > asked_s
    assert fake.timeouts_s[-1] > 500.0
    group.close()


def test_a_group_of_ours_is_made_without_torchs_watchdogs_whatever_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    timeouts: list[timedelta] = []

    class Nccl:
        class Options:
            _timeout = timedelta()

        def __init__(self, store: object, rank: int, world_size: int, options: Nccl.Options) -> None:
            seen.update({name: value for name, value in os.environ.items() if name.startswith("TORCH_NCCL")})
            timeouts.append(options._timeout)  # pyright: ignore[reportPrivateUsage]

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    stillhouse.weights.group_operations.new_nccl_group(host_store(HOST), 0, 2, timedelta(seconds=7))
    assert seen["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert seen["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert seen["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"
    assert timeouts == [timedelta(seconds=7)]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


# ---------------------------------------------------------------------- the first operation blocks until all are there


@pytest.mark.parametrize("rank", [0, 1])
def test_joining_ends_at_the_deadline_while_nccl_waits_for_a_rank_that_never_comes(fake: FakeGroup, rank: int) -> None:
    fake.connected.clear()
    group = embedded(rank)
    with pytest.raises(GroupBroken, match="not every rank came in time"):
        group.join(0.3)
    group.close()
    assert fake.aborted.wait(PATIENCE_S)
    stuck = [thread for thread in threading.enumerate() if thread.name == "weight-group-connect"]
    assert stuck and all(thread.daemon for thread in stuck)  # the process can end all the same
    fake.connected.set()


@pytest.mark.parametrize("rank", [0, 1])
def test_joining_ends_when_the_owner_says_so_while_nccl_waits_for_a_rank(fake: FakeGroup, rank: int) -> None:
    fake.connected.clear()
    group = embedded(rank, lambda: "enough" if fake.connecting.is_set() else None)
    with pytest.raises(GroupInterrupted, match="enough"):
        group.join(PATIENCE_S)
    group.close()


def test_what_connects_after_everybody_has_left_is_not_kept(fake: FakeGroup) -> None:
    fake.connected.clear()
    group = embedded()
    with pytest.raises(GroupBroken):
        group.join(0.2)
    group.close()
    fake.connected.set()
    eventually(lambda: bool(fake.timeouts_s), "the end of the late broadcast")
    assert not group._under_way  # pyright: ignore[reportPrivateUsage]


def test_only_the_first_operation_has_a_thread_of_its_own(fake: FakeGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    patient: list[object] = []
    honest = WeightGroup._patiently  # pyright: ignore[reportPrivateUsage]

    def patiently(group: WeightGroup, act: Callable[[], Any], deadline_s: float) -> Any:
        patient.append(act)
        return honest(group, act, deadline_s)

    monkeypatch.setattr(WeightGroup, "_patiently", patiently)
    group = embedded(rank=0)
    group.join(PATIENCE_S)
    group.send(1, LAYOUT, WholeTensors(NAMED), PATIENCE_S)
    assert len(patient) == 1
    group.close()


def test_the_first_operation_is_queued_behind_what_this_thread_has_queued(
    fake: FakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's present stream is a thread's own, and another thread starts the operation."""
    asked_by: list[str] = []
    entered_by: list[str] = []

    @contextmanager
    def stream() -> Generator[None]:
        entered_by.append(threading.current_thread().name)
        yield

    def present_stream(device: torch.device) -> Any:
        asked_by.append(threading.current_thread().name)
        return stream()

    monkeypatch.setattr(stillhouse.weights.group_operations, "_present_stream", present_stream)
    group = embedded()
    group.join(PATIENCE_S)
    assert (asked_by, entered_by) == ([threading.current_thread().name], ["weight-group-connect"])
    group.close()


# ---------------------------------------------------------------------- queued is not arrived


class FakeEvent:
    def __init__(self) -> None:
        self.done = False
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        return self.done


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> FakeEvent:
    event = FakeEvent()

    def behind_all(device: torch.device) -> FakeEvent:
        return event

    monkeypatch.setattr(stillhouse.weights.group_operations, "_event_behind_all", behind_all)
    return event


def test_waiting_for_a_gpu_ends_when_what_was_queued_is_done(event: FakeEvent) -> None:
    threading.Timer(0.2, lambda: setattr(event, "done", True)).start()
    wait_for_device(torch.device("cuda"), time.monotonic() + PATIENCE_S, lambda: None)
    assert event.done and event.asked > 1


def test_waiting_for_a_gpu_ends_at_the_deadline_and_when_the_owner_says_so(event: FakeEvent) -> None:
    with pytest.raises(GroupBroken, match="queued"):
        wait_for_device(torch.device("cuda"), time.monotonic() + 0.2, lambda: None)
    with pytest.raises(GroupInterrupted, match="enough"):
        wait_for_device(torch.device("cuda"), time.monotonic() + PATIENCE_S, lambda: "enough")


def test_on_a_cpu_nothing_is_waited_for() -> None:
    wait_for_device(torch.device("cpu"), 0.0, lambda: "never asked")


class StagingEngine:
    """What of an engine the sink needs."""

    version = WeightVersion(0, 0)
    staged = 0

    def stage_weights(self, version: WeightVersion, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.staged += 1


@pytest.mark.parametrize("done", [True, False])
def test_an_embedded_member_has_a_version_only_when_the_copies_for_its_engine_are_made(
    event: FakeEvent, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    def receive(*_: object) -> list[tuple[str, Tensor]]:
        return NAMED

    engine = StagingEngine()
    sink = EmbeddedWeights(engine, device="cuda")
    sink._group = embedded()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(WeightGroup, "receive", receive)
    event.done = done
    digest = LAYOUT.manifest.digest
    header = Round(1, 1, WeightVersion(0, 1), digest, None, timeout_s=PATIENCE_S if done else 0.2)
    agreed = Agreed(LAYOUT.manifest, LAYOUT.bucket_bytes)
    if done:
        assert sink.take(header, agreed, lambda: None).staged
    else:
        with pytest.raises(GroupBroken, match="queued"):
            sink.take(header, agreed, lambda: None)
    assert engine.staged == 1 and event.asked > 0


@pytest.mark.parametrize("receives", [True, False])
def test_nothing_is_read_from_a_gpu_before_it_is_there(fake: FakeGroup, event: FakeEvent, receives: bool) -> None:
    """Neither the greeting nor the checksums: reading them would block, without deadline or interruption."""
    event.done = receives
    group = embedded()
    if receives:
        group.join(PATIENCE_S)
        event.done = False
    with pytest.raises(GroupBroken, match="queued"):
        if receives:
            group.receive(1, LAYOUT, 0.2)
        else:
            group.join(0.2)
    group.close()


@pytest.mark.parametrize(("rank", "disabled", "own"), [(1, "1", True), (0, "1", False), (1, "0", False)])
def test_members_that_may_use_sockets_only_say_that_they_are_hosts_of_their_own(
    monkeypatch: pytest.MonkeyPatch, rank: int, disabled: str, own: bool
) -> None:
    """Two on one GPU are then no duplicates for NCCL. The learner keeps the machine's name, which its ranks share."""
    seen: list[str | None] = []

    class Recorder:
        class Options: ...

        def __init__(self, *_: object) -> None:
            seen.append(os.environ.get("NCCL_HOSTID"))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Recorder, raising=False)
    monkeypatch.setenv("NCCL_HOSTID", "")  # so that it is put back
    monkeypatch.delenv("NCCL_HOSTID")
    monkeypatch.setenv("NCCL_P2P_DISABLE", disabled)
    monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
    stillhouse.weights.group_operations.new_nccl_group(host_store(HOST), rank, 2, timedelta(seconds=1))
    assert bool(seen[0]) is own
