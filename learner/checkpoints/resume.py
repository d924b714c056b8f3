"""The trainer that a process begins with: of the configured student, or of a checkpoint. And what a checkpoint needs of
a running learner, copied between two steps, so that all of it belongs to one step."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from stillhouse.learner.checkpoints.checkpoint import (
    Contents,
    LearnerState,
    capture_rng,
    load_checkpoint,
    write_checkpoint,
)
from stillhouse.learner.checkpoints.files import CheckpointError, new_draft
from stillhouse.learner.checkpoints.writer import Write, written_by_others
from stillhouse.learner.config import ADAPTER_CONFIG
from stillhouse.learner.offline import OfflineMixer
from stillhouse.learner.prompts.tasks import TaskStream
from stillhouse.learner.ranks.group import Ranks
from stillhouse.learner.reports.step_metrics import StepMetrics
from stillhouse.learner.run_config import LearnerRunConfig
from stillhouse.learner.step.ema import StudentEma
from stillhouse.learner.step.make_trainer import make_trainer
from stillhouse.learner.step.teacher_heads import teacher_heads
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.messages import Ledger, WeightVersion


def first_trainer(
    config: LearnerRunConfig,
    checkpoint: Path | None,
    *,
    vocab_tokens: int,
    ranks: Ranks | None = None,
    verified: bool = False,
) -> tuple[Trainer, LearnerState | None]:
    """The trainer with its optimizer and value function, and the rest of the checkpoint's state. `verified`: another
    rank has compared the checkpoint with its manifest. Raises CheckpointError for one of the other kind of weights, and
    what loading raises."""
    rank = config.learner.lora.rank
    if checkpoint is not None and (checkpoint / ADAPTER_CONFIG).is_file() != (rank > 0):
        raise CheckpointError(
            f"{checkpoint} holds {'all weights' if rank else 'adapters'}, but learner.lora.rank is {rank}; resume with "
            "the kind of weights that the run was started with"
        )
    trainer = make_trainer(
        config.models.student,
        config.learner,
        steps=config.steps,
        vocab_tokens=vocab_tokens,
        seed=config.seed,
        checkpoint=checkpoint,
        ranks=ranks,
        head_of=teacher_heads(config),
    )
    if checkpoint is None:
        return trainer, None
    state = load_checkpoint(checkpoint, verified=verified)
    trainer.load_state_dict(state.optimizer)
    trainer.critic.load_state_dict(state.value_head)
    return trainer, state


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
