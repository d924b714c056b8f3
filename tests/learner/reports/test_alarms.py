"""Alarms: raised by runs that degenerate and by no others, with the step at which it began."""

from __future__ import annotations

import logging
import math

import msgspec
import numpy as np
import pytest

from learner.reports.alarms import WATCHED, Alarm, Alarms
from learner.reports.figures import REPEATED_TOKENS, RolloutFigures
from tests.learner.reports.test_figures import frames, item

TAGS = sorted({watched.tag for watched in WATCHED.values()})


def run(series: dict[str, list[float]], *, first: int = 1) -> Alarms:
    alarms = Alarms()
    n = max(map(len, series.values()))
    for step in range(n):
        alarms.add(first + step, {tag: values[step] for tag, values in series.items() if step < len(values)})
    return alarms


def test_the_reverse_kl_of_a_run_that_collapsed() -> None:
    """Of the built-in student under k1 at a rate of 1e-3: its accuracy fell from 0.31 to 0."""
    seen = [0.537, 0.688, 0.377, 0.403, 0.307, 0.338, 0.357, 0.453, 0.718, 0.805, 0.774, 0.537]
    alarms = run({"train/reverse_kl": [*seen, 0.866, 0.9, 1.1, 1.3, 1.5, 1.829, 1.856, 2.549, 4.275]})
    (alarm,) = alarms.raised
    assert (alarm.name, alarm.began, alarm.over) == ("reverse_kl", 13, None)
    assert alarm.start == pytest.approx(sum(seen[:5]) / 5)
    assert alarms.on == {"reverse_kl": 13} and alarms.figures() == {"alarm/reverse_kl": 1.0}


def test_a_steady_run_raises_none() -> None:
    random = np.random.default_rng(0)
    noise = random.normal(1.0, 0.2, (len(TAGS), 200))
    start = {"rollouts/length_mean": 36.0, "rollouts/truncated_share": 0.02, "rollouts/repetition": 0.05}
    falling = np.linspace(1.0, 0.3, 200)
    series = {tag: (start.get(tag, 0.3) * falling * noise[i]).tolist() for i, tag in enumerate(TAGS)}
    assert run(series).raised == []


@pytest.mark.parametrize(
    ("name", "start", "later"),
    [
        ("length", 36.0, 96.0),
        ("truncated", 0.0, 0.8),
        ("repetition", 0.05, 0.6),
        ("entropy_high", 0.13, 2.0),
        ("entropy_low", 0.13, 0.001),
        ("reverse_kl", 0.5, 3.0),
    ],
)
def test_each_alarm_says_when_it_began_and_ends_half_way_back(name: str, start: float, later: float) -> None:
    tag = WATCHED[name].tag
    alarms = run({tag: [start] * 20 + [later] * 10 + [start] * 10}, first=101)
    (alarm,) = [one for one in alarms.raised if one.name == name]
    assert alarm.began == 121 and 121 <= alarm.raised <= 125
    assert alarm.over is not None and 131 <= alarm.over <= 136
    assert name not in alarms.on and alarms.figures()[f"alarm/{name}"] == 0.0


def test_a_figure_near_its_limit_raises_one_alarm() -> None:
    limit = WATCHED["length"].limit(36.0)
    swinging = [limit + (3.0 if step % 16 < 8 else -3.0) for step in range(160)]
    assert len(run({"rollouts/length_mean": [36.0] * 10 + swinging}).raised) == 1


def test_one_outlier_raises_none() -> None:
    lengths = [36.0] * 20
    lengths[12] = 60.0
    assert run({"rollouts/length_mean": lengths}).raised == []


def test_figures_that_are_missing_or_not_finite_are_left_out() -> None:
    alarms = run({"train/reverse_kl": [0.5, math.nan, 0.5, math.inf, 0.5, 0.5, 0.5, math.inf, math.nan, 0.5]})
    alarms.add(11, {})
    assert alarms.raised == []
    for step in range(12, 20):
        alarms.add(step, {"train/reverse_kl": 3.0})
    assert alarms.on == {"reverse_kl": 12}


def test_the_log_says_which_step_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run({"rollouts/length_mean": [36.0] * 8 + [90.0] * 8 + [36.0] * 8})
    raised, over = [record for record in caplog.records if record.name == "learner.reports.alarms"]
    assert raised.levelname == "WARNING" and over.levelname == "INFO"
    assert "since step 9" in raised.message and "rollouts/length_mean" in raised.message
    assert "learner.lr" in raised.message


def test_an_alarm_survives_json() -> None:
    alarm = Alarm("length", "rollouts/length_mean", 3, 36.0, 90.0, 5)
    assert msgspec.json.decode(msgspec.json.encode(alarm), type=Alarm) == alarm


def slow_repetition(rollouts: list[list[int]]) -> float:
    """By looking at each run of tokens, and at all before it."""
    n = repeated = 0
    for ids in rollouts:
        for at in range(len(ids) - REPEATED_TOKENS + 1):
            here = ids[at : at + REPEATED_TOKENS]
            n += 1
            repeated += any(ids[before : before + REPEATED_TOKENS] == here for before in range(at))
    return repeated / n


def test_repetition_is_the_share_of_runs_that_came_before() -> None:
    random = np.random.default_rng(1)
    rollouts = [
        [7, 7] * 10,
        random.integers(0, 50_000, 40).tolist(),
        random.integers(0, 2, 40).tolist(),
        [*range(12), *range(12)],
        [1, 2, 3],  # shorter than a run
    ]
    arrays = []
    for ids in rollouts:
        own = frames([0, 0, *[1] * len(ids)], -1.0, -2.0)  # two tokens of a prompt, not counted
        own[0] = np.array([5, 5, *ids], np.int32)
        arrays += own
    figures = RolloutFigures().update([item() for _ in rollouts], arrays)
    assert figures["rollouts/repetition"] == pytest.approx(slow_repetition(rollouts))
    assert "rollouts/repetition" not in RolloutFigures().update([item()], frames([0] * 8, -1.0, -2.0))
