"""The learner's figures of the whole run: for its heartbeats, and for learner.json, its account in the launcher's
summary. A learner that resumes carries part of its predecessor's account over."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from stillhouse.learner.config import UntilConfig
from stillhouse.learner.evaluation.evaluation import EvaluationResult
from stillhouse.learner.evaluation.figures import MeasuredTeacher
from stillhouse.learner.evaluation.until import StopRule
from stillhouse.learner.reports.alarms import ACCURACY, ALARM_SINCE, EVAL_KL, FIGURES, MEAN, Alarms, Diversity
from stillhouse.learner.reports.attribution import RunLimits
from stillhouse.learner.reports.sample import Sample
from stillhouse.learner.reports.step_metrics import StepMetrics
from stillhouse.learner.reports.wait_clock import WAIT_CAUSES, WaitReport
from stillhouse.protocol.atomic_file import write_atomic
from stillhouse.protocol.messages import WeightVersion
from stillhouse.recording.append_file import Unwritten
from stillhouse.weights.publisher import Publisher, PublisherStats

log = logging.getLogger(__name__)

ACCOUNT_FILE: Final = "learner.json"
RESTORED: Final = (*FIGURES, EVAL_KL, "train/tokens", "train/offline_tokens", "eval/n_sampled")
"""Figures of the metrics that `LearnerProgress.restore` reads, and pass@k of all answers to a prompt."""
DOUBTFUL_SHARE: Final = 0.75
"""An error is logged if the teacher's mean log-prob on the first batch is below this fraction of a uniform guess."""


