"""The student's average against one kept in float64 by hand; its snapshots, and what comes back from a checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from stillhouse.learner.config import EmaConfig
from stillhouse.learner.step.ema import StudentEma
from stillhouse.protocol.messages import WeightsRef, WeightVersion
from stillhouse.protocol.object_store import Store
from stillhouse.weights.snapshot import read_snapshot, snapshots
from stillhouse.weights.staged_weights import Merged
from tests.patience import PATIENCE_S

CONFIG = EmaConfig(decay=0.9, every=3)


def weights(step: int) -> list[tuple[str, Tensor]]:
    random = torch.Generator().manual_seed(step)
    return [("a", torch.randn(3, 2, generator=random)), ("b", torch.randn(4, generator=random).bfloat16())]


def make(folder: Path, config: EmaConfig = CONFIG) -> tuple[StudentEma, list[WeightsRef]]:
    sent: list[WeightsRef] = []
    return StudentEma(config, weights(0), folder=folder, send=sent.append), sent


def test_the_average_is_that_of_the_formula(tmp_path: Path) -> None:
    ema, _ = make(tmp_path)
    slow = {name: value.double().numpy() for name, value in weights(0)}
    for step in range(1, 6):
        ema.update(weights(step))
        slow = {name: 0.9 * slow[name] + 0.1 * value.double().numpy() for name, value in weights(step)}
    for name, value in ema.state_dict().items():
        assert value.dtype == torch.float32
        np.testing.assert_allclose(value.numpy(), slow[name], atol=1e-6)


def test_merged_weights_are_averaged_as_what_they_add_up_to(tmp_path: Path) -> None:
    base, delta = torch.ones(2), torch.tensor([1.0, 3.0])
    merged = [("a", Merged(base, lambda: delta))]
    ema = StudentEma(EmaConfig(decay=0.5), [("a", base)], folder=tmp_path, send=lambda _: None)
    ema.update(merged)
    assert ema.state_dict()["a"].tolist() == [1.5, 2.5]


def test_teachers_are_told_of_every_so_many_steps(tmp_path: Path) -> None:
    ema, sent = make(tmp_path)
    ema.publish(WeightVersion(0, 0))
    for step in range(1, 10):
        ema.step(WeightVersion(0, step), weights(step))
    assert [ref.version.step for ref in sent] == [0, 3, 6, 9]
    assert [version.step for version in snapshots(tmp_path)] == [6, 9], "two are kept"
    newest = dict(read_snapshot(sent[-1]))
    assert all(torch.equal(newest[name], value) for name, value in ema.state_dict().items())
    counts = {"ema_failures_total": 0.0, "ema_put_off_total": 0.0}
    assert ema.figures == {"ema_snapshots_total": 4.0, "ema_step": 9.0, **counts}


def test_a_snapshot_that_cannot_be_written_is_counted_and_ends_nothing(tmp_path: Path) -> None:
    ema, sent = make(tmp_path)
    (tmp_path / "0.3").write_text("a file where the folder should be")
    for step in range(1, 7):
        ema.step(WeightVersion(0, step), weights(step))
    assert [ref.version.step for ref in sent] == [6] and ema.figures["ema_failures_total"] == 1.0


def test_teachers_that_see_no_folder_fetch_it_from_the_store(tmp_path: Path) -> None:
    sent: list[WeightsRef] = []
    store = Store(f"file://{tmp_path}/store")
    ema = StudentEma(CONFIG, weights(0), folder=tmp_path / "ema", send=sent.append, store=store)
    for step in range(1, 10):
        ema.step(WeightVersion(0, step), weights(step))
        ema.wait()
    assert [ref.path.rpartition("/store/")[2] for ref in sent] == [f"ema/0.{n}/model.safetensors" for n in (3, 6, 9)]
    assert list(store.sizes()) == [f"ema/0.{n}/model.safetensors" for n in (6, 9)], "two are kept"
    (tmp_path / "ema").rename(tmp_path / "elsewhere")
    newest = dict(read_snapshot(sent[-1]))
    assert all(torch.equal(newest[name], value) for name, value in ema.state_dict().items())
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("no folder")
    ema.publish(WeightVersion(0, 10))
    ema.wait()
    assert ema.figures["ema_failures_total"] == 1.0 and len(sent) == 3


class HeldStore(Store):
    """Takes nothing before it is told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"file://{folder}")
        self.takes, self.asked = threading.Semaphore(0), threading.Semaphore(0)
        self.error: OSError | None = None

    def put(self, file: Path, name: str) -> None:
        self.asked.release()
        assert self.takes.acquire(timeout=PATIENCE_S)
        if self.error is not None:
            raise self.error
        super().put(file, name)

    def take(self) -> None:
        """The next one."""
        assert self.asked.acquire(timeout=PATIENCE_S)
        self.takes.release()


