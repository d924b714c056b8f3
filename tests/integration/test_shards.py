"""Whole runs on the built-in task whose buffer has several shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.conftest import Launched

Launch = Callable[..., Launched]
WORKERS = ("--actors=4", "--teachers=2", "--max-staleness=2", "--learner.eval_every=6", "--learner.checkpoint_every=4")


def assert_balanced(summary: dict[str, Any]) -> None:
    tokens = summary["tokens"]
    gone = tokens["trained"] + sum(tokens["masked"].values()) + sum(tokens["dropped"].values())
    assert tokens["balanced"] and tokens["waiting"] == tokens["in_flight"] == 0
    assert tokens["accepted"] == gone > 0
    assert summary["ledger"]["source"] == "final"
    assert summary["staleness"]["max"] <= summary["staleness"]["bound"]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_goes_on_from_a_checkpoint_with_any_number_of_shards(launch: Launch, before: int, after: int) -> None:
    arguments = (*WORKERS, "--steps=10")
    run = launch(*arguments, f"--buffer.shards={before}")
    run.until(lambda: len(run.steps()) >= 5, "step 5")
    run.kill()
    resumed = launch(*arguments, f"--buffer.shards={after}", "--resume")
    assert resumed.wait() == 0, resumed.text()
    resumed.expect_clean_audit()
    assert_balanced(resumed.summary())
    assert resumed.summary()["steps"] == 10
    buffers = {name for name in resumed.summary()["workers"] if name.startswith("buffer-")}
    assert buffers == {f"buffer-{shard}" for shard in range(after)}