@dataclass(slots=True)
class LearnerProgress:
    """Figures of the run so far."""

    step: int = 0
    """Steps made, those before a resume too."""
    evaluations: list[EvaluationResult] = field(default_factory=list[EvaluationResult])
    """On all sets."""
    reverse_kl_first: float | None = None
    reverse_kl_last: float | None = None
    tokens_trained: int = 0
    """Tokens that the student wrote, as in the ledger."""
    tokens_trained_offline: int = 0
    """Tokens that the teacher wrote; the ledger does not count them."""
    last: StepMetrics | None = None
    checkpoint: Path | None = None
    """Folder of the newest checkpoint."""
    checkpoints_failed: int = 0
    """Checkpoints that could not be written, or not be put into the store."""
    checkpoint_error: str = ""
    """Why the newest of these could not."""
    checkpoints_put_off: int = 0
    """Checkpoints that came due while the one before was still being written."""
    steps_skipped: int = 0
    """Steps without a finite rollout to train."""
    flops: float = 0.0
    """Operations of the steps since the learner's start; 0 if not known."""
    alarms: Alarms = field(default_factory=Alarms)
    teachers: Mapping[str, MeasuredTeacher] = field(default_factory=dict[str, MeasuredTeacher])
    """Name of an evaluation set -> its teachers, if they were measured."""
    eval_samples: int = 1
    """Answers to each sampled prompt of the run's own set."""
    rule: StopRule = field(default_factory=lambda: StopRule(UntilConfig()))
    stopped_by_alarm: bool = False
    sample: Sample | None = None
    limits: RunLimits = field(default_factory=RunLimits)
    waits: WaitReport = field(default_factory=lambda: WaitReport(0.0, 0.0, dict.fromkeys(WAIT_CAUSES, 0.0)))
    """The learner's time, from its start to its last step: the sum of what each step reports."""

    def add(self, figures: StepMetrics, *, vocab_rows: int) -> None:
        """Count an optimizer step. `vocab_rows` is the number of rows of the student's head."""
        self.tokens_trained += figures.tokens
        self.tokens_trained_offline += figures.offline.tokens if figures.offline is not None else 0
        self.last = figures
        if figures.reverse_kl is not None:
            self.reverse_kl_last = figures.reverse_kl
            if self.reverse_kl_first is None:
                self.reverse_kl_first = figures.reverse_kl
                _doubt_the_teacher(figures.logprob - figures.reverse_kl, -math.log(vocab_rows))

    def restore(self, rows: Iterable[Mapping[str, Any]], step: int) -> None:
        """Begin with what the run had before: `rows` of its metrics, up to `step`."""
        for row in rows:
            if row["step"] > step:
                continue
            self.tokens_trained += int(row.get("train/tokens", 0))
            self.tokens_trained_offline += int(row.get("train/offline_tokens", 0))
            figures = {tag: value for tag in FIGURES if isinstance(value := row.get(tag), int | float)}
            if row["kind"] == "step":
                self.alarms.add(row["step"], figures)
            else:
                if ACCURACY in figures:
                    self.alarms.add_accuracy(row["step"], figures[ACCURACY], int(row.get("eval/n_sampled", 0)))
                if (now := Diversity.of(row, self.eval_samples)) is not None:
                    self.alarms.add_diversity(row["step"], now)

    def add_evaluation(self, result: EvaluationResult) -> None:
        if result.accuracy_sampled is not None and not result.name:
            self.alarms.add_accuracy(result.step, result.accuracy_sampled, result.n_sampled or 0)
        shown = {f"eval/{name}": value for name, value in result.at_k.items()}
        shown |= {EVAL_KL: result.reverse_kl, "eval/n_sampled": result.n_sampled}
        if not result.name and (now := Diversity.of(shown, self.eval_samples)) is not None:
            self.alarms.add_diversity(result.step, now)
        self.rule.add(result)
        self.evaluations.append(msgspec.structs.replace(result, samples=()))  # samples.jsonl has them

    def checkpoint_failed(self, why: str) -> None:
        """Count and log it; the launcher shows the reason."""
        self.checkpoints_failed += 1
        self.checkpoint_error = why
        log.error("%s (%d failed so far)", why, self.checkpoints_failed)

    def gauges(self) -> dict[str, float]:
        """Figures for the heartbeat."""
        found: dict[str, float | None] = {
            "tokens_trained_total": self.tokens_trained,
            "tokens_trained_offline_total": self.tokens_trained_offline,
            "checkpoints_failed_total": self.checkpoints_failed,
            "checkpoints_put_off_total": self.checkpoints_put_off,
            "steps_skipped_total": self.steps_skipped,
            "flops_total": self.flops,
        }
        if self.last is not None:
            found |= {"loss": self.last.loss, "reverse_kl": self.last.reverse_kl}
        if own := [result for result in self.evaluations if not result.name]:
            newest = own[-1]
            found |= {"eval_greedy": newest.accuracy_greedy, "eval_sampled": newest.accuracy_sampled}
        found |= {f"{ALARM_SINCE}{name}": began for name, began in self.alarms.on.items()}
        found |= {f"{MEAN}{tag.rpartition('/')[2]}": value for tag, value in self.alarms.now().items()}
        return {name: float(value) for name, value in found.items() if value is not None}

    def account(self) -> dict[str, Any]:
        """Figures for learner.json, as JSON types."""
        return {
            "eval": [msgspec.to_builtins(result.point) for result in self.evaluations if not result.name],
            "eval_sets": [msgspec.to_builtins(result.point) for result in self.evaluations if result.name],
            "tokens_trained_offline": self.tokens_trained_offline,
            "reverse_kl_first": self.reverse_kl_first,
            "reverse_kl_last": self.reverse_kl_last,
            "learner": {"busy_fraction": self.waits.busy_fraction, "wait_fraction": self.waits.wait_fraction},
            **self.limits.account(self.waits),
            "tokens_trained": self.tokens_trained,
            "changes": self.alarms.changes(),
            "sample": msgspec.to_builtins(self.sample),
            "stopped_by_alarm": self.stopped_by_alarm,
            "alarms": [msgspec.to_builtins(alarm) for alarm in self.alarms.raised],
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "checkpoint_error": self.checkpoint_error,
        }


