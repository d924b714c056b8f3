"""Copies of the weights: equal to the originals, laid out for sending, and in order with a GPU's streams.

For the streams, stand-ins for torch.cuda record the calls: nothing is sent before the copies are made, and never on the
stream that trains."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stillhouse.protocol.messages import Membership, WeightVersion
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.deadlines import RoundLimits
from stillhouse.weights.publisher import Publisher
from stillhouse.weights.roster import EMBEDDED, GroupMembers, GroupSeat
from stillhouse.weights.staged_weights import CudaStreams, Merged, NoStreams, StagedWeights, streams_of
from stillhouse.weights.transport import RoundResult
from tests.patience import PATIENCE_S

V1 = WeightVersion(0, 1)
SERVERS = GroupMembers(kind="servers")


def originals() -> list[tuple[str, Tensor]]:
    return [("half", torch.randn(5).bfloat16()), ("full", torch.randn(3, 2)), ("count", torch.tensor(4))]


@pytest.mark.parametrize("members", [EMBEDDED, SERVERS])
def test_copies_are_equal_and_do_not_change_with_the_originals(members: GroupMembers) -> None:
    named = originals()
    staged = StagedWeights(members)
    staged.fill(V1, named)
    kept = [tensor.clone() for _, tensor in named]
    for _, tensor in named:
        tensor.zero_()
    assert [name for name, _ in staged.named] == ["half", "full", "count"]
    for (_, copy), tensor in zip(staged.named, kept, strict=True):
        assert copy.dtype == tensor.dtype and torch.equal(copy, tensor)


def test_floating_point_copies_are_cast_and_others_are_not() -> None:
    named = originals()
    staged = StagedWeights(SERVERS, dtype="float16")
    staged.fill(V1, named)
    assert [copy.dtype for _, copy in staged.named] == [torch.float16, torch.float16, torch.int64]
    assert torch.equal(staged.named[1][1], named[1][1].half())


GPU = torch.device("cuda", 1)


class FakeCuda:
    """torch.cuda, as far as weights need it. Streams are names; each thread has a present one, at first the default."""

    def __init__(self, log: list[str], *, error: int = 0) -> None:
        self.log = log
        self.pinned: list[int] = []
        self._error = error
        self._made = 0
        self._present = threading.local()

    def current_stream(self, device: torch.device) -> str:
        assert device == GPU
        return getattr(self._present, "name", "default")

    def Stream(self, device: torch.device) -> str:
        assert device == GPU
        self._made += 1
        return f"own {self._made}"

    @contextmanager
    def stream(self, name: str) -> Generator[None]:
        before, self._present.name = self.current_stream(GPU), name
        yield
        self._present.name = before

    def Event(self, *, blocking: bool) -> FakeEvent:
        assert blocking  # else the thread that waits keeps a core busy
        return FakeEvent(self)

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
        assert flags == 0 and ctypes.string_at(address, n_bytes) == bytes(n_bytes)
        self.pinned.append(n_bytes)
        return self._error


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self, stream: str) -> None:
        self._cuda.log.append(f"mark on {stream}")

    def synchronize(self) -> None:
        self._cuda.log.append("host waits for the mark")


def logged(log: list[str], values: Tensor) -> Merged:
    """A weight that says when it is copied."""

    def delta() -> Tensor:
        log.append("copy")
        return torch.ones_like(values)

    return Merged(values, delta)


def test_the_publisher_sends_on_a_stream_of_its_own_and_after_the_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    cuda = FakeCuda(log)

    class Reads:
        """A transport to one member that has nothing yet."""

        limits = RoundLimits(WeightsConfig())
        group_epoch = control_unreadable_total = 0
        seats: tuple[GroupSeat, ...] = ()

        def form(self, seats: tuple[GroupSeat, ...], newest: StagedWeights | None, post_plan: object) -> RoundResult:
            self.seats = seats
            return RoundResult(behind=newest is not None)

        def publish(self, weights: StagedWeights, check: object) -> RoundResult:
            log.append(f"read on {cuda.current_stream(GPU)}")
            return RoundResult(has=self.seats)

        def close(self) -> None: ...

    def make(setup: object) -> Reads:
        return Reads()

    monkeypatch.setattr("stillhouse.weights.publisher.make_transport", make)
    with Publisher(
        WeightsConfig(),
        snapshot_dir=tmp_path,
        post_plan=lambda plan: None,
        published=lambda version, broadcast_s: None,
        expected_actors=1,
        streams=CudaStreams(GPU, cuda),
    ) as publisher:
        publisher.membership(Membership(("actor-0",), ("1",)))
        assert publisher.wait_idle(PATIENCE_S)
        publisher.publish(V1, [("w", logged(log, torch.zeros(3)))])
        assert publisher.wait_idle(PATIENCE_S)
    assert log == ["copy", "mark on default", "host waits for the mark", "read on own 1"]


def test_copies_for_gloo_go_to_pinned_memory_of_exactly_their_size() -> None:
    """On torch's "meta" device in the place of a GPU: its memory cannot be read, so that only the way is looked at."""
    log: list[str] = []
    cuda = FakeCuda(log)
    staged = StagedWeights(dtype="bfloat16", place="host", streams=CudaStreams(GPU, cuda))
    copied: list[tuple[torch.dtype, str]] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default and args[1].device.type == "meta":
                target, source = args[0], args[1]
                assert target.device.type == "cpu" and args[2] is True  # without waiting
                copied.append((source.dtype, str(tuple(source.shape))))
                return target
            return func(*args, **(kwargs or {}))

    weights = [("a", torch.zeros(5, 2, device="meta")), ("n", torch.zeros(3, device="meta", dtype=torch.int64))]
    with Watched():
        staged.fill(V1, weights)
        staged.fill(WeightVersion(0, 2), weights)
    assert copied == [(torch.bfloat16, "(5, 2)"), (torch.int64, "(3,)")] * 2
    assert cuda.pinned == [64 + 64] and log == ["mark on default"] * 2
    assert {tensor.device.type for _, tensor in staged.named} == {"cpu"}


def test_memory_that_cannot_be_pinned_is_used_and_said(caplog: pytest.LogCaptureFixture) -> None:
    run_B = CudaStreams(GPU, FakeCuda([], error=2)).host_bytes(640)
    assert run_B.numel() == 640 and "could not be pinned (CUDA error 2; see ulimit -l)" in caplog.text


def test_on_a_cpu_there_is_nothing_to_order() -> None:
    streams = streams_of(torch.device("cpu"))
    assert isinstance(streams, NoStreams) and streams.mark() is None
    assert isinstance(streams_of(GPU), CudaStreams)
