"""`launch.share = turns`: no two roles of a run compute at the same time, and everything else is as it was."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Launched
from tests.integration.test_whole_run import assert_balanced
from tests.tools.trace.overlaps import computing, overlap_s

Launch = Callable[..., Launched]


@pytest.mark.parametrize("staleness", [0, 1])
def test_in_turns_no_two_roles_compute_at_the_same_time(launch: Launch, tmp_path: Path, staleness: int) -> None:
    trace = tmp_path / "run.json"
    run = launch(
        *("--launch.share=turns", "--actors=1", "--teachers=1", "--steps=5", "--learner.eval_every=5"),
        *(f"--max-staleness={staleness}", f"--trace={trace}", "--buffer.heartbeat_s=0.1"),
    )
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
    assert set(overlap_s(trace).values()) == {0.0}
    assert len(computing(trace)["learner"]) == 5 and all(computing(trace).values())
    turns = {who: sum(r.get(f"turns/{who}_turns", 0) for r in run.steps()) for who in ("learner", "actors", "teachers")}
    assert turns["learner"] == 5 and min(turns.values()) >= 2
    assert sum(r.get("turns/teachers_turn_wait_s", 0) for r in run.steps()) > 0, "what was written waited for its turn"


def test_without_turns_roles_compute_at_the_same_time(launch: Launch, tmp_path: Path) -> None:
    """So the test above can fail."""
    trace = tmp_path / "run.json"
    run = launch("--actors=1", "--teachers=1", "--steps=5", "--max-staleness=2", f"--trace={trace}")
    assert run.wait() == 0, run.text()
    assert sum(overlap_s(trace).values()) > 0.1


@pytest.mark.slow
def test_the_turn_of_a_killed_worker_is_over(launch: Launch) -> None:
    """Each role is killed in its turn: the file of the turn names its holder."""
    run = launch("--launch.share=turns", "--actors=1", "--teachers=1", "--steps=12", "--learner.eval_every=0")
    for number, role in enumerate(("actor", "teacher", "learner"), 1):
        run.until(lambda n=number: len(run.steps()) >= 3 * n, f"step {3 * number}")
        (victim,) = run.workers(role)
        run.until(lambda name=role: (run.run_dir / "turn").read_text().startswith(name), f"the turn of the {role}")
        victim.send_signal(signal.SIGKILL)
    assert run.wait() == 0, run.text()
    assert_balanced(run.summary())