def test_training_goes_on_while_an_average_goes_into_the_store_and_late_ones_are_put_off(tmp_path: Path) -> None:
    """One at a time, and what comes next is the newest then: nothing queues up."""
    sent: list[WeightsRef] = []
    store = HeldStore(tmp_path / "store")
    ema = StudentEma(CONFIG, weights(0), folder=tmp_path / "ema", send=sent.append, store=store)
    for step in range(1, 11):  # 3 is on its way; 6 and 9 come due meanwhile
        ema.step(WeightVersion(0, step), weights(step))
    assert sent == [] and ema.figures["ema_put_off_total"] == 2.0
    assert sorted(path.name for path in (tmp_path / "ema").iterdir()) == ["0.3"], "no other waits on the disk"
    store.take()
    ema.wait()
    assert [ref.version.step for ref in sent] == [3]
    state: dict[int, dict[str, Tensor]] = {}
    for step in range(11, 15):  # 11 owes what was put off, and 12 is due
        ema.step(WeightVersion(0, step), weights(step))
        state[step] = ema.state_dict()
    store.take()
    ema.wait()
    assert [ref.version.step for ref in sent] == [3, 11]
    got = dict(read_snapshot(sent[1]))
    assert all(torch.equal(got[name], value) for name, value in state[11].items()), "that of its own step"
    counts = {"ema_snapshots_total": 2.0, "ema_failures_total": 0.0, "ema_put_off_total": 3.0, "ema_step": 11.0}
    assert ema.figures == counts


def test_in_a_run_in_which_all_happens_in_one_order_training_waits(tmp_path: Path) -> None:
    sent: list[WeightsRef] = []
    store = Store(f"file://{tmp_path}/store")
    ema = StudentEma(CONFIG, weights(0), folder=tmp_path / "e", send=sent.append, store=store, in_step=True)
    for step in range(1, 10):
        ema.step(WeightVersion(0, step), weights(step))
        assert [ref.version.step for ref in sent] == list(range(3, step + 1, 3))


def test_an_average_that_the_store_does_not_take_is_counted_with_its_reason_and_the_next_one_is_tried(
    tmp_path: Path,
) -> None:
    sent: list[WeightsRef] = []
    failed: list[str] = []
    store = HeldStore(tmp_path / "store")
    ema: StudentEma = StudentEma(
        CONFIG,
        weights(0),
        folder=tmp_path / "e",
        send=sent.append,
        store=store,
        failed=failed.append,
    )
    store.error = OSError(5, "no answer from the bucket")
    ema.publish(WeightVersion(0, 0))
    store.take()
    ema.wait()
    assert failed == ["no new average of the student for its teachers: [Errno 5] no answer from the bucket"]
    store.error = None
    for step in range(1, 4):
        ema.step(WeightVersion(0, step), weights(step))
    store.take()
    ema.wait()
    assert [ref.version.step for ref in sent] == [3] and (ema.failed_total, len(failed)) == (1, 1)


def test_it_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    ema, _ = make(tmp_path)
    ema.update(weights(1))
    saved = ema.state_dict()
    other, _ = make(tmp_path / "other")
    other.load_state_dict(saved)
    for one in (ema, other):
        one.update(weights(2))
    expected = ema.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())
    assert not torch.equal(saved["a"], expected["a"])
    with pytest.raises(ValueError, match="the saved average does not fit"):
        other.load_state_dict({})
