"""The sink of a server's weights, against an HTTP server that does with them as SGLang does over NCCL."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from stillhouse.engines.http.link import ServerLost
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.engines.sglang.weights import ServerWeights
from stillhouse.protocol.messages import WeightPlan, WeightVersion
from stillhouse.weights.buckets import manifest_of
from stillhouse.weights.checks import Canary
from stillhouse.weights.control_messages import Agreed, CpuHandle, Round, SharedBucket, WeightCheck
from stillhouse.weights.errors import GroupBroken, GroupInterrupted, SnapshotRefused, WeightsDiffer, WeightsRefused
from stillhouse.weights.sink import Receipt
from stillhouse.weights.snapshot import write_snapshot
from tests.patience import PATIENCE_S, eventually
from tests.sim.weights.fake_server import Body, FakeServer, FakeServerEngine, Refused

V1 = WeightVersion(0, 1)
NAMED = [("norm", torch.arange(8, dtype=torch.float32)), ("large", torch.arange(1_000, dtype=torch.float32))]
AGREED = Agreed(manifest_of(NAMED), 2_000)
CHECKER, DISK = "/weights_checker", "/update_weights_from_disk"


class Work:
    done = True

    def kernel_has_ended(self) -> bool:
        return self.done


class Group:
    """All that is broadcast is zeros."""

    def __init__(self) -> None:
        self.work = Work()

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Work:
        tensors[0].zero_()
        return self.work

    def abort(self) -> None: ...

    def die(self) -> None: ...


class Lent:
    """In place of a WireMember: memory that is not there."""

    @staticmethod
    def shared(_number: int, n_buckets: int, *_rest: object) -> Iterator[SharedBucket]:
        for _ in range(n_buckets):
            yield SharedBucket((CpuHandle(b"m", b"/torch_1", 4),), 0)


class Rig:
    """A sink in a group of its server."""

    def __init__(self, group: Group, backend: Any, control_timeout_s: float = PATIENCE_S, *, ours: bool = True) -> None:
        self.server = FakeServer(dict(NAMED))
        self.engine = FakeServerEngine(self.server.url, SGLangConfig(control_timeout_s=control_timeout_s))
        self.sink = ServerWeights(cast("Any", self.engine), student="/nowhere", ours=ours)
        self.hold = threading.Event()
        self.held = threading.Event()
        if backend == "wire":  # or ipc: there is no group to join
            return
        plan = WeightPlan(1, "127.0.0.1", 1, backend, ("a",), 2, 1.0, kind="servers", group_name="run-1")
        self.sink.join(plan, 0, PATIENCE_S, lambda: None)

    def holds(self, path: str) -> None:
        """From now on the server is stuck in such a request."""

        def stuck(body: Body) -> None:
            self.held.set()
            self.hold.wait()

        self.server.before[path] = stuck

    def take(
        self,
        check: WeightCheck | None = None,
        timeout_s: float = PATIENCE_S,
        stop: threading.Event | None = None,
        wire: Lent | Wire | None = None,
    ) -> Receipt:
        shared = isinstance(wire, Lent)
        header = Round(1, 1, V1, AGREED.manifest.digest, None, timeout_s, check=check, shared=shared)
        interrupted = lambda: "enough" if stop is not None and stop.is_set() else None  # noqa: E731
        return self.sink.take(header, AGREED, interrupted, cast("Any", wire))

    def close(self) -> None:
        self.hold.set()
        self.engine.close()
        self.server.close()

    def paths(self) -> list[str]:
        return [path for path, _ in self.server.calls]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()
    monkeypatch.setattr("tests.sim.weights.fake_server.new_group", lambda *_: group)  # pyright: ignore
    monkeypatch.setattr("tests.sim.weights.fake_server.connect_store", lambda *_: None)  # pyright: ignore
    monkeypatch.setattr("tests.sim.weights.fake_server.prefixed", lambda *_: None)  # pyright: ignore
    return group


@pytest.fixture
def rig(group: Group) -> Iterator[Rig]:
    rig = Rig(group, "nccl")
    yield rig
    rig.close()


# ---------------------------------------------------------------------- queued is not arrived


def test_over_nccl_a_version_is_taken_when_the_server_has_synchronised_its_device(rig: Rig) -> None:
    taken = rig.take()
    assert taken.n_bytes == 4_032
    assert rig.paths()[-2:] == ["/end_weight_update", CHECKER]
    assert rig.server.calls[-1][1] == {"action": "checksum", "skip_tensor_list": [""]}
    assert not rig.server.weights["large"].any()  # it was executed, not only queued
    assert rig.sink.version == V1


def test_over_nccl_a_server_whose_part_was_aborted_has_no_version_although_all_looked_done(
    rig: Rig, group: Group
) -> None:
    """The next operation says it: the smallest tensor, again, when the server has synchronised."""
    honest = group.broadcast

    def broadcast(tensors: list[torch.Tensor], options: object) -> Work:
        if CHECKER in rig.paths():
            raise RuntimeError("NCCL communicator was aborted on rank 1.")
        return honest(tensors, options)

    group.broadcast = broadcast  # type: ignore[method-assign]
    with pytest.raises(GroupBroken, match="was aborted"):
        rig.take()
    assert rig.sink.version is None
    bodies = [body for path, body in rig.server.calls if path == "/update_weights_from_distributed"]
    assert [body["names"] for body in bodies] == [["norm"], ["large"], ["norm"]]


def test_over_nccl_a_broadcast_that_never_ends_is_no_version_although_every_bucket_was_answered(
    rig: Rig, group: Group
) -> None:
    group.work.done = False
    with pytest.raises(GroupBroken, match="not done at the deadline"):
        rig.take(timeout_s=0.5)
    assert rig.sink.version is None
    group.work.done = True
    assert rig.sink.settle(PATIENCE_S)


def test_over_gloo_an_answer_is_enough(group: Group) -> None:
    rig = Rig(group, "gloo")
    rig.take()
    assert CHECKER not in rig.paths()
    rig.close()


def test_a_server_without_checksums_is_said_not_to_be_verified(rig: Rig) -> None:
    def refuse(body: Body) -> None:
        raise Refused("not found")

    rig.server.before[CHECKER] = refuse
    assert rig.take().n_bytes == 4_032
    assert rig.sink.stats["weight_checks_skipped_total"] == 2  # each time that it was to synchronise


# ---------------------------------------------------------------------- long checks have a deadline and can be left


@pytest.mark.parametrize("path", [CHECKER, DISK])
def test_a_check_that_takes_long_ends_with_the_round_and_not_with_the_limit_of_short_calls(
    group: Group, tmp_path: Path, path: str
) -> None:
    rig = Rig(group, "gloo", control_timeout_s=0.3)
    ref = write_snapshot(tmp_path, V1, [(name, torch.zeros_like(tensor)) for name, tensor in NAMED], keep=1)
    rig.holds(path)
    threading.Timer(1.0, rig.hold.set).start()  # longer than a short call may take
    rig.take(WeightCheck(weights=ref))
    assert rig.sink.stats["weight_checks_total"] == 1
    rig.close()


@pytest.mark.parametrize("path", [CHECKER, DISK])
def test_a_check_is_left_when_the_owner_says_so(rig: Rig, tmp_path: Path, path: str) -> None:
    ref = write_snapshot(tmp_path, V1, [(name, torch.zeros_like(tensor)) for name, tensor in NAMED], keep=1)
    rig.holds(path)
    with pytest.raises(GroupInterrupted, match="enough"):
        rig.take(WeightCheck(weights=ref), stop=rig.held)
    assert not rig.sink.settle(0.0)
    rig.hold.set()
    assert rig.sink.settle(PATIENCE_S)


def test_a_server_that_is_still_reading_when_the_round_is_over_is_not_lost(group: Group, tmp_path: Path) -> None:
    rig = Rig(group, "gloo", control_timeout_s=0.2)
    ref = write_snapshot(tmp_path, V1, [(name, torch.zeros_like(tensor)) for name, tensor in NAMED], keep=1)
    rig.holds(DISK)
    with pytest.raises(GroupBroken, match="not done at the deadline"):
        rig.take(WeightCheck(weights=ref), timeout_s=3.0)
    threading.Timer(1.0, rig.hold.set).start()  # more than the patience for one that is stuck
    rig.sink.leave()
    rig.engine.server.raise_if_lost()
    rig.close()


# ---------------------------------------------------------------------- a version that comes by wire


class Wire:
    """Brings a run of bytes in pieces, the last one first; or breaks after the first of them; or loses that one."""

    def __init__(self, *, breaks: bool = False, loses: bool = False) -> None:
        self.run = b"".join((tensor + 1.0).numpy().tobytes() for _, tensor in NAMED)
        self.breaks, self.loses = breaks, loses

    def fetch(self, number: int, total_bytes: int, take: Any, deadline_s: float, interrupted: Any) -> None:
        assert total_bytes == len(self.run)
        for at in [*reversed(range(0, total_bytes, 1000))][self.loses :]:
            take(at, self.run[at : at + 1000])
            if self.breaks:
                raise GroupBroken("the cable is out")


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """In no group; leaves no temporary file."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    rig = Rig(Group(), "wire")
    yield rig
    assert list(tmp_path.iterdir()) == []
    rig.close()


