"""Accuracy against seconds: the arithmetic of bench/race/against_trl.py, computed again by hand."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.race.race import OURS, PEER, Point, Race, pair_table, pairs, ratio, role_table, run_table, seconds_to
from bench.role_cpu import role_cpu_s
from tests.patience import PATIENCE_S

SCORE = "accuracy_sampled"


def points(*found: tuple[float, float]) -> tuple[Point, ...]:
    return tuple(Point(step=i, train_s=s, scores={SCORE: value}) for i, (s, value) in enumerate(found))


def race(side: str, seed: int, *found: tuple[float, float], settings: str = "same") -> Race:
    return Race(
        side=side,
        settings=settings,
        seed=seed,
        startup_s=4.0,
        steps=10,
        train_s=found[-1][0],
        cpu_s={"learner": 3.0, "actor": 1.0} if side == OURS else {PEER: 8.0},
        points=points(*found),
    )


def crossing_by_small_steps(found: list[tuple[float, float]], target: float) -> float:
    """Walk along the straight lines in tenths of a millisecond."""
    for (s, value), (next_s, next_value) in itertools.pairwise(found):
        for i in range(int((next_s - s) * 1e4) + 1):
            at = s + i / 1e4
            if value + (next_value - value) * (at - s) / (next_s - s) >= target:
                return at
    raise AssertionError("never")


@pytest.mark.parametrize("target", [0.35, 0.5, 0.62, 0.75, 0.8])
def test_the_target_is_reached_on_the_line_between_two_checkpoints(target: float) -> None:
    found = [(0.0, 0.3), (3.0, 0.25), (5.5, 0.6), (9.0, 0.58), (11.0, 0.81)]
    assert seconds_to(points(*found), SCORE, target) == pytest.approx(crossing_by_small_steps(found, target), abs=2e-4)


def test_a_target_that_is_not_reached_has_no_time_and_no_ratio() -> None:
    slow, quick = race(PEER, 0, (0.0, 0.3), (9.0, 0.7)), race(OURS, 0, (0.0, 0.3), (9.0, 0.8))
    assert seconds_to(slow.points, SCORE, 0.75) is None
    assert ratio({PEER: slow, OURS: quick}, SCORE, 0.75) is None
    assert "not reached" in pair_table([slow, quick], SCORE, 0.75)[2]


def test_a_run_that_begins_above_the_target_takes_no_time() -> None:
    assert seconds_to(points((0.0, 0.9), (5.0, 0.95)), SCORE, 0.75) == 0.0


def test_only_runs_of_the_same_settings_and_seed_are_a_pair() -> None:
    line = ((0.0, 0.3), (8.0, 0.8))
    races = [race(OURS, 0, *line), race(PEER, 1, *line), race(PEER, 0, *line, settings="best")]
    assert pairs(races) == {}
    races.append(race(PEER, 0, *line))
    assert list(pairs(races)) == [("same", 0)]


def test_the_ratio_is_ours_over_theirs_and_the_table_has_the_median() -> None:
    races: list[Race] = []
    for seed, (ours_s, theirs_s) in enumerate([(2.0, 8.0), (3.0, 6.0), (3.0, 4.0)]):
        races.append(race(OURS, seed, (0.0, 0.0), (ours_s, 0.5)))
        races.append(race(PEER, seed, (0.0, 0.0), (theirs_s, 0.5)))
    table = pair_table(races, SCORE, 0.5)
    assert table[2:5] == [
        "| same, 0 | 2.0 | 8.0 | 0.25 |",
        "| same, 1 | 3.0 | 6.0 | 0.50 |",
        "| same, 2 | 3.0 | 4.0 | 0.75 |",
    ]
    assert table[5] == "| same, median of 3 | | | 0.50 (0.25 to 0.75) |"


def test_costs_are_per_step_and_shares_sum_to_one() -> None:
    races = [race(OURS, 0, (0.0, 0.3), (20.0, 0.8)), race(PEER, 0, (0.0, 0.3), (40.0, 0.8))]
    ours, theirs = run_table(races, SCORE, [0, 1, 9])[2:]
    assert ours == "| same, 0 | Stillhouse | 0.300 | 0.800 | - | 2.000 | 0.400 | 4.0 |"
    with_target = run_table(races, SCORE, [], target=0.55)
    assert with_target[0] == "| settings, seed | side | s per step | CPU s per step | start-up, s | s to 0.55 |"
    assert with_target[2:] == [
        "| same, 0 | Stillhouse | 2.000 | 0.400 | 4.0 | 10.0 |",
        "| same, 0 | TRL | 4.000 | 0.800 | 4.0 | 20.0 |",
    ]
    assert theirs == "| same, 0 | TRL | 0.300 | 0.800 | - | 4.000 | 0.800 | 4.0 |"
    assert role_table(races)[2:] == ["| same | learner | 0.300 | 75% |", "| same | actor | 0.100 | 25% |"]


def test_cpu_seconds_are_those_of_the_processes_that_write_to_the_runs_logs(tmp_path: Path) -> None:
    """Two workers of one role; one burns CPU, and its own clock says how much."""
    (tmp_path / "logs").mkdir()
    burn = "import time\nwhile time.process_time() < 0.4: pass\nprint(time.process_time(), flush=True)\ntime.sleep(60)"
    idle = "import time\nprint('here', flush=True)\ntime.sleep(60)"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for i, program in enumerate((burn, idle)):
            with (tmp_path / "logs" / f"actor-{i}.log").open("wb") as log:
                processes.append(subprocess.Popen([sys.executable, "-S", "-c", program], stdout=log))
        give_up = time.monotonic() + PATIENCE_S
        while not all((tmp_path / "logs" / f"actor-{i}.log").stat().st_size for i in range(2)):
            assert time.monotonic() < give_up, "the two processes wrote nothing"
            time.sleep(0.02)
        found = role_cpu_s(tmp_path, launcher_pid=-1)
        burnt_s = float((tmp_path / "logs" / "actor-0.log").read_text())
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert found.keys() == {"actor"}
    assert burnt_s - 0.05 <= found["actor"] <= burnt_s + 1.0  # the idle one's start is in it


def test_the_peers_requirements_are_the_projects_versions_where_both_have_them() -> None:
    root = Path(__file__).parents[3]
    pins = {
        file: dict(re.findall(r"^([\w.-]+)==([\w.+]+)$", (root / file).read_text(), re.MULTILINE))
        for file in ("constraints.txt", "bench/race/trl_requirements.txt")
    }
    ours, theirs = pins.values()
    assert {"torch", "transformers", "tokenizers"} <= ours.keys() & theirs.keys()
    assert {name: theirs[name] for name in theirs if name in ours} == {
        name: ours[name] for name in theirs if name in ours
    }