def weight_figures(stats: PublisherStats) -> dict[str, float]:
    """The publisher's numbers as flat figures for the metrics."""
    figures = {
        name: float(value)
        for name, value in asdict(stats).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    dropped = {f"dropped_{reason}_total": float(n) for reason, n in stats.dropped_total.items()}
    return figures | dropped


def _doubt_the_teacher(teacher_logprob: float, uniform_logprob: float) -> None:
    """Log an error for a teacher that looks like random weights, which give every token about the same log-prob."""
    if teacher_logprob < DOUBTFUL_SHARE * uniform_logprob:
        log.error(
            "the teacher gives the student's tokens %.2f nats each, random weights would give %.2f: is it the right "
            "checkpoint, fully loaded?",
            teacher_logprob,
            uniform_logprob,
        )


_EVALUATED: Final = ("eval", "eval_sets")
"""Fields of an account with evaluations: on the run's own set, and on the sets with a name."""


class _Former(msgspec.Struct, frozen=True):
    eval: tuple[dict[str, Any], ...] = ()
    eval_sets: tuple[dict[str, Any], ...] = ()
    reverse_kl_first: float | None = None


class AccountFile:
    """learner.json, replaced atomically. A failed write is counted and leaves the previous account in place."""

    def __init__(
        self, folder: Path, unwritten: Unwritten, *, resume: WeightVersion | None = None, name: str = ACCOUNT_FILE
    ) -> None:
        """`resume`: the version that the learner resumes from. From the previous account it keeps the evaluations up to
        that step, and the reverse KL of the first step if that step is kept. The rest belongs to an abandoned branch of
        versions."""
        self._file = folder / name
        self._unwritten = unwritten
        former = _read(self._file) if resume is not None else None
        self._eval: dict[str, tuple[dict[str, Any], ...]] = dict.fromkeys(_EVALUATED, ())
        self._reverse_kl_first: float | None = None
        if former is not None and resume is not None:
            for key in _EVALUATED:
                self._eval[key] = tuple(point for point in getattr(former, key) if point["step"] <= resume.step)
            self._reverse_kl_first = former.reverse_kl_first if resume.step > 0 else None

    def write(self, account: dict[str, Any]) -> bool:
        """Write `account` together with what is carried over. Of two evaluations of one step on one set the later one
        counts. Returns False if the file could not be written."""
        whole = dict(account)
        for key in _EVALUATED:
            both = (*self._eval[key], *account.get(key, ()))
            points = {(point.get("name", ""), point["step"]): point for point in both}
            whole[key] = [points[place] for place in sorted(points)]
        if self._reverse_kl_first is not None:
            whole["reverse_kl_first"] = self._reverse_kl_first
        try:
            write_atomic(self._file, msgspec.json.format(msgspec.json.encode(whole), indent=2))
        except OSError as error:
            self._unwritten.count(self._file.name, 1, error)
            return False
        self._unwritten.written(self._file.name)
        return True


class AccountWriter:
    """learner.json of a run: written every few seconds, after each checkpoint and evaluation, and at the end."""

    def __init__(self, file: AccountFile, progress: LearnerProgress, publisher: Publisher, tensorboard: Path) -> None:
        self._file = file
        self._progress = progress
        self._publisher = publisher
        self._tensorboard = tensorboard
        self._average_error = ""
        """Why the newest average of the student that its teachers did not get is not there; empty: all are."""

    def write(self) -> None:
        self._file.write(
            {
                **self._progress.account(),
                "average_error": self._average_error,
                "steps": self._progress.step,
                "versions_published": self._publisher.stats.broadcasts_total,
                "tensorboard": str(self._tensorboard),
            }
        )

    def average_failed(self, error: str) -> None:
        self._average_error = error
        self.write()


def _read(file: Path) -> _Former | None:
    try:
        former = msgspec.json.decode(file.read_bytes(), type=_Former)
        if all(isinstance(point.get("step"), int) for point in (*former.eval, *former.eval_sets)):
            return former
        log.error("%s has an evaluation without its step; nothing is carried over from it", file)
    except FileNotFoundError:
        pass
    except (OSError, msgspec.MsgspecError) as error:
        log.error("%s cannot be read, and nothing is carried over from it: %s", file, error)
    return None