def test_a_version_that_comes_by_wire_is_loaded_from_a_temporary_file_without_a_group(alone: Rig) -> None:
    assert alone.take(wire=Wire()).n_bytes == 4_032 and alone.sink.version == V1
    for name, tensor in NAMED:
        assert torch.equal(alone.server.weights[name], tensor + 1.0)
    assert DISK in alone.paths() and not [path for path in alone.paths() if "group" in path or "distributed" in path]
    alone.sink.leave()
    alone.engine.server.raise_if_lost()


def test_of_a_version_that_breaks_off_the_server_hears_nothing(alone: Rig) -> None:
    before = alone.sink.version
    with pytest.raises(GroupBroken, match="the cable is out"):
        alone.take(wire=Wire(breaks=True))
    assert alone.paths() == [] and alone.sink.version == before


def test_a_malformed_file_never_reaches_a_server(alone: Rig) -> None:
    """A tensor ends behind the end of the file: a server that maps it ends."""
    before = alone.sink.version
    with pytest.raises(WeightsRefused, match=r"no whole safetensors file.*; it is not loaded") as refused:
        alone.take(wire=Wire(loses=True))
    assert isinstance(refused.value.__cause__, SnapshotRefused), "as which the receiver counts it"
    assert alone.paths() == [] and alone.sink.version == before
    alone.sink.leave()
    alone.engine.server.raise_if_lost()


