"""A learner with a rank on each of two hosts, 50 ms apart with 1 % loss: a partition that heals before the limit of
silence costs time, one that outlasts it a new epoch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import pytest

from launch.workers.hosts import SILENT_S
from tests.hosts.network import NotPermitted, hosts
from tests.integration.conftest import Launched
from tests.integration.joined import Joined
from tests.patience import RUN_PATIENCE_S

STEPS: Final = 8
BEFORE_S: Final = SILENT_S / 4
AFTER_S: Final = SILENT_S * 1.5


def test_ranks_go_on_after_a_short_partition_and_come_back_after_a_long_one(tmp_path: Path) -> None:
    try:
        with hosts(("home", "guest"), delay_ms=50.0, loss=0.01) as network:
            address = network.address("home")
            settings = (
                f"--buffer.bind=tcp://{address}:5555",
                "--buffer.peer_timeout_s=120",
                f"--weights.host={address}",
                "--weights.allow_plain_network=true",
                *("--learner.ranks=2", "--learner.hosts=2", "--learner.checkpoint_every=2", "--learner.eval_every=0"),
                *("--actors=1", f"--steps={STEPS}", "--launch.silent_kill_s=600"),
            )
            run = Launched(tmp_path / "run", settings, network.command("home", []))
            joined = None
            try:
                run.until(lambda: "the learner waits for 1 of 2 hosts" in run.text(), "that the learner waits")
                guest = network.command("guest", [])
                joined = Joined(run.run_dir, "guest", tmp_path / "guest", ("--learner-ranks=1",), guest)
                run.until(lambda: len(run.steps()) >= 2, "the first steps")
                for for_s, epoch in ((BEFORE_S, 0), (AFTER_S, 1)):
                    network.cut_off("guest")
                    time.sleep(for_s)
                    network.connect("guest")
                    back_at = len(run.steps())
                    run.until(lambda back_at=back_at: len(run.steps()) >= back_at + 2, f"steps after {for_s:g} s")
                    assert max(row["epoch"] for row in run.steps()) == epoch, for_s
                assert run.wait() == 0, run.text() + joined.text()
                assert joined.process.wait(RUN_PATIENCE_S) == 0, joined.text()
                assert run.summary()["steps"] == STEPS and run.summary()["tokens"]["balanced"]
                run.expect_clean_audit()
            finally:
                run.kill()
                if joined is not None:
                    joined.end()
    except NotPermitted as reason:
        pytest.skip(f"no network namespaces here: {reason}")
