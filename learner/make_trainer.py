"""The student and what trains it, from the configuration: all weights, adapters, or nothing."""

from __future__ import annotations

import logging
from pathlib import Path

from learner.checkpoints.files import ADAPTER_CONFIG, CheckpointError
from learner.config import LearnerConfig
from learner.step.frozen import FrozenTrainer
from learner.step.train_step import Trainer
from models.loading import load_causal_lm, resolve_device, resolve_dtype
from models.precision import turn_tf32_off

log = logging.getLogger(__name__)


def make_trainer(
    student: str,
    learner: LearnerConfig,
    *,
    steps: int,
    vocab_tokens: int,
    seed: int,
    checkpoint: Path | None = None,
) -> Trainer:
    """The student as given, or as the checkpoint has it. With adapters the student is as given in any case. Raises
    CheckpointError for a checkpoint of the other kind, and what loading raises."""
    lora = learner.lora
    if checkpoint is not None and (checkpoint / ADAPTER_CONFIG).is_file() != (lora.rank > 0):
        holds = "all weights" if lora.rank else "adapters"
        raise CheckpointError(
            f"{checkpoint} holds {holds}, but learner.lora.rank is {lora.rank}; a run goes on with the kind of weights "
            "that it was started with"
        )
    source = str(checkpoint) if checkpoint is not None and not lora.rank else student
    device = resolve_device(learner.device)
    turn_tf32_off(device)
    log.info("the student is on %s, its products in %s", device, resolve_dtype(learner.dtype, device))
    model = load_causal_lm(source, device=device, dtype="float32", attention="packed", train=True)
    kind = FrozenTrainer if learner.frozen else Trainer
    if not lora.rank:
        return kind(model, learner, total_steps=steps, vocab_tokens=vocab_tokens, seed=seed)
    from learner.step.lora import Adapters

    adapters = Adapters(model, lora, base=student)
    if checkpoint is not None:
        adapters.load(checkpoint)
    log.info("%r of rank %d, alpha %g", adapters, lora.rank, lora.alpha)
    return kind(model, learner, total_steps=steps, adapters=adapters, vocab_tokens=vocab_tokens, seed=seed)
