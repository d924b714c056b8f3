"""Whole runs on divergences between distributions: top-k sets from teacher to gradient."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.integration.conftest import Launched
from tests.integration.test_whole_run import assert_balanced

Launch = Callable[..., Launched]
SETS = ("--teacher.top_k=64", "--actors=1", "--teachers=1", "--learner.eval_every=0")


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "mixed", "jsd"])
def test_a_run_trains_on_a_divergence_between_distributions(launch: Launch, name: str) -> None:
    """The mean divergence of the first batch is that of the built-in pair, and every token had a set."""
    run = launch(*SETS, f"--divergence={name}", "--steps=3")
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    rows = run.steps()
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(0.0 < row["train/divergence"] < 5.0 and row["train/tokens_unscored"] == 0 for row in rows)
    assert all(row["train/grad_norm"] > 0 and row["train/advantage_mean"] == 0 for row in rows)


def test_a_killed_buffer_comes_back_with_the_sets_that_it_had(launch: Launch) -> None:
    run = launch(*SETS, "--divergence=reverse_kl", "--teacher.tail=pooled", "--steps=8", "--max-staleness=2")
    run.until(lambda: len(run.steps()) >= 3, "step 3")
    run.workers("buffer")[-1].send_signal(signal.SIGKILL)
    assert run.wait() == 0, run.text()
    summary = run.summary()
    assert_balanced(summary)
    assert summary["workers"]["buffer-0"]["restarts"] == 1 and summary["workers"]["learner-0"]["restarts"] == 0
    assert [row["step"] for row in run.steps()] == list(range(1, 9))
    assert summary["tokens"]["masked"].get("unscorable", 0) == 0
