"""Every role on a host of its own, over a network with delay and loss: what breaks heals without help."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.hosts.conftest import HostRun, hosts_or_skip
from tests.hosts.network import Network

HOSTS: Final = ("buffer", "learner", "actor-a", "actor-b", "teacher")
STEPS: Final = 100
"""Enough for what happens while the run goes on; while teacher or learner are cut off it stands still."""
SETTINGS: Final = (
    "--learner.lr=1e-4",
    "--buffer.batch_rollouts=8",
    "--buffer.heartbeat_s=0.5",
    "--buffer.peer_timeout_s=3",
    "--buffer.lease_s=6",
    "--actor.segment_tokens=16",
    "--learner.tasks.group_size=4",
    "--learner.eval_every=0",
    "--weights.join_timeout_s=5",
    "--weights.broadcast_timeout_s=4",
    "--weights.rejoin_delay_s=1",
    "--actors=2",
    "--teachers=1",
    "--max-staleness=2",
)
CUT_S: Final = 5.0
"""Longer than peer_timeout_s: the buffer counts who is cut off as lost."""


@pytest.fixture
def network() -> Iterator[Network]:
    """5 ms each way, a quarter more or less, and every hundredth frame lost."""
    with hosts_or_skip(*HOSTS, delay_ms=5.0, loss=0.01) as made:
        yield made


@pytest.fixture
def run(network: Network, tmp_path: Path) -> Iterator[HostRun]:
    """Started; the first steps are made, with both actors in the weight group."""
    made = HostRun(network, tmp_path / "run", [*SETTINGS, f"--steps={STEPS}"])
    try:
        made.start("buffer", "buffer")
        made.until((made.run_dir / "buffer.json").exists, "a buffer that listens")
        made.start("learner", "learner")
        made.start("teacher", "teacher")
        made.start("actor-a", "actor", 0)
        made.start("actor-b", "actor", 1)
        made.until(lambda: len(made.steps()) >= 3 and members(made) == 2, "the first steps")
        yield made
    finally:
        made.close()


def members(run: HostRun) -> int:
    """Of the weight group, as of the last step."""
    rows = run.steps()
    return int(rows[-1]["weights/members"]) if rows else 0


def partition(run: HostRun, network: Network, host: str) -> int:
    """Cut the host off for CUT_S; the step at which it is back."""
    network.cut_off(host)
    time.sleep(CUT_S)
    network.connect(host)
    return len(run.steps())


def test_partitions_and_a_killed_buffer_heal_without_help(run: HostRun, network: Network) -> None:
    # The only teacher, then the learner: the run waits for them, and goes on.
    for host in ("teacher", "learner"):
        back_at = partition(run, network, host)
        run.until(lambda back_at=back_at: len(run.steps()) >= back_at + 3, f"steps after the cut of {host}")

    # One of two actors: the run does not wait. Its tickets go to the other one, and weights go out without it.
    cut_at = len(run.steps())
    network.cut_off("actor-b")
    run.until(lambda: members(run) == 1 and len(run.steps()) >= cut_at + 3, "a weight group of one")
    network.connect("actor-b")
    run.until(lambda: members(run) == 2, "actor-b back in the weight group")
    assert "actor actor-1 is gone: silent" in run.log("buffer-0")

    # The buffer's process dies: the one that is started in its place goes on from the journal, and all come back to it.
    run.kill("buffer-0")
    died_at = len(run.steps())
    run.start("buffer", "buffer")
    run.until(lambda: len(run.steps()) >= died_at + 3, "steps with another buffer")

    run.until(lambda: all(p.poll() == 0 for p in run.processes.values()), "a good end of all")
    final = run.final()
    assert final.phase == "finished" and final.ledger.balanced and len(run.steps()) == STEPS
    assert max(final.staleness_hist) <= final.max_staleness
    assert sum(final.staleness_hist.values()) == final.ledger.tokens.trained
    assert final.ledger.tokens.trained == sum(row["train/tokens"] for row in run.steps())
    assert all(peer.tokens_total for peer in final.peers if peer.role != "launcher"), final.peers
