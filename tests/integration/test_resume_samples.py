"""An interrupted run that is resumed trains the same set of samples as one that was not, under any bound.

Under a bound above 0 the order in which samples are trained is not fixed: what waits at the end differs, and which
samples are too stale and masked by that name. So sets are compared up to the first task that one of the runs has not
settled; and the audit of each record finds nothing trained twice, skipped, or over the bound."""

from __future__ import annotations

import json
import secrets
import signal
from collections.abc import Callable
from typing import Final, NamedTuple

import psutil
import pytest

from launch.audit.history import History
from launch.audit.record import Batch, RecordFile, Resumed, Settled
from tests.integration.conftest import Launched, alive
from tests.patience import PATIENCE_S

STEPS: Final = 15
EVERY: Final = 3
"""Steps from one checkpoint to the next. With 18 rollouts a batch, groups of 4 straddle every other one."""
ARGUMENTS: Final = (
    "--actors=2",
    "--teachers=1",
    f"--steps={STEPS}",
    "--seed=5",
    "--learner.tasks.group_size=4",
    f"--learner.checkpoint_every={EVERY}",
    "--learner.eval_every=0",
)


class Case(NamedTuple):
    bound: int
    release: str
    batch: int


CASES: Final = (Case(0, "deadline", 18), Case(1, "deadline", 18), Case(4, "segment", 18), Case(1, "rollout", 16))


def settled(run: Launched) -> dict[tuple[int, int], Settled]:
    """(task, sample) -> what became of it, by the kept steps."""
    history, batches = History(), list[Batch]()
    with RecordFile(run.record) as file:
        for place in file.places():
            match place.record:
                case Resumed(version, parent):
                    history.begin(version, parent)
                case Batch(_, version) as batch:
                    history.step(version)
                    batches.append(batch)
                case _:
                    pass
    history.find_parents()
    kept = set(history.kept())
    reports = [one for batch in batches if batch.version in kept for one in batch.settled or ()]
    return {(one.task_id, one.sample_index): one for one in reports}


def settled_before(run: Launched) -> int:
    """The first task that the last checkpoint knows as open."""
    trainer = run.run_dir / "checkpoints" / f"step_{STEPS:06d}" / "trainer.json"
    tasks = json.loads(trainer.read_text())["tasks"]
    return min((one["task"]["task_id"] for one in tasks["outstanding"]), default=tasks["next_task_id"])


def interrupt(run: Launched) -> None:
    """The learner dies and is started again, then the launcher dies with everybody, or is stopped by Ctrl-C."""
    first = 1 + secrets.randbelow(5)
    run.until(lambda: len(run.steps()) >= first, f"step {first}")
    (learner,) = run.workers("learner")
    learner.kill()
    run.until(lambda: run.steps()[-1]["epoch"] == 1 and len(run.steps()) > first + 3, "steps of the next learner")
    family = psutil.Process(run.process.pid).children(recursive=True)
    if secrets.randbelow(2):
        run.kill()
    else:
        run.process.send_signal(signal.SIGINT)
        assert run.wait() == 128 + signal.SIGINT, run.text()
    psutil.wait_procs(family, PATIENCE_S)
    assert not alive(family)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"bound-{case.bound}-{case.release}")
def test_killed_and_resumed_it_has_trained_the_same_samples(launch: Callable[..., Launched], case: Case) -> None:
    arguments = (
        *ARGUMENTS,
        f"--max-staleness={case.bound}",
        f"--buffer.release={case.release}",
        f"--buffer.batch_rollouts={case.batch}",
    )
    killed = launch(*arguments, folder="killed")
    interrupt(killed)
    resumed = launch(*arguments, "--resume", folder="killed")
    assert resumed.wait() == 0, resumed.text()
    undisturbed = launch(*arguments, folder="undisturbed")
    assert undisturbed.wait() == 0, undisturbed.text()

    counted = resumed.expect_clean_audit()
    assert counted.steps_kept == STEPS and counted.epochs == 3, str(counted)
    undisturbed.expect_clean_audit()
    both = min(settled_before(resumed), settled_before(undisturbed))
    assert both >= STEPS * case.batch // 4 // 2, "most tasks are settled in both runs"
    ours, theirs = (
        {sample: one for sample, one in settled(run).items() if sample[0] < both} for run in (resumed, undisturbed)
    )
    assert ours.keys() == theirs.keys() == {(task, sample) for task in range(both) for sample in range(4)}
    for sample, one in ours.items():
        if one.fate != theirs[sample].fate:  # under a bound of several steps time decides what becomes stale
            assert case.bound and "stale" in (one.reason, theirs[sample].reason), f"{one}, undisturbed {theirs[sample]}"
