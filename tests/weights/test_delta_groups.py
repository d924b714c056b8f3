"""Versions that are sent as differences: in a group of two ranks, and from a publisher to real receivers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from stillhouse.engines.torch.weights import EmbeddedWeights
from stillhouse.protocol.messages import Membership, WeightVersion
from stillhouse.weights import delta
from stillhouse.weights.buckets import EqualBuckets
from stillhouse.weights.config import WeightsConfig
from stillhouse.weights.delta import DeltaSent
from stillhouse.weights.errors import DeltaRefused
from stillhouse.weights.group_operations import connect_store, host_store
from stillhouse.weights.publisher import Publisher
from stillhouse.weights.receiver import WeightReceiver
from stillhouse.weights.staged_weights import Former, StagedWeights
from stillhouse.weights.transports.collective import WeightGroup
from tests.patience import PATIENCE_S
from tests.sim.weights.group_campaign import MemoryEngine

HOST = "127.0.0.1"


def version(step: int) -> WeightVersion:
    return WeightVersion(0, step)


def weights(step: int, dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, Tensor]]:
    """Two tensors of which each step changes a few places more. The second one is of another width."""
    large = torch.randn(4_000, generator=torch.Generator().manual_seed(0)).to(dtype)
    norm = torch.zeros(100)
    for past in range(1, step + 1):
        large[past * 37 % 4_000 :: 151] = past
        norm[past] = past
    return [("large", large), ("norm", norm)]


class Two:
    """Rank 0, and one member in a thread of its own; two copies take turns, as the publisher's do."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(2)
        store = host_store(HOST)
        stores = [store, connect_store(HOST, store.port, PATIENCE_S)]
        self.sender, self.member = (
            WeightGroup(each, group_epoch=1, rank=rank, world_size=2) for rank, each in enumerate(stores)
        )
        for joined in [self.pool.submit(group.join, PATIENCE_S) for group in (self.sender, self.member)]:
            joined.result()
        self.copies = [StagedWeights(), StagedWeights()]
        self.layout: EqualBuckets | None = None

    def whole(self, step: int) -> None:
        staged = self.copies[step % 2]
        staged.fill(version(step), weights(step))
        self.layout = EqualBuckets(staged.manifest, 1_024)
        sent = self.pool.submit(self.sender.send, step, self.layout, staged.content, PATIENCE_S)
        got = self.pool.submit(self.member.receive, step, self.layout, PATIENCE_S, version(step))
        sent.result()
        self.same(got.result(), step)

    def changes(self, step: int, base: int, former: Former | None = None) -> DeltaSent:
        """Version `step`, as its difference from version `base`, which is in the other copy, or was (`former`)."""
        assert self.layout is not None
        former = former or self.copies[base % 2].keep()
        staged = self.copies[step % 2]
        staged.fill(version(step), weights(step))
        sent = self.pool.submit(self.sender.send_delta, step, self.layout, staged.content, former, PATIENCE_S)
        got = self.pool.submit(self.member.receive_delta, step, self.layout, PATIENCE_S, version(step), former.version)
        result = sent.result()
        self.same(got.result(), step)
        return result

    def same(self, got: list[tuple[str, Tensor]], step: int) -> None:
        for (name, tensor), (_, expected) in zip(got, weights(step), strict=True):
            assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)), f"{name} of version {step}"

    def close(self) -> None:
        self.sender.close()
        self.member.close()
        self.pool.shutdown()


@pytest.fixture
def two() -> Iterator[Two]:
    ranks = Two()
    yield ranks
    ranks.close()


def test_members_get_equal_bytes_from_differences_version_after_version(two: Two) -> None:
    two.whole(1)
    for step in range(2, 6):
        sent = two.changes(step, step - 1)
        assert sent.n_bytes < 0.2 * 8_400 and sent.whole_buckets == 0
        # Some places had that value already; a float32 of the norms counts as two units.
        assert 0.001 < sent.changed < 0.01


