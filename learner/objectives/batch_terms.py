"""What an objective needs to know of a whole batch before its first microbatch: advantages from rewards, what a token
of each rollout counts, and each teacher's coefficient.

Legend: R items (rollouts) of the batch, N trained tokens of it in the order of the items, M teachers of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.batch.packing import TrainItem
from learner.objectives.advantages import Rewards
from learner.objectives.combine import teacher_coefs
from learner.objectives.domain_scale import cost_scales
from learner.objectives.losses import Objective
from learner.objectives.reward_signal import Values, ValueTargets


@dataclass(frozen=True)
class BatchTerms:
    """On the CPU, float64; a microbatch takes the entries of its tokens, or of their rollouts."""

    tokens_R: Tensor
    """int64: trained ones."""
    reward_advantage_N: Tensor
    values: ValueTargets | None
    """None: no value function is trained."""
    share_R: Tensor
    cost_scale_R: Tensor
    """Of the rollout's domain; 1 unless `domain_scale` says otherwise."""
    divisor: int
    """Of the loss: trained tokens, or rollouts, of the whole batch."""
    items_unrewarded: int
    """Rollouts with trained tokens and without a reward."""

    def of(self, index: int) -> BatchTerms:
        """The same batch as item `index` alone sees it."""
        return self.part(slice(index, index + 1))

    def part(self, place: slice) -> BatchTerms:
        """The same batch as some of its items see it."""
        begins, ends = (int(self.tokens_R[:r].sum()) for r in place.indices(len(self.tokens_R))[:2])
        tokens = slice(begins, ends)
        return replace(
            self,
            tokens_R=self.tokens_R[place],
            reward_advantage_N=self.reward_advantage_N[tokens],
            values=None if self.values is None else self.values.at(tokens),
            share_R=self.share_R[place],
            cost_scale_R=self.cost_scale_R[place],
        )


def batch_terms(
    items: Sequence[TrainItem], objective: Objective, offline: Sequence[TrainItem] = (), *, values: Values
) -> BatchTerms:
    """Of [*items, *offline]. Items that the student did not write have no part in the advantages from rewards; in the
    mean over the batch they count like any other. `values`: of the trained tokens of `items`, called where the
    advantage wants them. Raises BatchError when the advantage needs whole rollouts and got parts."""
    rewards, tokens_offline_R = _rewards(items), _tokens(offline)
    tokens_R, n_offline = torch.cat([rewards.tokens_R, tokens_offline_R]), int(tokens_offline_R.sum())
    shares = objective.aggregation(tokens_R, objective.aggregation_options)
    scale_R = cost_scales(items, objective.cost) if objective.domain_scale == "rms" else _ones(len(items))
    signal = objective.signal(rewards, values)
    return BatchTerms(
        tokens_R=tokens_R,
        reward_advantage_N=torch.cat([signal.advantage_N, signal.advantage_N.new_zeros(n_offline)]),
        values=None if signal.values is None else signal.values.followed_by(n_offline),
        share_R=shares.share_R,
        cost_scale_R=torch.cat([scale_R, _ones(len(offline))]),
        divisor=shares.divisor,
        items_unrewarded=int(((rewards.tokens_R > 0) & ~rewards.rewarded_R).sum()),
    )


def coefficients(teachers: Sequence[str], objective: Objective) -> Tensor:
    """coef_M float64, in the order of PackedBatch.teachers."""
    return torch.tensor(teacher_coefs(teachers, objective.coef, objective.teacher_coefs), dtype=torch.float64)


def _ones(n: int) -> Tensor:
    return torch.ones(n, dtype=torch.float64)


def _rewards(items: Sequence[TrainItem]) -> Rewards:
    groups: dict[int, int] = {}
    for train_item in items:
        groups.setdefault(train_item.item.task_id, len(groups))
    return Rewards(
        reward_R=torch.tensor([t.item.reward or 0.0 for t in items], dtype=torch.float64),
        rewarded_R=torch.tensor([t.item.reward is not None for t in items], dtype=torch.bool),
        group_R=torch.tensor([groups[t.item.task_id] for t in items], dtype=torch.int64),
        tokens_R=_tokens(items),
        parts=tuple(t.item.rollout_id for t in items if t.n_trained and not t.item.final),
    )


def _tokens(items: Sequence[TrainItem]) -> Tensor:
    """Trained ones, int64."""
    return torch.tensor([train_item.n_trained for train_item in items], dtype=torch.int64)
