"""A learner with a rank on each of two hosts, 50 ms apart with 1 % loss: a partition that heals before the limit of
silence costs time, one that outlasts it a new epoch."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from stillhouse.launch.workers.hosts import SILENT_S
from tests.hosts.conftest import hosts_or_skip
from tests.hosts.run_at_home import RunAtHome

STEPS: Final = 8
SETTINGS: Final = (
    *("--learner.ranks=2", "--learner.hosts=2", "--learner.checkpoint_every=2", "--learner.eval_every=0"),
    *("--weights.allow_plain_network=true", "--buffer.peer_timeout_s=120", "--launch.silent_kill_s=600"),
    *("--actors=1", f"--steps={STEPS}"),
)
BEFORE_S: Final = SILENT_S / 4
AFTER_S: Final = SILENT_S * 1.5


def test_ranks_go_on_after_a_short_partition_and_come_back_after_a_long_one(tmp_path: Path) -> None:
    with ExitStack() as stack:
        network = stack.enter_context(hosts_or_skip("home", "guest", delay_ms=50.0, loss=0.01))
        ours = RunAtHome(network, tmp_path, stack, *SETTINGS)
        run = ours.run
        run.until(lambda: "the learner waits for 1 of 2 hosts" in run.text(), "that the learner waits")
        guest = ours.join("guest", "--learner-ranks=1")
        run.until(lambda: len(run.steps()) >= 2, "the first steps")
        for for_s, epoch in ((BEFORE_S, 0), (AFTER_S, 1)):
            network.cut_off("guest")
            time.sleep(for_s)
            network.connect("guest")
            back_at = len(run.steps())
            run.until(lambda back_at=back_at: len(run.steps()) >= back_at + 2, f"steps after {for_s:g} s")
            assert max(row["epoch"] for row in run.steps()) == epoch, for_s
        ours.expect_good_end(guest)
        assert run.summary()["steps"] == STEPS
        run.expect_clean_audit()