def test_a_place_that_is_forgotten_is_noticed_and_whole_weights_follow_in_the_same_group(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    two.whole(1)
    honest = delta.changes

    def forgetful(old_b: Tensor, new_b: Tensor, unit: int) -> Tensor | None:
        at = honest(old_b, new_b, unit)
        return at if at is None else at[1:]

    with monkeypatch.context() as patch:
        patch.setattr(delta, "changes", forgetful)
        with pytest.raises(DeltaRefused, match="checksum differs in buckets"):
            two.changes(2, 1)
    two.whole(2)
    two.changes(3, 2)


def test_places_that_are_exchanged_are_noticed(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are all there, 64 of them somewhere else: a plain sum of words would not see it."""
    two.whole(1)
    honest = delta.apply

    def dislocated(delta_b: Tensor, k: int, bucket_b: Tensor, unit: int) -> None:
        honest(delta_b, k, bucket_b, unit)
        bucket_b[:128] = bucket_b[:128].roll(64)

    monkeypatch.setattr(delta, "apply", dislocated)
    with pytest.raises(DeltaRefused, match="checksum differs"):
        two.changes(2, 1)


def test_a_member_that_missed_a_version_refuses_the_next_difference(two: Two) -> None:
    two.whole(1)
    staged = two.copies[0]
    staged.fill(version(2), weights(2))  # published to nobody
    with pytest.raises(DeltaRefused, match=r"changes since 0\.2 came, but 0\.1 is here"):
        two.changes(3, 2)
    two.whole(4)


def test_a_difference_from_other_weights_than_the_member_has_does_not_pass_the_checksum(two: Two) -> None:
    two.whole(1)
    two.copies[0].fill(version(2), weights(2))
    two.member._held = version(2)  # pyright: ignore[reportPrivateUsage]  # it believes to have it
    with pytest.raises(DeltaRefused, match="checksum differs"):
        two.changes(3, 2)


def test_after_a_version_that_broke_off_no_difference_is_taken(two: Two) -> None:
    two.whole(1)
    with pytest.raises(DeltaRefused):
        two.copies[0].fill(version(2), weights(2))
        two.changes(3, 2)
    with pytest.raises(DeltaRefused, match="but None is here"):
        two.changes(4, 3)


def test_buckets_go_whole_once_the_former_version_is_overwritten(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next version is filled in while the third bucket is compared; the third and all later ones go whole."""
    two.whole(1)
    honest, compared = delta.changes, list[int]()

    def overtaken(old_b: Tensor, new_b: Tensor, unit: int) -> Tensor | None:
        compared.append(1)
        if len(compared) == 3:
            two.copies[1].fill(version(3), weights(3))
        return honest(old_b, new_b, unit)

    monkeypatch.setattr(delta, "changes", overtaken)
    sent = two.changes(2, 1)
    assert two.layout is not None
    assert len(compared) == 3 and sent.whole_buckets == two.layout.n_buckets - 2


def test_a_former_version_that_is_overwritten_at_any_moment_never_makes_wrong_bytes(two: Two) -> None:
    two.whole(1)
    whole_buckets = 0
    for step in range(2, 60):
        other = two.copies[(step - 1) % 2]
        former = other.keep()
        overtaking = threading.Timer((step % 8) * 2e-4, other.fill, (version(step + 1), weights(step + 1)))
        overtaking.start()
        whole_buckets += two.changes(step, step - 1, former).whole_buckets
        overtaking.join()
    assert whole_buckets > 0, "nothing was ever overtaken"


# ------------------------------------------------------------------------------------------------------ a publisher


class Run:
    """A publisher and two actors with real receivers, all in this process."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.engines = [MemoryEngine(), MemoryEngine()]
        self.receivers = [
            WeightReceiver(EmbeddedWeights(cast("Any", engine)), name=f"actor-{index}")
            for index, engine in enumerate(self.engines)
        ]
        for receiver in self.receivers:
            receiver.start()
        self.publisher = Publisher(
            WeightsConfig(bucket_bytes=1_024, join_window_s=0.0, **changes),
            snapshot_dir=folder,
            post_plan=lambda plan: [receiver.handle_plan(plan) for receiver in self.receivers].clear(),
            published=lambda version, _: None,
        )
        self.publisher.membership(Membership(("actor-0", "actor-1"), ("a", "b")))

    def publish(self, step: int) -> None:
        self.publisher.publish(version(step), weights(step))
        assert self.publisher.wait_idle(PATIENCE_S)
        for engine in self.engines:
            assert engine.version == version(step)
            for name, tensor in weights(step):
                assert torch.equal(engine.held[name].view(torch.uint8), tensor.view(torch.uint8)), name

    def close(self) -> None:
        self.publisher.close()
        for receiver in self.receivers:
            receiver.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path, delta="on")
    yield made
    made.close()


def test_after_the_first_version_of_a_group_only_changes_are_sent(run: Run) -> None:
    for step in range(1, 5):
        run.publish(step)
    stats = run.publisher.stats
    assert (stats.deltas_total, stats.full_total, stats.broadcasts_total) == (3, {"first": 1}, 4)
    assert stats.broadcast_bytes < 0.2 * 8_400 and 0 < stats.delta_changed < 0.01
    run.publisher.membership(Membership(("actor-0", "actor-1"), ("a", "again")))
    run.publish(5)
    assert run.publisher.stats.full_total == {"first": 2}, "another group begins with all weights"


def test_a_member_that_cannot_apply_a_difference_gets_all_weights_and_stays(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.publish(1)
    honest, spoiled = delta.apply, list[int]()

    def once(delta_b: Tensor, k: int, bucket_b: Tensor, unit: int) -> None:
        if not spoiled:
            spoiled.append(1)
            raise delta.DeltaDamaged("spoiled")
        honest(delta_b, k, bucket_b, unit)

    monkeypatch.setattr(delta, "apply", once)
    run.publish(2)
    run.publish(3)
    stats = run.publisher.stats
    assert (stats.deltas_total, stats.full_total) == (1, {"first": 1, "refused": 1})
    assert (stats.rebuilds_total, stats.failed_groups_total, stats.members) == (1, 0, 2)
    assert sum(receiver.stats["weight_deltas_refused_total"] for receiver in run.receivers) == 1


def test_a_member_that_refuses_every_difference_still_gets_every_version(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(delta_b: Tensor, k: int, bucket_b: Tensor, unit: int) -> None:
        raise delta.DeltaDamaged("spoiled")

    monkeypatch.setattr(delta, "apply", never)
    for step in range(1, 4):
        run.publish(step)
    assert run.publisher.stats.full_total == {"first": 1, "refused": 2}


def test_a_copy_that_the_next_version_needed_is_no_base(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.publish(1)
    honest = StagedWeights.keep

    def replaced(staged: StagedWeights) -> Former:
        former = honest(staged)
        staged._fills += 1  # pyright: ignore[reportPrivateUsage]  # as `fill` does before it copies
        return former

    monkeypatch.setattr(StagedWeights, "keep", replaced)
    run.publish(2)
    run.publish(3)
    assert run.publisher.stats.full_total == {"first": 1, "overwritten": 1}


def test_off_and_files_send_all_weights(tmp_path: Path) -> None:
    off = Run(tmp_path, delta="off")
    for step in (1, 2):
        off.publish(step)
    off.close()
    assert off.publisher.stats.full_total == {"off": 2}
    files = Run(tmp_path, transport="folder")
    for step in (1, 2):
        files.publish(step)
    files.close()
    assert files.publisher.stats.full_total == {"unable": 2}
    with pytest.raises(ValueError, match="delta = on with transport = folder"):
        WeightsConfig(transport="folder", delta="on")