def test_a_malformed_student_never_reaches_a_server(alone: Rig, tmp_path: Path) -> None:
    path = Path(write_snapshot(tmp_path / "student", V1, NAMED, keep=1).path)
    path.write_bytes(path.read_bytes()[:-1])
    alone.engine.weights_known = False
    sink = ServerWeights(cast("Any", alone.engine), student=str(path.parent), ours=True)
    with pytest.raises(SnapshotRefused, match="it is not loaded"):
        sink.prepare()
    assert alone.paths() == []
    shutil.rmtree(tmp_path / "student")


def test_a_server_that_computes_with_something_else_than_the_file_is_lost(
    alone: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise WeightsDiffer("version 0.1: log-probs of a canary prompt")

    monkeypatch.setattr("stillhouse.engines.http.verify.ServerVerifier.check_canary", wrong)
    with pytest.raises(WeightsDiffer, match="canary"):
        alone.take(WeightCheck(canary=Canary((1, 2), (-1.0,), exact=True)), wire=Wire())
    assert alone.sink.version is None
    with pytest.raises(ServerLost, match="canary"):
        alone.sink.leave()


# ---------------------------------------------------------------------- a pickle goes to our own servers only


def test_a_server_that_the_user_started_is_sent_no_pickle_whatever_the_learner_says(group: Group) -> None:
    rig = Rig(group, "wire", ours=False)
    plan = WeightPlan(1, "127.0.0.1", 1, "ipc", ("a",), 2, 1.0, kind="servers", group_name="run-1")
    with pytest.raises(ValueError, match="only servers that the launcher started"):
        rig.sink.check(plan)
    with pytest.raises(WeightsRefused, match="only servers that the launcher started"):
        rig.take(wire=Lent())
    assert "/update_weights_from_tensor" not in rig.paths()
    rig.close()
    rig = Rig(group, "wire")
    rig.sink.check(plan)
    with pytest.raises(WeightsRefused):  # the fake server cannot open it
        rig.take(wire=Lent())
    assert "/update_weights_from_tensor" in rig.paths()
    rig.close()


# ---------------------------------------------------------------------- a server that does not come out


def test_a_server_that_does_not_come_out_of_its_group_is_lost_by_name(group: Group) -> None:
    rig = Rig(group, "nccl", control_timeout_s=0.2)
    rig.holds("/destroy_weights_update_group")
    with pytest.raises(ServerLost, match=r"did not leave weight group run-1 within 0\.6 s"):
        rig.sink.leave()
    with pytest.raises(ServerLost, match=rig.server.url):
        rig.engine.server.raise_if_lost()
    rig.close()


def test_a_server_that_was_never_in_the_group_is_not_lost(rig: Rig) -> None:
    def refuse(body: Body) -> None:
        raise Refused("The group to be destroyed does not exist.")

    rig.server.before["/destroy_weights_update_group"] = refuse
    rig.sink.leave()
    rig.engine.server.raise_if_lost()
    eventually(lambda: rig.paths()[-1] == "/destroy_weights_update_group", "the order to leave")
