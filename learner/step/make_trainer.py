"""The student and its trainer, from the configuration: trains all weights, adapters, or nothing."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from stillhouse.learner.batch import EmptyBatchError, TrainItem
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.ranks.group import Ranks
from stillhouse.learner.reports.step_metrics import StepMetrics, StepSums
from stillhouse.learner.step.teacher_heads import HeadOf, no_heads
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.description import resolve_dtype
from stillhouse.models.loading import load_causal_lm, resolve_device
from stillhouse.models.precision import turn_tf32_off


class FrozenTrainer(Trainer):
    """A trainer that trains nothing, for runs that only record rollouts (stillhouse write). The clock
    advances."""

    def step(self, items: Sequence[TrainItem], offline: Sequence[TrainItem] = ()) -> StepMetrics:
        """Figures as if the student were the policy that sampled: s = mu. The entropy is estimated by -mu.

        Raises EmptyBatchError and BatchError like `Trainer.step`."""
        started_s = time.perf_counter()
        self._check_ids([*items, *offline])
        sums = StepSums.zero()
        for train_item in items:
            sums = sums.plus(_sums(train_item))
        if not sums.tokens:
            raise EmptyBatchError(f"none of the {len(items)} items has a token to train; expected at least one")
        self.steps_done += 1
        return StepMetrics.of(
            sums,
            lr=0.0,
            grad_norm=0.0,
            items=len(items),
            items_idle=sum(train_item.n_trained == 0 for train_item in items),
            items_unrewarded=sum(t.n_trained > 0 and t.item.reward is None for t in items),
            microbatches=0,
            input_tokens=0,
            step_s=time.perf_counter() - started_s,
        )


def _sums(train_item: TrainItem) -> StepSums:
    n = train_item.n_trained
    mu_N = train_item.behaviour_L[train_item.train_mask_L].astype(np.float64)
    q_MN = train_item.teacher_ML[:, train_item.train_mask_L].astype(np.float64)
    return StepSums.zero(
        tokens=n,
        reverse_kl=float((mu_N - q_MN).sum()),
        scored=float(n if len(q_MN) else 0),
        ratio_mean=float(n),
        ratio_squared=float(n),
        weight_mean=float(n),
        entropy=-float(mu_N.sum()),
        logprob=float(mu_N.sum()),
        ratio_max=1.0,
    )


log = logging.getLogger(__name__)

RETURNED_BYTES: Final = 2 * 2**20
_M_MMAP_THRESHOLD: Final = -3
"""Number of the option in glibc's malloc.h."""


def return_freed_blocks() -> None:
    """Have this process give memory of RETURNED_BYTES and more back to the system when it is freed. By itself glibc
    does so for ever larger blocks only, up to 32 MiB. Smaller ones of a backward pass then stay between gradients that
    are kept: for SmolLM2-135M a seventh of the peak, and most of it also between two steps, when actors on the
    same machine could use it. For blocks smaller than this limit, taking them anew would cost more time."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # not glibc
        return
    if not libc.mallopt(_M_MMAP_THRESHOLD, RETURNED_BYTES):
        log.warning("mallopt failed: freed memory of the learner may stay with it")


def make_trainer(
    student: str,
    learner: LearnerConfig,
    *,
    steps: int,
    vocab_tokens: int,
    seed: int,
    checkpoint: Path | None = None,
    ranks: Ranks | None = None,
    head_of: HeadOf = no_heads,
) -> Trainer:
    """A trainer of `student`, or of the checkpoint's weights. With adapters, the base is always `student`. `head_of`:
    for teachers that send hidden states. Raises what loading raises."""
    lora = learner.lora
    source = str(checkpoint) if checkpoint is not None and not lora.rank else student
    device, ranks = resolve_device(learner.device), ranks or Ranks()
    turn_tf32_off(device)
    if device == "cpu":
        return_freed_blocks()
    log.info("the student is on %s, its products in %s", device, resolve_dtype(learner.dtype, device))
    whole = device if ranks.world_size == 1 else "cpu"  # it may be too large for the device of one rank
    model = load_causal_lm(
        source,
        device=whole,
        dtype="float32",
        attention="packed",
        train=True,
        weights=ranks.rank == 0,
        quantize=lora.quantize,
    )
    kind = FrozenTrainer if learner.frozen else Trainer
    make = partial(
        kind, model, learner, total_steps=steps, vocab_tokens=vocab_tokens, seed=seed, ranks=ranks, head_of=head_of
    )
    if not lora.rank:
        return make()
    from stillhouse.learner.step.lora import Adapters

    adapters = Adapters(model, lora, base=student)
    if checkpoint is not None and ranks.rank == 0:
        adapters.load(checkpoint)
    log.info("%r of rank %d, alpha %g", adapters, lora.rank, lora.alpha)
    return make(adapters=adapters)
