"""Alarms: raised by runs that degenerate and by no others, with the step at which it began."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from stillhouse.learner.reports.alarms import WATCHED, Alarms, Diversity, describe_alarm
from stillhouse.learner.reports.figures import REPEATED_TOKENS, RolloutFigures
from tests.learner.reports.test_figures import frames, item

RECORDED = json.loads(Path(__file__).with_name("recorded_runs.json").read_text(encoding="utf-8"))
"""Run -> figure -> its values step by step (null: none), of real runs of the built-in models by examples/demo.toml and
the recipes with other seeds, batches and bounds, and of examples/smollm2/context.toml. Those named `collapse` had
too high a learning rate."""
LENGTH, REWARD, KL, ENTROPY = "rollouts/length_mean", "rollouts/reward_mean", "train/reverse_kl", "train/entropy"
TRUNCATED, REPETITION, GAP = "rollouts/truncated_share", "rollouts/repetition", "rollouts/ending_gap"


def run(series: Mapping[str, Sequence[float | None]], *, first: int = 1) -> Alarms:
    alarms = Alarms()
    for step in range(max(map(len, series.values()))):
        figures = {tag: values[step] for tag, values in series.items() if step < len(values)}
        alarms.add(first + step, {tag: value for tag, value in figures.items() if value is not None})
    return alarms


def names(alarms: Alarms) -> set[str]:
    return {alarm.name for alarm in alarms.raised}


def noisy(*means: tuple[float, float, int], noise: float, seed: int = 0, low: float = 0.0) -> list[float]:
    """(from, to, steps) one after another, with noise."""
    random = np.random.default_rng(seed)
    clean = np.concatenate([np.linspace(a, b, n) for a, b, n in means])
    return np.maximum(low, clean + random.normal(0, noise, len(clean))).tolist()


@pytest.mark.parametrize("name", [name for name in RECORDED if not name.startswith("collapse")])
def test_a_healthy_run_raises_none(name: str) -> None:
    assert run(RECORDED[name]).raised == []


@pytest.mark.parametrize("name", [name for name in RECORDED if name.startswith("collapse")])
def test_a_run_that_collapsed_raises_some(name: str) -> None:
    raised = names(run(RECORDED[name]))
    assert raised and ("short" in raised or not name.startswith("collapse_to_short"))


PLANTED: dict[str, tuple[str, dict[str, list[float]]]] = {
    "ends at once": (
        "short",
        {LENGTH: noisy((40, 40, 20), (40, 2, 40), noise=5), KL: noisy((0.5, 0.5, 60), noise=0.1)},
    ),
    "forgets": ("reward", {REWARD: noisy((0.3, 0.9, 60), (0.9, 0.1, 40), noise=0.1)}),
    "negative rewards": ("reward", {REWARD: noisy((-5, -2, 60), (-2, -6, 40), noise=0.5, low=-9)}),
    "one answer": ("entropy_low", {ENTROPY: noisy((1.2, 1.0, 30), (1.0, 0.02, 30), noise=0.05), KL: [0.6] * 60}),
    "babbles": ("entropy_high", {ENTROPY: noisy((0.15, 0.15, 20), (0.15, 3.0, 40), noise=0.03)}),
    "never ends": ("truncated", {TRUNCATED: noisy((0.05, 0.05, 20), (0.05, 0.9, 40), noise=0.05)}),
    "never ends, longer": ("length", {LENGTH: noisy((40, 40, 20), (40, 400, 40), noise=9)}),
    "repeats": ("repetition", {REPETITION: noisy((0.02, 0.02, 20), (0.02, 0.8, 40), noise=0.02)}),
    "leaves": ("reverse_kl", {KL: noisy((0.5, 0.3, 20), (0.3, 3.0, 40), noise=0.05)}),
    "only shorter": (
        "short_kl",
        {
            KL: noisy((0.5, 0.5, 20), (0.5, 0.2, 40), noise=0.05),
            LENGTH: noisy((40, 40, 20), (40, 15, 40), noise=4),
            GAP: noisy((0.2, 0.2, 20), (0.2, 6.0, 40), noise=0.3),
            REWARD: noisy((0.3, 0.3, 60), noise=0.1),
        },
    ),
}


@pytest.mark.parametrize("what", PLANTED)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_planted_degeneration_is_named_while_it_lasts(what: str, resumed: bool) -> None:
    name, series = PLANTED[what]
    alarms = run(series, first=101 if resumed else 1)
    assert name in alarms.on and all(alarm.began - (100 if resumed else 0) > 10 for alarm in alarms.raised)
    before = {tag: values[:20] for tag, values in series.items()}
    assert run(before).raised == [], "what came before it was none"


def test_answers_that_get_short_because_the_teachers_are_short_raise_none() -> None:
    """As in examples/smollm2: a fifth of the length, and the teacher would end there as well."""
    shorter = {LENGTH: noisy((40, 40, 10), (40, 8, 40), noise=5), KL: noisy((0.8, 0.8, 10), (0.8, 0.3, 40), noise=0.1)}
    assert names(run(shorter)) == {"short", "short_kl"}
    assert names(run(shorter | {GAP: noisy((0.0, 0.0, 50), noise=0.5, low=-9)})) == set()
    assert names(run(shorter | {GAP: noisy((0.0, 5.0, 50), noise=0.5, low=-9)})) == {"short", "short_kl"}
    assert names(run(shorter | {REWARD: noisy((0.2, 0.2, 10), (0.2, 0.9, 40), noise=0.1)})) == set(), "it earns more"


@pytest.mark.parametrize("seed", range(12))
def test_small_batches_raise_none_by_chance(seed: int) -> None:
    """Batches of eight rollouts: rewards of 0 and 1, lengths that differ by their mean; 2,000 steps."""
    random = np.random.default_rng(seed)
    rate = random.uniform(0.1, 0.9)
    series = {
        REWARD: random.binomial(8, rate, 2000) / 8,
        TRUNCATED: random.binomial(8, 0.1, 2000) / 8,
        LENGTH: random.exponential(60, (2000, 8)).mean(axis=1),
        KL: 0.5 * random.lognormal(0, 0.3, 2000),
        ENTROPY: 0.3 * random.lognormal(0, 0.2, 2000),
    }
    assert run({tag: values.tolist() for tag, values in series.items()}).raised == []


@pytest.mark.parametrize(
    ("name", "start", "later"),
    [
        ("length", 36.0, 96.0),
        ("short", 36.0, 4.0),
        ("truncated", 0.0, 0.8),
        ("repetition", 0.05, 0.6),
        ("entropy_high", 0.13, 2.0),
        ("entropy_low", 0.13, 0.001),
        ("reverse_kl", 0.5, 3.0),
        ("reward", 0.9, 0.1),
    ],
)
def test_each_alarm_says_when_it_began_and_ends_half_way_back(name: str, start: float, later: float) -> None:
    tag = WATCHED[name].tag
    alarms = run({tag: [start] * 20 + [later] * 10 + [start] * 10}, first=101)
    (alarm,) = [one for one in alarms.raised if one.name == name]
    assert alarm.began == 121 and 121 <= alarm.raised <= 125 and alarm.start == pytest.approx(start)
    assert alarm.over is not None and 131 <= alarm.over <= 136
    assert name not in alarms.on and alarms.figures()[f"alarm/{name}"] == 0.0


def test_an_evaluation_that_gets_worse_is_seen_if_it_is_large_enough() -> None:
    for n, raised in ((8, set[str]()), (256, {"accuracy"})):
        alarms = Alarms()
        for step, accuracy in ((0, 0.3), (25, 0.9), (50, 0.4), (75, 0.35)):
            alarms.add_accuracy(step, accuracy, n)
        assert names(alarms) == raised
        assert [alarm.began for alarm in alarms.raised] == ([50] if raised else [])
    alarms.add_accuracy(100, 0.85, 256)
    assert alarms.on == {} and alarms.raised[0].over == 100


@pytest.mark.parametrize(
    ("later", "raised"),
    [
        (Diversity(0.15, 64, 0.7, 0.4), True),  # the prompts that any answer solves are no more than before
        (Diversity(0.15, 64, 0.95, 0.4), False),  # it has learnt them
        (Diversity(0.15, 64, 0.7, 0.2), False),  # its teacher is as sure
        (Diversity(0.15, 64, 0.5, 0.2), True),
        (Diversity(0.15, 64, None, 0.4), True),
        (Diversity(0.15, 64, None, 0.2), False),
        (Diversity(0.45, 64, 0.7, 0.4), False),
        (Diversity(0.15, 4, 0.7, 0.4), False),  # too few prompts to say
    ],
)
def test_answers_that_become_alike(later: Diversity, raised: bool) -> None:
    alarms = Alarms()
    alarms.add_diversity(0, Diversity(0.8, later.prompts, later.pass_at and 0.7, 0.5))
    alarms.add_diversity(20, later)
    assert names(alarms) == ({"diversity"} if raised else set())
    alarms.add_diversity(40, later._replace(distinct=0.7))
    assert alarms.on == {}
    assert [describe_alarm(one)[:68] for one in alarms.raised] == (
        ["alarm diversity: answers to one prompt become alike since step 20: e"] if raised else []
    )


def test_a_figure_near_its_limit_raises_one_alarm() -> None:
    limit = WATCHED["length"].limit(36.0)
    swinging = [limit + (3.0 if step % 16 < 8 else -3.0) for step in range(160)]
    assert len(run({LENGTH: [36.0] * 10 + swinging}).raised) == 1


def test_one_outlier_raises_none() -> None:
    lengths = [36.0] * 20
    lengths[12] = 60.0
    assert run({LENGTH: lengths}).raised == []


def test_figures_that_are_missing_or_not_finite_are_left_out() -> None:
    alarms = run({KL: [0.5, math.nan, 0.5, math.inf, 0.5, 0.5, 0.5, math.inf, *[0.5] * 7]})
    alarms.add(16, {})
    assert alarms.raised == []
    for step in range(17, 25):
        alarms.add(step, {KL: 3.0})
    assert alarms.on == {"reverse_kl": 17}


def test_what_is_shown_of_the_whole_run_is_its_first_and_newest_steps() -> None:
    alarms = run({LENGTH: [float(n) for n in range(1, 101)], REWARD: [0.5, 1.0, 0.0]})
    assert alarms.now() == {LENGTH: 98.0, REWARD: 0.5}
    assert alarms.changes() == {LENGTH: (3.0, 98.0), REWARD: (0.75, 0.5)}


def test_the_log_says_which_step_and_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run({LENGTH: [36.0] * 18 + [90.0] * 8 + [36.0] * 8})
    raised, over = [record for record in caplog.records if record.name == "stillhouse.learner.reports.alarms"]
    assert raised.levelname == "WARNING" and over.levelname == "INFO"
    assert "since step 19" in raised.message and LENGTH in raised.message
    assert "learner.lr" in raised.message


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
