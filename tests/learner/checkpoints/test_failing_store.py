"""What a failing store does to checkpoints: each failure is said with what to do, tried again within a bound, and never
makes half a checkpoint count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from stillhouse.learner.checkpoints.stored import OwnedCheckpoints, go_on_from_store
from stillhouse.learner.config import EmaConfig
from stillhouse.learner.step.ema import StudentEma
from stillhouse.protocol.messages import WeightsRef, WeightVersion
from stillhouse.protocol.object_store import Store, StoreError
from stillhouse.protocol.store_owner import StoreOwner
from stillhouse.weights.snapshot import read_snapshot
from tests.faulty_store import Fault, FaultyStore, Kind
from tests.learner.checkpoints.test_stored import checkpoint, content, use, whole_ones
from tests.s3_server import BUCKET, Server, s3_server
from tests.store_launches import owned

MODEL = "step_000020_epoch_0/model.safetensors"
MOST = 12
"""More requests for one object than are ever made."""


@pytest.fixture(autouse=True)
def nothing_leaks() -> None:
    """Not checked here: fsspec keeps one loop, and s3fs its connections, for as long as the process lives."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as made:
        yield made


class Place:
    """A store with the checkpoint of step 10, seen through what can fail; that of step 20 is to be added."""

    def __init__(self, server: Server, faulty: FaultyStore, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server, self.faulty, self.folder, self.prefix = server, faulty, folder, folder.name
        self.url = f"s3://{BUCKET}/{self.prefix}"
        use(faulty.url, monkeypatch)
        monkeypatch.setattr(
            "stillhouse.protocol.object_store.ATTEMPTS", 1
        )  # botocore waits longer in between than s3fs
        owned(self.url).add(checkpoint(folder / "here", 10), keep=1)
        self.new = checkpoint(folder / "here", 20)

    def add(self) -> None:
        OwnedCheckpoints(StoreOwner(Store(self.url), "mine")).add(self.new, keep=1)

    def expect_only(self, step: int, name: str) -> None:
        """By an independent count, and by what a resume takes."""
        self.faulty.faults = []
        assert set(whole_ones(self.server, self.prefix)) == {step}
        found = go_on_from_store(self.folder / name, self.url)
        assert found.version == WeightVersion(0, step) and found.path is not None
        assert content(found.path) == content(self.folder / "here" / f"step_0000{step}")


@pytest.fixture
def place(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with FaultyStore(server) as faulty:
        yield Place(server, faulty, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (403, "access was refused by .*see AWS_ACCESS_KEY_ID"),
        pytest.param(
            "skewed", "refused the request for its time: .*; set the clock of this host", marks=pytest.mark.slow
        ),
        pytest.param(500, "as the test wants", marks=pytest.mark.slow),
        pytest.param(503, "as the test wants", marks=pytest.mark.slow),
        pytest.param(507, "has no room", marks=pytest.mark.slow),
        ("cut_request", "no answer from"),
    ],
)
def test_an_upload_that_fails_again_and_again_is_given_up(place: Place, kind: Kind, said: str) -> None:
    place.faulty.faults = [Fault("PUT", MODEL, kind)]
    with pytest.raises(StoreError, match=rf"{place.url}: checkpoints/{MODEL} could not be written: .*{said}"):
        place.add()
    assert 1 <= place.faulty.asked("PUT", MODEL) <= MOST, "within a bound"
    place.expect_only(10, "before")
    place.add()
    place.expect_only(20, "after")


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        (503, MODEL),
        ("cut_answer", "step_000020_epoch_0/manifest.json"),
        ("cut_answer", "owner.json"),
        *(pytest.param(kind, MODEL, marks=pytest.mark.slow) for kind in (500, "cut_request")),
    ],
)
def test_an_upload_that_fails_once_is_made_again(place: Place, kind: Kind, part: str) -> None:
    place.faulty.faults = [Fault("PUT", part, kind, times=1)]
    place.add()
    assert place.faulty.asked("PUT", part) >= 2
    place.expect_only(20, "after")


def test_a_server_that_kept_half_of_an_object_is_not_believed(place: Place) -> None:
    """Otherwise the checkpoint before would be deleted for one that is not there."""
    place.faulty.faults = [Fault("PUT", MODEL, "half_stored")]
    with pytest.raises(StoreError, match=rf"checkpoints/{MODEL} has 25000 bytes in the store, expected 50000"):
        place.add()
    place.expect_only(10, "before")


@pytest.mark.parametrize(
    "kind", ["half_sent", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("cut_answer", 500, 403))]
)
def test_a_download_that_fails_ends_in_no_checkpoint(place: Place, kind: Kind) -> None:
    place.add()
    place.faulty.faults = [Fault("GET", MODEL, kind)]
    there = place.folder / "there"
    try:
        found = go_on_from_store(there, place.url)
        assert found.path is None, found
    except (StoreError, ValueError) as error:
        assert MODEL in str(error) or "step_000020" in str(error)
    assert not list(there.glob("step_*")), "nothing that looks like a checkpoint"
    assert place.faulty.asked("GET", MODEL) <= MOST
    place.expect_only(20, "after")


def test_a_download_that_fails_once_is_made_again(place: Place) -> None:
    place.add()
    for kind in (500, "cut_answer"):
        place.faulty.faults = [Fault("GET", MODEL, kind, times=1)]
        assert go_on_from_store(place.folder / f"there-{kind}", place.url).version == WeightVersion(0, 20)


@pytest.mark.slow
def test_a_slow_store_is_waited_for(place: Place) -> None:
    place.faulty.faults = [Fault("PUT", MODEL, "slow")]
    place.add()
    place.expect_only(20, "after")


@pytest.mark.parametrize(
    ("kind", "times", "sent"),
    [
        (503, 1, [3]),
        ("skewed", 9, []),
        pytest.param("slow", 9, [3], marks=pytest.mark.slow),
        pytest.param(503, 99, [], marks=pytest.mark.slow),
    ],
)
def test_an_average_of_the_student_is_sent_once_it_is_there_or_counted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, times: int, sent: list[int]
) -> None:
    """Beside training, which makes three more steps meanwhile."""
    monkeypatch.setattr("stillhouse.protocol.object_store.ATTEMPTS", 1)
    told: list[WeightsRef] = []
    with FaultyStore(server) as faulty:
        use(faulty.url, monkeypatch)
        faulty.faults = [Fault("PUT", "/averages/", kind, times)]
        weights = [("w", torch.arange(100.0))]
        store = Store(f"s3://{BUCKET}/{tmp_path.name}")
        ema = StudentEma(
            EmaConfig(decay=0.5, every=3), weights, folder=tmp_path / "averages", send=told.append, store=store
        )
        for step in range(1, 6):
            ema.step(WeightVersion(0, step), weights)
        ema.wait()
        assert [ref.version.step for ref in told] == sent
        assert faulty.asked("PUT", "/averages/") <= MOST
        assert ema.figures["ema_failures_total"] == (not sent) and bool(ema.error) == (not sent)
        faulty.faults = []
        ema.step(WeightVersion(0, 6), weights)
        ema.wait()
        assert told[-1].version.step == 6 and read_snapshot(told[-1])
