"""The trainer that a process begins with: of the configured student, or of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from stillhouse.learner.checkpoints.checkpoint import LearnerState, load_checkpoint
from stillhouse.learner.checkpoints.files import CheckpointError
from stillhouse.learner.config import ADAPTER_CONFIG
from stillhouse.learner.ranks.group import Ranks
from stillhouse.learner.run_config import LearnerRunConfig
from stillhouse.learner.step.make_trainer import make_trainer
from stillhouse.learner.step.teacher_heads import teacher_heads
from stillhouse.learner.step.train_step import Trainer


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
