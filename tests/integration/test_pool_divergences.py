"""A whole run with two pools of different divergences and payloads: recorded, audited and replayed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from stillhouse.recording.reader import Recording
from stillhouse.replay import command as replay
from tests.integration.conftest import Launched
from tests.integration.test_replay import lines
from tests.integration.test_whole_run import assert_balanced


def test_two_pools_train_by_their_own_divergences_and_a_replay_makes_the_same_updates(
    launch: Callable[..., Launched], tmp_path: Path
) -> None:
    record = tmp_path / "run.record"
    run = launch(
        *("--pools.plain.count=1", "--pools.whole.count=1", "--pools.whole.top_k=32"),
        "--learner.tasks.routes={plain: [], whole: []}",
        *("--divergence=k1", "--learner.objective.teacher_divergences.whole=jsd"),
        "--learner.objective.teacher_divergences.whole.beta=0.3",
        *("--actors=1", "--steps=4", "--learner.eval_every=0", f"--record={record}"),
    )
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    run.expect_clean_audit()
    rows = run.steps()
    for row in rows:
        assert row["train/tokens_unscored"] == 0 and row["train/grad_norm"] > 0
        assert row["teachers/plain/token_share"] == row["teachers/whole/token_share"] == 1.0
        # Both pools have one model, so k1 is the reverse KL of either, and the JSD is another figure.
        assert row["teachers/plain/divergence"] == pytest.approx(row["train/reverse_kl"] / 2, rel=1e-4)
        assert 0.0 < row["teachers/whole/divergence"] < math.log(2.0)
        both = row["teachers/plain/divergence"] + row["teachers/whole/divergence"]
        assert row["train/divergence"] == pytest.approx(both, rel=1e-4)
    with Recording(record) as recording:
        items = [one.item for batch in recording.batches for one in batch.record.items]
        assert {item.teachers[piece.teacher] for item in items for piece in item.top_k} == {"whole"}
    again = tmp_path / "again"
    assert replay.main([str(record), f"--run-dir={again}"]) == 0
    for ours, recorded in zip(lines(again), rows, strict=True):
        for name in (*(tag for tag in recorded if tag.startswith("train/")), "teachers/whole/divergence"):
            assert name == "train/step_s" or ours[name] == recorded[name], name
