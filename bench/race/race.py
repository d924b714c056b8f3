"""Accuracy against seconds: the arithmetic and the tables of bench/race/against_trl.py. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

OURS: Final = "Stillhouse"
PEER: Final = "TRL"
SIDES: Final = (OURS, PEER)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint that was evaluated."""

    step: int
    train_s: float
    """Seconds of training until its step was done. Start-up, evaluation and, for TRL, saving are not in it."""
    scores: dict[str, float]
    """What the evaluator measured, e.g. accuracy_sampled."""


class Race(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one side, with its evaluated checkpoints."""

    side: str
    settings: str
    """Name of the settings: same, best, or a row of the sweep."""
    seed: int
    startup_s: float
    """Seconds from the start of the program until training could begin: imports, models, workers."""
    steps: int
    train_s: float
    """Seconds of all steps."""
    cpu_s: dict[str, float]
    """Role -> CPU seconds while it trained. One role for TRL, which is one process."""
    points: tuple[Point, ...]

    @property
    def step_s(self) -> float:
        return self.train_s / self.steps

    @property
    def cpu_step_s(self) -> float:
        """CPU seconds per step, over all processes."""
        return sum(self.cpu_s.values()) / self.steps


def seconds_to(points: Iterable[Point], score: str, target: float) -> float | None:
    """Seconds of training until `score` first reaches `target`, on straight lines between the checkpoints. None if it
    does not."""
    before: Point | None = None
    for point in sorted(points, key=lambda point: point.train_s):
        if point.scores[score] >= target:
            if before is None:
                return point.train_s
            rise = point.scores[score] - before.scores[score]
            share = (target - before.scores[score]) / rise
            return before.train_s + share * (point.train_s - before.train_s)
        before = point
    return None


def pairs(races: Iterable[Race]) -> dict[tuple[str, int], dict[str, Race]]:
    """(settings, seed) -> side -> its run, for those that both sides have made."""
    found: dict[tuple[str, int], dict[str, Race]] = {}
    for race in races:
        found.setdefault((race.settings, race.seed), {})[race.side] = race
    return {key: sides for key, sides in sorted(found.items()) if set(sides) == set(SIDES)}


def ratio(pair: Mapping[str, Race], score: str, target: float) -> float | None:
    """Our seconds to the target over the peer's. None if one of them does not reach it."""
    ours, theirs = (seconds_to(pair[side].points, score, target) for side in SIDES)
    return None if ours is None or theirs is None else ours / theirs


def pair_table(races: Sequence[Race], score: str, target: float) -> list[str]:
    """Markdown: seconds to the target in each pair, and the median ratio of each kind of settings."""
    lines = [
        f"| settings, seed | seconds to {target:g}, {OURS} | {PEER} | ratio |",
        "|---|---:|---:|---:|",
    ]
    ratios: dict[str, list[float]] = {}
    for (settings, seed), pair in pairs(races).items():
        quotient = ratio(pair, score, target)
        if quotient is not None:
            ratios.setdefault(settings, []).append(quotient)
        ours, theirs = (seconds(seconds_to(pair[side].points, score, target)) for side in SIDES)
        lines.append(f"| {settings}, {seed} | {ours} | {theirs} | {'-' if quotient is None else f'{quotient:.2f}'} |")
    for settings, quotients in ratios.items():
        spread = f"{statistics.median(quotients):.2f} ({min(quotients):.2f} to {max(quotients):.2f})"
        lines.append(f"| {settings}, median of {len(quotients)} | | | {spread} |")
    return lines


def run_table(races: Sequence[Race], score: str, steps: Sequence[int], target: float | None = None) -> list[str]:
    """Markdown: one line per run with its scores at some steps, what a step costs, and its seconds to the target."""
    heads = [f"step {step}" for step in steps] + ["s per step", "CPU s per step", "start-up, s"]
    heads += [] if target is None else [f"s to {target:g}"]
    lines = [f"| settings, seed | side | {' | '.join(heads)} |", f"|---|---|{'---:|' * len(heads)}"]
    for race in races:
        at = {point.step: point.scores[score] for point in race.points}
        cells = [f"{at[step]:.3f}" if step in at else "-" for step in steps]
        cells += [f"{race.step_s:.3f}", f"{race.cpu_step_s:.3f}", f"{race.startup_s:.1f}"]
        cells += [] if target is None else [seconds(seconds_to(race.points, score, target))]
        lines.append(f"| {race.settings}, {race.seed} | {race.side} | {' | '.join(cells)} |")
    return lines


def role_table(races: Iterable[Race]) -> list[str]:
    """Markdown: CPU seconds per step of each role of our runs, mean over the runs of the same settings."""
    by_settings: dict[str, list[Race]] = {}
    for race in races:
        if race.side == OURS:
            by_settings.setdefault(race.settings, []).append(race)
    lines = ["| settings | role | CPU seconds per step | share |", "|---|---|---:|---:|"]
    for settings, runs in by_settings.items():
        mean = {role: statistics.mean(run.cpu_s.get(role, 0.0) / run.steps for run in runs) for role in runs[0].cpu_s}
        total = sum(mean.values())
        lines += [f"| {settings} | {role} | {value:.3f} | {value / total:.0%} |" for role, value in mean.items()]
    return lines


def seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.1f}"
