"""A learner of several processes in whole runs: they die, hang and are stopped, and the run goes on with nothing
trained twice; one rank goes on from a checkpoint of two."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import ROOT, Launched
from tests.integration.joined import Join
from tests.patience import RUN_PATIENCE_S

pytestmark = pytest.mark.slow
RANKS = ("--learner.ranks=2", "--learner.eval_every=0", "--learner.checkpoint_every=3", "--actors=1")


def ranks(run: Launched) -> list[int]:
    """Process ids of ranks 0 and 1 that started last."""
    log = (run.run_dir / "logs" / "learner-0.log").read_text()
    found = re.findall(r": learner-0(?: rank (\d))? of 2 starts, pid (\d+)", log)
    return [int(dict(found)[which]) for which in ("", "1")]


def steps_of_last_learner(run: Launched) -> int:
    epoch = max((row["epoch"] for row in run.steps()), default=0)
    return sum(row["epoch"] == epoch for row in run.steps())


def test_a_rank_dies_and_another_hangs_and_the_run_goes_on(launch: Callable[..., Launched]) -> None:
    run = launch("--steps=14", *RANKS, "--learner.rank_timeout_s=20", "--launch.shutdown_grace_s=3")
    for epoch, (rank, how) in enumerate([(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]):
        run.until(
            lambda epoch=epoch: any(row["epoch"] == epoch for row in run.steps()) and steps_of_last_learner(run) >= 4,
            f"four steps of epoch {epoch}",
        )
        os.kill(ranks(run)[rank], how)
    assert run.wait() == 0, run.text()
    summary = run.summary()
    assert summary["steps"] == 14 and summary["tokens"]["balanced"], summary
    # More of them where a machine is so busy that a rank seems to hang.
    assert {row["epoch"] for row in run.steps()} >= {0, 1, 2, 3}, "each time all ranks began a new epoch"
    run.expect_clean_audit()


def test_ctrl_c_saves_a_checkpoint_of_all_ranks_and_one_rank_goes_on_from_it(launch: Callable[..., Launched]) -> None:
    """With adapters and a value head: each has a state of its own."""
    value = ("--learner.objective.advantage=gae", "--learner.objective.coef=0.5", "--buffer.release=rollout")
    more = ("--learner.lora.rank=4", *value)
    run = launch("--steps=9", *RANKS, *more)
    run.until(lambda: len(run.steps()) >= 4, "four steps")
    os.kill(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.text()
    stopped_at = len(run.steps())
    saved = sorted(Path(run.run_dir, "checkpoints").glob("step_*"))[-1].name
    assert int(saved.removeprefix("step_")) == stopped_at, "the last step is in a checkpoint"
    resumed = launch("--resume", "--steps=9", *RANKS[1:], *more, "--learner.ranks=1")
    assert resumed.wait() == 0, resumed.text()
    assert resumed.summary()["steps"] == 9 and resumed.summary()["tokens"]["balanced"]
    resumed.expect_clean_audit()
    assert (run.run_dir / "export" / "merged" / "config.json").is_file()


def test_ranks_send_weights_to_a_server_that_proves_that_it_has_them(launch: Callable[..., Launched]) -> None:
    """The canary is scored by all ranks together, between a step and the copies of its weights."""
    if not (ROOT / ".venv-sglang").exists():
        pytest.skip("make sglang-cpu installs what this needs")
    servers = ("--actor.engine=sglang", "--device=cpu", "--weights.verify_every=1")
    run = launch("--steps=4", *RANKS, *servers)
    assert run.wait() == 0, run.text()
    assert run.summary()["tokens"]["balanced"]
    assert max(row.get("weights/check_requests_total", 0.0) for row in run.steps()) > 0
    assert all(abs(row["train/ratio_mean"] - 1.0) < 0.05 for row in run.steps())
    run.expect_clean_audit()


def test_ranks_on_two_hosts_come_back_together_after_one_dies(launch: Callable[..., Launched], join: Join) -> None:
    """Two launchers over loopback, with a replica of two ranks each. The second one comes late."""
    hosts = ("--learner.ranks=4", "--learner.replicas=2", "--learner.hosts=2", "--launch.silent_kill_s=600")
    run = launch("--steps=12", *RANKS[1:], *hosts)
    run.until(lambda: "the learner waits for 1 of 2 hosts" in run.text(), "that the learner waits")
    other = join(run.run_dir, "second", "--learner-ranks=2")
    run.until(lambda: len(run.steps()) >= 4, "four steps")
    log = (other.folder / "logs" / "learner-second-0.log").read_text()
    os.kill(int(re.findall(r"learner-second-0 rank 3 of 4 starts, pid (\d+)", log)[-1]), signal.SIGKILL)
    assert run.wait() == 0, run.text()
    assert other.process.wait(RUN_PATIENCE_S) == 0, other.text()
    summary = run.summary()
    assert summary["steps"] == 12 and summary["tokens"]["balanced"], summary
    assert {row["epoch"] for row in run.steps()} == {0, 1}, "all ranks began a new epoch"
    assert other.summary()["workers"]["learner-second-0"]["restarts"] == 1, "the second host came back by itself"
    run.expect_clean_audit()
