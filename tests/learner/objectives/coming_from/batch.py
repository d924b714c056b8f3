"""A small random batch, as another trainer's formula sees it, and the gradient that our own code gives for it.

The leaf of all gradients is the student's logits at the trained tokens, [N, V]: the head is the unit matrix, so hidden
states are logits.

Legend: n trained tokens of a rollout, N those of the batch, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stillhouse.launch.config.run import RunConfig
from stillhouse.learner.batch import TrainItem, pack
from stillhouse.learner.objectives.batch_terms import batch_terms
from stillhouse.learner.objectives.distributions import log_tail
from stillhouse.learner.step.forward import BatchPart
from stillhouse.learner.step.step_loss import make_step_loss
from stillhouse.models.logprobs import LmHead
from stillhouse.protocol.payloads.top_k import TopRows
from tests.learner.conftest import make_item

Given: TypeAlias = dict[str, Any]
"""Another trainer's settings, by its own names."""
V: Final = 11
MASKS: Final = tuple([int(c) for c in mask] for mask in ("0111", "001101111", "011", "011111", "0011001", "011"))
"""1: written by the student and trained; 0: prompt, or an environment's tokens."""
REWARDS: Final = (1.0, 0.0, 0.25, -0.5, 2.0, 1.0)
GROUPS: Final = (7, 7, 7, 9, 9, 9)


class Rollout(NamedTuple):
    """What another trainer has of a rollout, at its trained tokens. Only `s` and `z` have a gradient."""

    s: Tensor
    """Log-prob under the policy being trained."""
    mu: Tensor
    """Under the policy that sampled, as its engine said."""
    start: Tensor
    """Under the policy at the start of the step, computed by the trainer."""
    q: Tensor
    """Under the teacher."""
    z: Tensor
    """Log-probs of the whole vocabulary under the policy being trained, [n, V]."""
    t: Tensor
    """The same under the teacher."""
    reward: float
    group: int


@dataclass(frozen=True)
class Batch:
    """`later`: in a later update of a step, so that the policy is no longer that of its start."""

    later: bool
    max_new_tokens: int
    """Longest response allowed."""

    @cached_property
    def items(self) -> list[TrainItem]:
        random = np.random.default_rng(4)
        items = [
            make_item(f"r{i}", mask, seed=i, vocab=V, task_id=group, reward=reward)
            for i, (mask, reward, group) in enumerate(zip(MASKS, REWARDS, GROUPS, strict=True))
        ]
        for i, (item, start_n) in enumerate(zip(items, self._split(_chosen(self.start_NV, items)), strict=True)):
            mask_L = item.train_mask_L
            spread = 0.1 if i == 3 else 0.7  # whole rollouts on both sides of the bounds, too
            item.behaviour_L[mask_L] = _short(start_n.numpy() + random.normal(0.05, spread, len(start_n)))
            item.teacher_ML[0, mask_L] = _short(_chosen(self._split(self.teacher_NV)[i], [item]).numpy())
        return items

    @cached_property
    def start_NV(self) -> Tensor:
        return 1.2 * _random(0).log_softmax(1)

    @cached_property
    def teacher_NV(self) -> Tensor:
        return (0.7 * self.start_NV + _random(1)).log_softmax(1)

    @cached_property
    def student_NV(self) -> Tensor:
        """Logits of the policy being trained: the leaf."""
        moved_NV = 0.5 * _random(2) if self.later else 0.0
        return (self.start_NV + moved_NV).clone().requires_grad_()

    @cached_property
    def rollouts(self) -> list[Rollout]:
        z_NV = self.student_NV.log_softmax(1)
        parts = (self._split(one) for one in (z_NV, self.start_NV.log_softmax(1), self.teacher_NV))
        return [
            Rollout(
                s=_chosen(z, [item]),
                mu=torch.from_numpy(item.behaviour_L[item.train_mask_L]).double(),
                start=_chosen(start, [item]),
                q=torch.from_numpy(item.teacher_ML[0, item.train_mask_L]).double(),
                z=z,
                t=t,
                reward=reward,
                group=group,
            )
            for item, z, start, t, reward, group in zip(self.items, *parts, REWARDS, GROUPS, strict=True)
        ]

    @property
    def n_tokens(self) -> int:
        return sum(map(sum, MASKS))

    def _split(self, value_N: Tensor) -> Sequence[Tensor]:
        return value_N.split([sum(mask) for mask in MASKS])


def _random(seed: int) -> Tensor:
    return torch.randn((sum(map(sum, MASKS)), V), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _short(value_n: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Multiples of 2 ** -12, of which float32 holds sums and differences exactly."""
    return np.round(value_n * 4096) / 4096


def _chosen(logits_nV: Tensor, items: Sequence[TrainItem]) -> Tensor:
    """Log-probs of the sampled tokens of these items."""
    ids_n = np.concatenate([item.tokens_L[item.train_mask_L] for item in items]).astype(np.int64)
    return logits_nV.log_softmax(1).gather(1, torch.from_numpy(ids_n)[:, None])[:, 0]


def our_gradient(config: RunConfig, batch: Batch) -> Tensor:
    """d loss / d logits [N, V], from the code of a step: advantages of the batch, packing, chunks and all."""
    learner = config.learner
    step_loss = make_step_loss(
        learner.objective, max_new_tokens=batch.max_new_tokens, chunk_tokens=3, vocab_tokens=V, rows=V, seed=0
    )
    items = batch.items
    if learner.objective.needs_top_k_for("default"):
        items = [replace(one, top={"default": _sets(config, batch, i)}) for i, one in enumerate(items)]
    packed = pack(items, 14)
    assert len(packed.microbatches) > 1
    part = BatchPart(items, packed, batch_terms(items, step_loss.objective, values=_no_values), step_loss)
    if batch.later:
        start_N = _chosen(batch.start_NV, items)
        part.keep_proximal([start_N[torch.from_numpy(one.token_N)] for one in packed.counted], torch.device("cpu"))
    leaf_NV = batch.student_NV.detach().clone().requires_grad_()
    head = LmHead(torch.eye(V, dtype=torch.float64))
    loss = torch.zeros((), dtype=torch.float64)
    for one in packed.counted:
        inputs = part.inputs(one, torch.device("cpu"))
        logits_NV, targets_N = leaf_NV[torch.from_numpy(one.token_N)], torch.from_numpy(one.target_N)
        loss = loss + step_loss(head, logits_NV, targets_N, inputs, one, part.whole.divisor).loss
    (gradient_NV,) = torch.autograd.grad(loss, leaf_NV)
    return gradient_NV


def _sets(config: RunConfig, batch: Batch, i: int) -> TopRows:
    """What the teacher sends of a rollout: its top-k sets, or the whole vocabulary in place of hidden states."""
    if config.teacher.payload != "hidden":
        assert config.teacher.top_mass == 1.0, "another trainer has k tokens everywhere"
    k = V if config.teacher.payload == "hidden" else config.teacher.top_k
    assert 0 < k <= V
    top = batch.rollouts[i].t.topk(k, dim=1)
    tail_n = log_tail(top.values).numpy() if k < V else np.full(len(top.values), -np.inf)
    return TopRows(top.indices.numpy(), top.values.numpy(), tail_n, np.full(len(tail_n), k, np.int64))


def _no_values() -> Tensor:
    raise AssertionError("no value function here")
