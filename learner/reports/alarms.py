"""Alarms: figures of the student's text that leave the range they began in. They say at which step that began.

A run that degenerates shows it in its own figures long before an evaluation does: answers grow to the length limit or
shrink to nothing, repeat themselves, earn less, the student becomes sure of everything or of nothing, and moves away
from its teacher. Some of that may be what a run is for: answers that get short because the teacher's are. So a change
that the teacher or the reward approves of is none (`Watched.unless`). With learner.stop_on_alarm an alarm ends the run.

A mean over the newest steps is compared with one over the first, or with the best so far. It must differ by more than
the noise of single steps explains, so that small batches raise nothing by chance. No torch."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import msgspec

log = logging.getLogger(__name__)

ALARM_SINCE: Final = "alarm_since_"
"""Prefix of the gauges that say at which step each alarm began that is on."""
MEAN: Final = "mean_"
"""Prefix of the gauges of `Alarms.now`, with the last part of each tag."""
FIRST: Final = 10
"""Steps over which a figure is averaged at the start, and where it was best. None raises an alarm before them."""
FEW, MANY = 5, 20
"""Steps over which it is averaged now: a few show a large change, and many a smaller one of a noisy figure."""
KEPT: Final = 1000
"""Steps in which the beginning of an alarm is looked for."""
MOST: Final = 100
"""Alarms kept; of more, the newest."""
NOISE: Final = 6.0
"""Standard errors by which two means must differ: many pairs are looked at in a long run."""
SURE: Final = 4.0
"""The same of two means that are not looked at step by step."""
BEST_NOISE: Final = 7.0
"""If one of them is the best of many."""
LENGTH, REWARD, TRUNCATED = "rollouts/length_mean", "rollouts/reward_mean", "rollouts/truncated_share"
ENTROPY, REVERSE_KL, PER_ANSWER = "train/entropy", "train/reverse_kl", "rollouts/reverse_kl_per_answer"
UNREWARDED = "rollouts/unrewarded_share"
REPETITION, ENDING_GAP, ACCURACY = "rollouts/repetition", "rollouts/ending_gap", "eval/accuracy_sampled"
DISTINCT, EVAL_KL, PASS_AT = "eval/distinct_2", "eval/reverse_kl", "eval/pass_at_"
OF_EVALUATIONS: Final = (ACCURACY, DISTINCT)


class FigureHistory:
    """One figure, step by step."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.past: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self.best = -math.inf
        """Highest mean over FIRST steps."""
        self._changes: deque[float] = deque(maxlen=KEPT)
        self._changes_sum = 0.0

    def add(self, step: int, value: float) -> None:
        if self.past:
            if len(self._changes) == KEPT:
                self._changes_sum -= self._changes[0]
            self._changes.append((value - self.past[-1][1]) ** 2)
            self._changes_sum += self._changes[-1]
        self.past.append((step, value))
        if len(self.first) < FIRST:
            self.first.append(value)
        if len(self.past) >= FIRST:
            self.best = max(self.best, self.mean(FIRST))

    @property
    def start(self) -> float:
        """NaN before the first step."""
        return sum(self.first) / len(self.first) if self.first else math.nan

    def mean(self, n: int) -> float:
        """Mean of the newest `n` steps, or of as many as there are; NaN without any."""
        newest = [self.past[-1 - i][1] for i in range(min(n, len(self.past)))]
        return sum(newest) / len(newest) if newest else math.nan

    def error(self, n: int) -> float:
        """Standard error of the difference of means over FIRST and over `n` steps. The noise is that of neighbouring
        steps (von Neumann), so that a trend does not count as noise."""
        variance = max(0.0, self._changes_sum) / max(1, len(self._changes)) / 2
        return math.sqrt(variance * (1 / FIRST + 1 / n))


Histories = Mapping[str, FigureHistory]


def _ends_as_its_teacher(of: Histories) -> bool:
    """The teacher would end its answers there as well, within a factor of e in probability."""
    return of[ENDING_GAP].mean(FEW) <= 1.0


def _earns_more(of: Histories) -> bool:
    rewards = of[REWARD]
    return rewards.mean(MANY) - rewards.start > SURE * rewards.error(MANY)


def _much_nearer(of: Histories) -> bool:
    return of[REVERSE_KL].mean(FEW) < 0.5 * of[REVERSE_KL].start


def _shorter(of: Histories) -> bool:
    return of[LENGTH].mean(FEW) < 0.6 * of[LENGTH].start


