"""Whatever is killed, each sample is trained at most once and settled once: the samples of a run that was interrupted
are those of one that was not, and the independent count finds nothing wrong."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from stillhouse.protocol.messages import Settled
from stillhouse.recording.reader import Recording
from tests.integration.conftest import ROOT, Launched, alive
from tests.patience import PATIENCE_S, RUN_PATIENCE_S
from tests.sim.chaos.traps import Traps

Launch = Callable[..., Launched]
Sample = tuple[int, int]
"""Task id and index."""


def arguments(*more: str) -> tuple[str, ...]:
    return ("--actors=2", "--teachers=1", "--learner.checkpoint_every=3", "--learner.eval_every=0", *more)


def fates(run: Launched) -> tuple[dict[Sample, Settled], int]:
    """What became of each sample on the branch that was kept; and the first task that is open at its end."""
    with Recording(run.record) as recording:
        fates = {(one.task_id, one.sample_index): one for kept in recording.batches for one in kept.record.settled}
    newest = max((run.run_dir / "checkpoints").glob("step_*"))
    tasks = json.loads((newest / "trainer.json").read_text())["tasks"]
    return fates, min((item["task"]["task_id"] for item in tasks["outstanding"]), default=tasks["next_task_id"])


def tokens(run: Launched) -> list[list[tuple[Sample, bytes]]]:
    """Sample and token ids of each item, by step. Log-probs differ in their last bits from run to run, as rollouts that
    are decoded and scored beside one another do."""
    with Recording(run.record) as recording:
        steps = [recording.rollouts(kept) for kept in recording.batches]
    return [[((one.item.task_id, one.item.sample_index), one.arrays[0].tobytes()) for one in step] for step in steps]


def interrupt(launch: Launch, words: Sequence[str], first: int, second: int) -> Launched:
    """A run that goes on after each: its learner killed at step `first`, its launcher then, Ctrl-C at `second`."""
    run = launch(*words, folder="cut")
    run.until(lambda: len(run.steps()) >= first, f"step {first}")
    run.workers("learner")[0].send_signal(signal.SIGKILL)
    run.until(lambda: any(row["epoch"] == 1 for row in run.steps()), "a step of the next learner")
    family = psutil.Process(run.process.pid).children(recursive=True)
    run.kill()
    psutil.wait_procs(family, PATIENCE_S)
    assert not alive(family)
    run = launch(*words, "--resume", folder="cut")
    run.until(lambda: any(row["epoch"] == 2 and row["step"] >= second for row in run.steps()), f"step {second}")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    run = launch(*words, "--resume", folder="cut")
    assert run.wait() == 0, run.text()
    return run


@pytest.mark.parametrize("staleness", [0, 4])
def test_an_interrupted_run_settles_the_samples_of_one_that_was_not(launch: Launch, staleness: int) -> None:
    """Killed learner, killed launcher, Ctrl-C, with groups that straddle the checkpoints: 54 samples of groups of 4."""
    words = arguments(f"--max-staleness={staleness}", "--seed=5", "--steps=16", "--buffer.batch_rollouts=18")
    whole = launch(*words, folder="whole")
    assert whole.wait() == 0, whole.text()
    cut = interrupt(launch, words, 5, 8)
    whole.expect_clean_audit()
    cut.expect_clean_audit()
    (ours, our_end), (theirs, their_end) = fates(cut), fates(whole)
    end = min(our_end, their_end)
    assert end > 4, "too few tasks to compare"
    assert {s for s in ours if s[0] < end} == {s for s in theirs if s[0] < end}
    assert staleness or tokens(cut) == tokens(whole), "where nothing waits for time, the batches are the same"
    for sample, one in ours.items():
        if sample[0] < end and one.fate != theirs[sample].fate:  # time decides what becomes too stale under a bound
            assert staleness and "stale" in (one.reason, theirs[sample].reason), f"{one}, uncut {theirs[sample]}"


def test_at_bound_0_an_interrupted_run_has_the_weights_of_one_that_was_not_to_the_bit(launch: Launch) -> None:
    """Where rollouts are decoded and scored one at a time: what lies beside one in a batch changes its last bits. And
    the one that was not evaluates its student."""
    alone = ("--actor.max_concurrent_rollouts=1", "--actor.segment_tokens=4096", "--teacher.max_batch_tokens=1")
    words = (
        *arguments("--max-staleness=0", "--seed=5", "--steps=10", "--buffer.batch_rollouts=6", *alone),
        "--actors=1",
    )
    evaluated = ("--learner.eval_every=2", "--learner.tasks.eval_greedy=4", "--learner.tasks.eval_sampled=4")
    whole = launch(*words, *evaluated, folder="whole")
    assert whole.wait() == 0, whole.text()
    cut = interrupt(launch, words, 4, 7)
    assert {row["epoch"] for row in cut.steps()} >= {0, 1, 2}
    cut.expect_clean_audit()
    for step in (9, 10):
        for name in ("model.safetensors", "optimizer.safetensors"):
            file = f"checkpoints/step_{step:06}/{name}"
            assert (cut.run_dir / file).read_bytes() == (whole.run_dir / file).read_bytes(), file


def test_a_learner_that_dies_in_its_first_step_goes_on(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The buffer knows that the batch is trained, and no file of the run knows of the learner."""
    point = "stillhouse.learner.reports.metrics:MetricsWriter.step"
    traps = Traps(tmp_path / "traps", [point])
    for name, value in traps.environment(str(ROOT)).items():
        monkeypatch.setenv(name, value)
    run = launch(*arguments("--steps=4"))
    run.until(lambda: bool(run.workers("learner")), "the learner")
    learner = run.workers("learner")[0].pid
    assert traps.catch(point, "before", learner, timeout_s=RUN_PATIENCE_S)
    assert run.wait() == 0, run.text()
    assert [row["step"] for row in run.steps()] == [1, 2, 3, 4] and {row["epoch"] for row in run.steps()} == {1}
    run.expect_clean_audit()
