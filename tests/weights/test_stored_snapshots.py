"""Snapshots in the run's store: members that see no folder of the learner's get what it wrote."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from stillhouse.protocol.messages import WeightsRef, WeightVersion
from stillhouse.protocol.object_store import Store, StoreError
from stillhouse.weights.errors import SnapshotRefused
from stillhouse.weights.publisher import Publisher
from stillhouse.weights.snapshot import put_snapshot, read_snapshot, write_snapshot
from tests.patience import PATIENCE_S, eventually
from tests.s3_server import BUCKET, Gate, Server, environment_of, object_named, object_names, overwrite, s3_server
from tests.sim.weights.weight_actors import ActorFleet, digest_of
from tests.weights.fleet_learner import quick, version
from tests.weights.test_folder import NAMES, weights


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as made:
        yield made


def use(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(url).items():
        monkeypatch.setenv(name, value)


def put(store: Store, folder: Path, step: int) -> WeightsRef:
    return put_snapshot(store, write_snapshot(folder, version(step), weights(step), keep=9), keep=2)


def test_a_snapshot_comes_back_from_a_bucket_and_old_ones_go(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server.url, monkeypatch)
    store = Store(f"s3://{BUCKET}/run")
    refs = [put(store, tmp_path / "weights", step) for step in (1, 2, 10)]
    assert refs[-1].path == f"s3://{BUCKET}/run/weights/0.10/model.safetensors"
    assert sorted(object_names(server)) == [f"run/weights/0.{step}/model.safetensors" for step in (10, 2)]
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "copies"))
    (tmp_path / "copies").mkdir()
    got = dict(read_snapshot(refs[-1]))
    assert not list((tmp_path / "copies").iterdir()), "the copy is gone"
    assert len(got) == 2 and all(torch.equal(got[name], tensor) for name, tensor in weights(10))
    with pytest.raises(SnapshotRefused, match="no such object"):
        read_snapshot(refs[0])


def test_bytes_that_are_not_the_learners_are_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(server.url, monkeypatch)
    ref = put(Store(f"s3://{BUCKET}/other"), tmp_path / "weights", 3)
    name = "other/weights/0.3/model.safetensors"
    good = object_named(server, name)
    overwrite(server, name, good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(SnapshotRefused, match="damaged or replaced"):
        read_snapshot(ref)
    overwrite(server, name, good)
    with pytest.raises(SnapshotRefused, match="holds version"):
        read_snapshot(msgspec.structs.replace(ref, version=WeightVersion(0, 4)))
    assert read_snapshot(ref)


def test_a_server_that_goes_away_while_writing_is_an_error(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Gate(server) as gate:
        use(gate.url, monkeypatch)
        gate.shut_after_bytes = 100_000
        with pytest.raises(StoreError, match=r"weights/0\.1/model\.safetensors could not be written"):
            put(Store(f"s3://{BUCKET}/away"), tmp_path / "weights", 1)


def test_members_load_every_version_from_the_store(tmp_path: Path) -> None:
    """Real actor processes. While the store cannot be written, no version is announced."""
    store, folder = Store(f"file://{tmp_path}/store"), tmp_path / "weights"
    with (
        ActorFleet() as fleet,
        Publisher(
            quick("folder"), snapshot_dir=folder, store=store, post_plan=fleet.post_plan, published=lambda _, __: None
        ) as publisher,
    ):
        fleet.start(NAMES)
        publisher.membership(fleet.membership())
        for step in (1, 2, 3):
            publisher.publish(version(step), weights(step))
            for staged in fleet.wait_for(version(step), PATIENCE_S).values():
                assert (staged.version, staged.digest) == (version(step), digest_of(weights(step)))
            assert publisher.wait_idle(PATIENCE_S)
        assert sorted(path.name for path in (tmp_path / "store" / "weights").iterdir() if any(path.iterdir())) == [
            "0.2",
            "0.3",
        ]
        assert (publisher.stats.snapshots_total, publisher.stats.dropped_total) == (3, {})

        (tmp_path / "store").rename(tmp_path / "moved")
        (tmp_path / "store").write_text("no folder any more")
        publisher.publish(version(4), weights(4))
        eventually(lambda: publisher.stats.snapshot_failures_total > 0, "a version that could not be put there")
        (tmp_path / "store").unlink()
        (tmp_path / "moved").rename(tmp_path / "store")
        for staged in fleet.wait_for(version(4), PATIENCE_S).values():
            assert staged.digest == digest_of(weights(4))