@dataclass(frozen=True)
class Watched:
    """A figure, and what it may become, given its mean over the first steps, or its best."""

    tag: str
    what: str
    limit: Callable[[float], float]
    above: bool = True
    """False: it must not fall below the limit."""
    best: bool = False
    """Compared with its best mean so far."""
    only_if: Callable[[Histories], bool] = lambda _: True
    unless: tuple[Callable[[Histories], bool], ...] = ()
    """What makes the change a wanted one."""

    def beyond(self, value: float, limit: float) -> bool:
        return value > limit if self.above else value < limit

    def reference(self, history: FigureHistory) -> float:
        return history.best if self.best else history.start

    def differs(self, history: FigureHistory, n: int) -> bool:
        """Whether the mean of the newest `n` is beyond the limit, by more than chance, and not on its way back."""
        if len(history.past) < FIRST + n:
            return False
        reference, mean = self.reference(history), history.mean(n)
        limit, noise = self.limit(reference), (BEST_NOISE if self.best else NOISE) * history.error(n)
        going_on = self.beyond(history.mean(FEW), (reference + limit) / 2)
        return going_on and self.beyond(mean, limit) and abs(mean - reference) > noise


WATCHED: Final = {
    "length": Watched(LENGTH, "answers grow longer", lambda start: 1.5 * start + 4, unless=(_earns_more,)),
    "short": Watched(
        LENGTH, "answers get short", lambda start: start / 2, above=False, unless=(_ends_as_its_teacher, _earns_more)
    ),
    "truncated": Watched(TRUNCATED, "answers run to the length limit", lambda start: start + 0.25),
    "repetition": Watched(REPETITION, "answers repeat themselves", lambda start: start + 0.2),
    "entropy_high": Watched(ENTROPY, "the student becomes unsure", lambda start: 4 * start + 0.1),
    "entropy_low": Watched(
        ENTROPY,
        "the student becomes sure of everything",
        lambda start: start / 5,
        above=False,
        unless=(_much_nearer, _earns_more),
    ),
    "reverse_kl": Watched(REVERSE_KL, "the student leaves its teacher", lambda start: start + 0.5 * abs(start) + 0.1),
    "short_kl": Watched(
        REVERSE_KL,
        "the divergence per token falls only because answers get short",
        lambda start: start - 0.2 * abs(start),
        above=False,
        only_if=_shorter,
        unless=(_ends_as_its_teacher, _earns_more),
    ),
    "reward": Watched(
        REWARD, "the student earns less than before", lambda best: best - 0.4 * abs(best), above=False, best=True
    ),
    "diversity": Watched(DISTINCT, "answers to one prompt become alike", lambda start: start / 2, above=False),
    "accuracy": Watched(ACCURACY, "the evaluation gets worse", lambda best: 0.6 * best, above=False, best=True),
}
"""By the name of the alarm. docs/metrics.md says why these limits."""
FIGURES: Final = tuple(dict.fromkeys((*(one.tag for one in WATCHED.values()), PER_ANSWER, ENDING_GAP, UNREWARDED)))
"""Tags that are followed."""
CHANGES: Final = (LENGTH, TRUNCATED, REWARD, UNREWARDED, REVERSE_KL, PER_ANSWER)
"""Those that a summary shows: at the start, and at the end."""


class Alarm(msgspec.Struct, frozen=True):
    """One figure that left its range."""

    name: str
    tag: str
    began: int
    """First of the steps that are beyond the limit without a gap."""
    start: float
    """Mean of the figure over the first steps, or its best."""
    value: float
    """Its mean over the steps up to the one at which the alarm was raised."""
    raised: int
    """That step."""
    over: int | None = None
    """Step at which the mean was back within the limit; None: it is not."""


