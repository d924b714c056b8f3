"""The student's average against one kept in float64 by hand; its snapshots, and what comes back from a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from stillhouse.learner.config import EmaConfig
from stillhouse.learner.step.ema import StudentEma
from stillhouse.protocol.messages import WeightsRef, WeightVersion
from stillhouse.weights.snapshot import read_snapshot, snapshots
from stillhouse.weights.staged_weights import Merged

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
    assert ema.figures == {"ema_snapshots_total": 4.0, "ema_step": 9.0, "ema_failures_total": 0.0}


def test_a_snapshot_that_cannot_be_written_is_counted_and_ends_nothing(tmp_path: Path) -> None:
    ema, sent = make(tmp_path)
    (tmp_path / "0.3").write_text("a file where the folder should be")
    for step in range(1, 7):
        ema.step(WeightVersion(0, step), weights(step))
    assert [ref.version.step for ref in sent] == [6] and ema.figures["ema_failures_total"] == 1.0


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
