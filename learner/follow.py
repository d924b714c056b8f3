"""Ranks above 0: they make the calls that rank 0 announces, each with its own share of the parameters.

They have no link to the buffer and no clock. They read the student's files and a checkpoint's, and write their shares
of new checkpoints. Whatever fails here, but for that writing, ends the process, and the elastic launcher then ends the
others (launch.workers.ranks)."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from stillhouse.learner.batch import BatchError
from stillhouse.learner.checkpoints.resume import first_trainer
from stillhouse.learner.checkpoints.writer import ShareWriter
from stillhouse.learner.ranks.group import Announced, ProcessGroup
from stillhouse.learner.ranks.messages import RanksBegin, load_items
from stillhouse.learner.ranks.staging import OwnShare, Stage
from stillhouse.learner.run_config import LearnerRunConfig
from stillhouse.learner.step.train_step import Trainer
from stillhouse.protocol.context import ExitCode, RoleContext
from stillhouse.weights.staged_weights import streams_of, tensor_of

log = logging.getLogger(__name__)


def main(ctx: RoleContext[LearnerRunConfig], ranks: ProcessGroup) -> int:
    """Follow rank 0 to its end. Raises what a call raises, but for batches that rank 0 refuses likewise."""
    torch.manual_seed(ctx.config.seed)
    announced = ranks.announcements()
    first = next(announced)
    if first.call == "end":
        return ExitCode.OK
    begin = msgspec.json.decode(first.payload, type=RanksBegin)
    checkpoint = None if begin.checkpoint is None else Path(begin.checkpoint)
    n_vocab = begin.vocab_tokens
    trainer, _ = first_trainer(ctx.config, checkpoint, vocab_tokens=n_vocab, ranks=ranks, verified=True)  # by rank 0
    follow(trainer, ranks, announced)
    return ExitCode.OK


def follow(trainer: Trainer, ranks: ProcessGroup, announced: Iterator[Announced]) -> None:
    """Make the announced calls."""
    share = OwnShare(streams_of(trainer.model.device), ranks.rank, ranks.mesh)
    ranks.shares.serve(share)
    writer = ShareWriter(ranks)
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