class Diversity(NamedTuple):
    """What an evaluation says of several answers to each prompt."""

    distinct: float
    """distinct_2 (learner.evaluation.figures.diversity)."""
    prompts: int
    pass_at: float | None
    """Share of the prompts that any of the answers solves; None without rewards."""
    reverse_kl: float | None

    def excused(self, first: Diversity) -> bool:
        """Whether the change since the first evaluation was a wanted one."""
        nearer = first.reverse_kl is not None and self.reverse_kl is not None and self.reverse_kl < first.reverse_kl / 2
        if self.pass_at is None or first.pass_at is None:
            return nearer
        error = math.sqrt(0.25 / max(1, first.prompts) + 0.25 / max(1, self.prompts))
        return self.pass_at - first.pass_at > error or (nearer and self.pass_at >= first.pass_at)

    @classmethod
    def of(cls, figures: Mapping[str, Any], answers: int) -> Diversity | None:
        """`figures` by tag; `answers`: to each prompt. None if there was one answer, or none was compared."""
        distinct = figures.get(DISTINCT)
        if not isinstance(distinct, int | float):
            return None
        other = [figures.get(tag) for tag in (f"{PASS_AT}{answers}", EVAL_KL)]
        pass_at, reverse_kl = (value if isinstance(value, int | float) else None for value in other)
        return cls(distinct, int(figures.get("eval/n_sampled") or 0) // answers, pass_at, reverse_kl)


class Alarms:
    """Watches the figures of each step. Owned by the learner's loop, which gives a resumed run its former figures
    (`Progress.restore`), so that the start stays that of the run."""

    def __init__(self) -> None:
        self._of = {tag: FigureHistory() for tag in FIGURES}
        self._on: dict[str, Alarm] = {}
        self._best_accuracy = (0.0, 1)
        self._first_diversity: Diversity | None = None
        self.raised_total = 0
        self.raised: list[Alarm] = []
        """All so far, in the order in which they were raised; at most MOST."""

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """`figures` by tag. A figure that is not there, or is not finite, is left out of its series."""
        new = {tag: value for tag in FIGURES if abs(value := figures.get(tag, math.inf)) < math.inf}
        for tag, value in new.items():
            self._of[tag].add(step, value)
        for name, watched in WATCHED.items():
            if watched.tag in new and watched.tag not in OF_EVALUATIONS:
                self._judge(step, name, watched)

    def add_accuracy(self, step: int, accuracy: float, n: int) -> None:
        """That of an evaluation of `n` rollouts, all of the same prompts as before."""
        best, n_best = self._best_accuracy
        error = math.sqrt(0.25 / max(1, n) + 0.25 / n_best)
        self._judge_evaluation("accuracy", step, best, accuracy, error)
        self._best_accuracy = max(self._best_accuracy, (accuracy, max(1, n)))

    def add_diversity(self, step: int, now: Diversity) -> None:
        """That of an evaluation, all of the same prompts as before. Answers that become alike are no alarm where more
        of the prompts are solved by any of them, or where the student has come much nearer to its teacher, who may be
        as sure. What is bounded by 0 and 1 and has the mean m has at most the variance m (1 - m)."""
        first = self._first_diversity = self._first_diversity or now
        error = math.sqrt(sum(one.distinct * (1.0 - one.distinct) / max(1, one.prompts) for one in (first, now)))
        excused = now.excused(first)
        self._judge_evaluation("diversity", step, first.distinct, now.distinct, error, excused=excused)

    def _judge_evaluation(
        self, name: str, step: int, before: float, now: float, error: float, *, excused: bool = False
    ) -> None:
        """`error`: standard error of the difference."""
        watched, limit = WATCHED[name], WATCHED[name].limit(before)
        if watched.beyond(now, limit) and before - now > SURE * error:
            if name not in self._on and not excused:
                self._raise(Alarm(name, watched.tag, step, before, now, step))
        elif name in self._on and not watched.beyond(now, (before + limit) / 2):
            self._end(name, step)

    def _judge(self, step: int, name: str, watched: Watched) -> None:
        """Raise an alarm, or end it. It ends when the mean is back half-way to where it was, so that a figure near its
        limit raises one alarm and not many."""
        history = self._of[watched.tag]
        reference = watched.reference(history)
        limit = watched.limit(reference)
        if name in self._on:
            if not watched.beyond(history.mean(FEW), (reference + limit) / 2):
                self._end(name, step)
            return
        n = next((n for n in (FEW, MANY) if watched.differs(history, n)), None)
        if n is None or not watched.only_if(self._of) or any(excuse(self._of) for excuse in watched.unless):
            return
        began = step
        for at, value in reversed(history.past):
            if not watched.beyond(value, limit):
                break
            began = at
        self._raise(Alarm(name, watched.tag, began, reference, history.mean(n), step))

    def _raise(self, alarm: Alarm) -> None:
        self._on[alarm.name] = alarm
        self.raised_total += 1
        self.raised = [*self.raised, alarm][-MOST:]
        log.warning("%s. %s", describe_alarm(alarm), ADVICE)

    def _end(self, name: str, step: int) -> None:
        alarm = self._on.pop(name)
        self.raised = [msgspec.structs.replace(one, over=step) if one == alarm else one for one in self.raised]
        log.info("alarm %s is over at step %d", name, step)

    @property
    def on(self) -> dict[str, int]:
        """Step at which it began, of each alarm that is on."""
        return {name: alarm.began for name, alarm in self._on.items()}

    def figures(self) -> dict[str, float]:
        """For the metrics: 1 for an alarm that is on, and 0 for one that was."""
        return {f"alarm/{alarm.name}": float(alarm.name in self._on) for alarm in self.raised}

    def now(self) -> dict[str, float]:
        """Means over the newest FEW steps, by tag."""
        return {tag: self._of[tag].mean(FEW) for tag in CHANGES if self._of[tag].past}

    def changes(self) -> dict[str, Any]:
        """By tag: means over the first FEW steps of the run and the newest, or over its halves if it is shorter."""
        some = {tag: self._of[tag] for tag in CHANGES if self._of[tag].past}
        n = {tag: min(FEW, (len(one.past) + 1) // 2) for tag, one in some.items()}
        return {tag: (sum(one.first[: n[tag]]) / n[tag], one.mean(n[tag])) for tag, one in some.items()}


def describe_alarm(alarm: Alarm) -> str:
    """One line for a person."""
    watched = WATCHED[alarm.name]
    return (
        f"alarm {alarm.name}: {watched.what} since step {alarm.began}: {alarm.tag} is {alarm.value:.3g}, "
        f"{'at its best' if watched.best else 'at the start'} it was {alarm.start:.3g}"
    )


ADVICE: Final = (
    "If that is not wanted, go back to a checkpoint before that step, and lower learner.lr or buffer.max_staleness "
    "(docs/metrics.md)"
)
