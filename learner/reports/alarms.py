"""Alarms: figures of the student's text that leave the range they began in. They say at which step that began.

A run that degenerates shows it in its own figures long before an evaluation does: answers grow to the length limit,
repeat themselves, the student becomes sure of everything or of nothing, and moves away from its teacher. No alarm stops
a run, because longer answers or less entropy may be what it is for.

No torch."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec

log = logging.getLogger(__name__)

ALARM_SINCE: Final = "alarm_since_"
"""Prefix of the gauges that say at which step each alarm began that is on."""
WINDOW: Final = 5
"""Steps over which a figure is averaged, at the start and now."""
KEPT: Final = 1000
"""Steps in which the beginning of an alarm is looked for."""


@dataclass(frozen=True)
class Watched:
    """A figure, and what it may become, given its mean over the first steps."""

    tag: str
    what: str
    limit: Callable[[float], float]
    above: bool = True
    """False: it must not fall below the limit."""

    def beyond(self, value: float, limit: float) -> bool:
        return value > limit if self.above else value < limit


WATCHED: Final = {
    "length": Watched("rollouts/length_mean", "answers grow longer", lambda start: 1.5 * start + 4),
    "truncated": Watched("rollouts/truncated_share", "answers run to the length limit", lambda start: start + 0.25),
    "repetition": Watched("rollouts/repetition", "answers repeat themselves", lambda start: start + 0.2),
    "entropy_high": Watched("train/entropy", "the student becomes unsure", lambda start: 4 * start + 0.1),
    "entropy_low": Watched(
        "train/entropy", "the student becomes sure of everything", lambda start: start / 20, above=False
    ),
    "reverse_kl": Watched("train/reverse_kl", "the student leaves its teacher", lambda start: 1.5 * start + 0.1),
}
"""By the name of the alarm. docs/metrics.md says why these limits."""


class Alarm(msgspec.Struct, frozen=True):
    """One figure that left its range."""

    name: str
    tag: str
    began: int
    """First of the steps that are beyond the limit without a gap."""
    start: float
    """Mean of the figure over the first steps."""
    value: float
    """Its mean over the steps up to the one at which the alarm was raised."""
    raised: int
    """That step."""
    over: int | None = None
    """Step at which the mean was back within the limit; None: it is not."""


class _Series:
    """The history of one figure."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self._first: list[float] = []
        self._past: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self.on: Alarm | None = None

    @property
    def start(self) -> float:
        return sum(self._first) / len(self._first)

    def add(self, name: str, step: int, value: float) -> Alarm | None:
        """The alarm, if it was raised or ended by this step. It ends when the mean is back half-way to the start, so
        that a figure near its limit raises one alarm and not many."""
        self._past.append((step, value))
        if len(self._first) < WINDOW:
            self._first.append(value)
            return None
        newest = [value for _, value in self._past][-WINDOW:]
        mean, limit = sum(newest) / len(newest), self.watched.limit(self.start)
        beyond = self.watched.beyond(mean, limit)
        if self.on is None and beyond:
            self.on = Alarm(name, self.watched.tag, self._began(limit), self.start, mean, step)
            return self.on
        if self.on is not None and not self.watched.beyond(mean, (self.start + limit) / 2):
            ended, self.on = msgspec.structs.replace(self.on, over=step), None
            return ended
        return None

    def _began(self, limit: float) -> int:
        """The step after the last one that was within the limit."""
        began = self._past[-1][0]
        for step, value in reversed(self._past):
            if not self.watched.beyond(value, limit):
                break
            began = step
        return began


class Alarms:
    """Watches the figures of each step. Owned by the learner's loop.

    A learner that is started again begins anew: its first steps are then the start that figures are compared with."""

    def __init__(self) -> None:
        self._series = {name: _Series(watched) for name, watched in WATCHED.items()}
        self.raised: list[Alarm] = []
        """All so far, in the order in which they were raised."""

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """`figures` by tag. A figure that is not there, or is not finite, is left out of its series."""
        for name, series in self._series.items():
            value = figures.get(series.watched.tag)
            if value is None or not abs(value) < float("inf"):
                continue
            alarm = series.add(name, step, float(value))
            if alarm is None:
                continue
            if alarm.over is None:
                self.raised.append(alarm)
                log.warning("%s", describe(alarm))
            else:
                last = max(i for i, one in enumerate(self.raised) if one.name == name)
                self.raised[last] = alarm
                log.info("alarm %s is over at step %d", name, alarm.over)

    @property
    def on(self) -> dict[str, int]:
        """Step at which it began, of each alarm that is on."""
        return {name: series.on.began for name, series in self._series.items() if series.on is not None}

    def figures(self) -> dict[str, float]:
        """For the metrics: 1 for an alarm that is on, and 0 for one that was."""
        return {f"alarm/{alarm.name}": float(alarm.name in self.on) for alarm in self.raised}


def describe(alarm: Alarm) -> str:
    """One line for a person."""
    watched = WATCHED[alarm.name]
    return (
        f"alarm {alarm.name}: {watched.what} since step {alarm.began}: {alarm.tag} is {alarm.value:.3g}, at the start "
        f"it was {alarm.start:.3g}. If that is not wanted, go back to a checkpoint before that step, and lower "
        "learner.lr or buffer.max_staleness (docs/metrics.md)"
    )
