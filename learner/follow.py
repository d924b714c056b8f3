"""Ranks above 0: they make the calls that rank 0 announces, each with its own share of the parameters.

They have no link to the buffer and no clock. They read the student's files and a checkpoint's, and write their shares
of new checkpoints; on other hosts from and into the run's store, if it has one. Whatever fails here, but for that
writing, ends the process, and the elastic launcher then ends the others (launch.workers.ranks)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from stillhouse.learner.batch import BatchError
from stillhouse.learner.checkpoints.files import CHECKPOINTS
from stillhouse.learner.checkpoints.resume import first_trainer
from stillhouse.learner.checkpoints.stored import StoredCheckpoints
from stillhouse.learner.checkpoints.writer import ShareWriter
from stillhouse.learner.ranks.group import Announced, ProcessGroup
from stillhouse.learner.ranks.messages import RanksBegin, load_items
from stillhouse.learner.ranks.staging import OwnShare, Stage
from stillhouse.learner.run_config import LearnerRunConfig
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.context import ExitCode, RoleContext
from stillhouse.protocol.object_store import Store
from stillhouse.weights.staged_weights import streams_of, tensor_of

log = logging.getLogger(__name__)


def main(ctx: RoleContext[LearnerRunConfig], ranks: ProcessGroup) -> int:
    """Follow rank 0 to its end. Raises what a call raises, but for batches that rank 0 refuses likewise."""
    torch.manual_seed(ctx.config.seed)
    announced = ranks.announcements()
    first = next(announced)
    if first.call == "end":
        return ExitCode.OK
    store = Store(ctx.config.store) if ctx.config.store and ranks.elsewhere else None
    trainer = _trainer(ctx, msgspec.json.decode(first.payload, type=RanksBegin), ranks, store)
    follow(trainer, ranks, announced, store)
    return ExitCode.OK


def follow(trainer: Trainer, ranks: ProcessGroup, announced: Iterator[Announced], store: Store | None = None) -> None:
    """Make the announced calls. `store`: where checkpoints are, on a host that does not see the run's folder."""
    share = OwnShare(streams_of(trainer.model.device), ranks.rank, ranks.mesh)
    ranks.shares.serve(share)
    writer = ShareWriter(ranks, store)
    for call, payload in announced:
        match call:
            case "step":
                with suppress(BatchError):  # raised by all ranks; rank 0 decides what is left out
                    trainer.step(*load_items(payload))
            case "skip":
                trainer.skip()
            case "weights":
                for _, weight in trainer.weights():
                    tensor_of(weight)
            case "stage":
                share.fill(msgspec.json.decode(payload, type=Stage), trainer.named_weights())
            case "checkpoint":
                draft = Path(payload.decode())
                staged = trainer.stage(draft)
                if staged is not None:
                    writer.write(draft, staged.weights, staged.optimizer.shares, adapters=trainer.adapters is not None)
            case "logprobs":
                trainer.logprobs(json.loads(payload))
            case "end":
                log.info("rank %d ends with step %d", ranks.rank, trainer.steps_done)
            case "begin":
                raise RuntimeError("rank 0 announced a second beginning")


def _trainer(
    ctx: RoleContext[LearnerRunConfig], beginning: RanksBegin, ranks: ProcessGroup, store: Store | None
) -> Trainer:
    config = ctx.config
    checkpoint = None if beginning.checkpoint is None else Path(beginning.checkpoint)
    if store is not None and beginning.version is not None:
        checkpoint = StoredCheckpoints(store).fetch_version(ctx.run_dir / CHECKPOINTS, beginning.version)
    vocab_tokens = beginning.vocab_tokens
    trainer, _ = first_trainer(config, checkpoint, vocab_tokens=vocab_tokens, ranks=ranks, verified=True)  # by rank 0
    return trainer
