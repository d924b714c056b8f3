"""Short runs of `tests/sim/buffer/sim.py`, longer ones that are slow; the bench runs millions of events."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.patience import PATIENCE_S
from tests.sim.buffer import sim as buffer_sim

BENCH = Path(__file__).parents[2] / "bench" / "buffer_sim.py"


@pytest.mark.parametrize("number", range(12))
def test_a_short_life_of_a_buffer_breaks_nothing(number: int) -> None:
    """Of these, at least two each see a batch given out twice, a group that leaves incomplete and a sample that is
    settled twice while the next batch is asked for ahead."""
    totals = buffer_sim.chapter(f"5/{number}", 2_000, check_every=40)
    assert totals["events"] >= 2_000 and totals["tokens_trained"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7, 10, 13])
def test_twenty_thousand_random_events_break_nothing(seed: int) -> None:
    totals = buffer_sim.run(20_000, seed, check_every=20)
    assert totals["events"] >= 20_000
    for happened in (
        "tokens_trained",
        "tokens_evaluated",
        "tokens_masked:stale",
        "tokens_masked:unscorable",
        "tokens_dropped:actor_lost",
        "tokens_dropped:equal_rewards",
        "tokens_masked:truncated",
        "learner_restarts",
        "buffer_restarts",
        "hedges_won",
        "leases_wasted_hedge_late",
        "breaker_probes",
        "teacher_drains",
    ):
        assert totals[happened] > 0, f"the simulation never got to {happened}"


@pytest.mark.slow
def test_a_run_is_repeated_by_its_seed() -> None:
    assert buffer_sim.run(2_000, 7) == buffer_sim.run(2_000, 7)


@pytest.mark.slow
def test_the_chapters_are_the_same_in_several_processes() -> None:
    assert buffer_sim.run(6_000, 8, 1000, jobs=2) == buffer_sim.run(6_000, 8, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_its_processes_end_with_it(signum: signal.Signals) -> None:
    command = [sys.executable, str(BENCH), "--events", "100000000", "--jobs", "2"]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    family: list[psutil.Process] = []
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while sum("spawn_main" in " ".join(process.cmdline()) for process in family) < 2:
            assert time.monotonic() < deadline_s and parent.poll() is None, "two processes work"
            family = psutil.Process(parent.pid).children(recursive=True)
            time.sleep(0.05)
        parent.send_signal(signum)
        assert parent.wait(PATIENCE_S) == -signum
        _, left = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not left
    finally:
        for process in (parent, *family):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        parent.wait()
