"""What a learner is assembled from wherever its batches come from: a run's buffer (learner.worker) or a recording
(stillhouse.replay)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from stillhouse.learner.checkpoints.files import CHECKPOINTS, FoundCheckpoint, go_on_from, set_aside
from stillhouse.learner.checkpoints.writer import CheckpointWriter
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.evaluation.evaluation import EvaluationResult
from stillhouse.learner.evaluation.figures import describe
from stillhouse.learner.evaluation.until import StopRule, gap_figures, read_teachers
from stillhouse.learner.reports.alarms import PASS_AT
from stillhouse.learner.reports.metrics import MetricsWriter, read_metrics
from stillhouse.learner.reports.progress import RESTORED, LearnerProgress
from stillhouse.learner.reports.settings import all_settings, compared_settings
from stillhouse.learner.reports.trackers.feed import Trackers
from stillhouse.learner.run_config import LearnerRunConfig
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.messages import WeightVersion

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingParts:
    """What trains, reports and writes checkpoints."""

    trainer: Trainer
    metrics: MetricsWriter
    checkpoints: CheckpointWriter
    config: LearnerConfig
    version: WeightVersion
    """The first one."""
    steps: int


def checkpoint_to_resume(run_dir: Path) -> FoundCheckpoint:
    """The newest usable checkpoint of the folder; damaged ones are renamed. Raises CheckpointError as `go_on_from`."""
    found = go_on_from(run_dir / CHECKPOINTS)
    for skipped in found.damaged:
        log.error("%s; it was renamed to %s", skipped, set_aside(skipped.path))
    return found


def open_reports(
    config: LearnerRunConfig,
    run_dir: Path,
    *,
    step: int,
    resume: WeightVersion | None,
    parent: WeightVersion | None = None,
) -> tuple[MetricsWriter, LearnerProgress]:
    """The metrics of the folder, and the progress up to `step`. `resume`, `parent`: as for MetricsWriter."""
    trackers = Trackers(config.learner.trackers, run_dir, all_settings(config))
    metrics = MetricsWriter(
        run_dir, resume=resume, parent=parent, settings=compared_settings(config), trackers=trackers
    )
    teachers = read_teachers(run_dir)
    answers = config.learner.tasks.eval_samples
    rule = StopRule(config.learner.until, teachers)
    progress = LearnerProgress(step=step, teachers=teachers, rule=rule, eval_samples=answers)
    if resume is not None:
        rows = read_metrics(run_dir, (*RESTORED, f"{PASS_AT}{answers}", rule.tag))
        progress.restore(rows, step)
        rule.restore(rows, step)
    return metrics, progress


def report_evaluation(metrics: MetricsWriter, progress: LearnerProgress, result: EvaluationResult) -> list[str]:
    """Note the figures of an evaluation. Returns the lines that say them."""
    gap = gap_figures(result, progress.teachers.get(result.name))
    metrics.evaluation(result, gap)
    progress.add_evaluation(result)
    at = f"evaluation at step {result.step}{f' on {result.name}' if result.name else ''}"
    groups = (*result.tags.items(), *result.environments.items())
    beside = "".join(f", {name.replace('_', ' ')} {value:.3f}" for name, value in gap.items())
    return [f"{at}: {describe(result)}{beside}", *(f"{at}, {group}: {describe(figures)}" for group, figures in groups)]
