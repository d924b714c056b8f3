"""What a checkpoint needs of a running learner, copied between two steps, so that all of it belongs to one step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from stillhouse.learner.checkpoints.checkpoint import Contents, LearnerState, capture_rng, write_checkpoint
from stillhouse.learner.checkpoints.files import new_draft
from stillhouse.learner.checkpoints.writer import Write, written_by_others
from stillhouse.learner.offline import OfflineMixer
from stillhouse.learner.prompts.tasks import TaskStream
from stillhouse.learner.reports.step_metrics import StepMetrics
from stillhouse.learner.step.ema import StudentEma
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.messages import Ledger, WeightVersion


def stage_checkpoint(
    root: Path,
    version: WeightVersion,
    trainer: Trainer,
    tokenizer: PreTrainedTokenizerBase,
    *,
    keep: int,
    metrics: StepMetrics | None,
    stream: TaskStream | None = None,
    mixer: OfflineMixer | None = None,
    ema: StudentEma | None = None,
    ledger: Ledger | None = None,
) -> Write:
    """On rank 0; the others join. `metrics`: of the last step. `stream`, `ledger`: a replay has none. Raises
    OSError."""
    draft = new_draft(root, version)
    staged = trainer.stage(draft)
    assert staged is not None, "rank 0 writes"
    state = LearnerState(
        version=version,
        optimizer=staged.optimizer,
        value_head=trainer.critic.state_dict(),
        tasks=stream.state() if stream is not None else {},
        ledger=ledger,
        rng=capture_rng(),
        metrics=dict(metrics.as_dict()) if metrics is not None else {},
        ema=ema.state_dict() if ema is not None else {},
        offline=mixer.state() if mixer is not None else None,
    )
    return partial(
        write_checkpoint,
        draft,
        Contents.of(state, staged.weights),
        trainer.model,
        tokenizer,
        keep=keep,
        adapters=trainer.adapters,
        others=partial(written_by_others, trainer.ranks, draft),
    )
