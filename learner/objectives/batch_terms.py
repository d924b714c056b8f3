"""Bringing the costs of several domains to one size, from the whole batch and before its first microbatch.

    c_t     = sum over the token's teachers m of cost(mu_t, q_mt)
    scale_d = max(1e-3, sqrt(mean of c_t^2 over the graded tokens t of domain d in the batch))
    A_t     = A_reward_t - sum over m of coef_m * cost_mt / scale_d(t)

A domain is a tag. The size is measured with mu, the log-probs the tokens were sampled with: they are there before the
student's forward pass, for all of the batch, so that neither packing nor the order of items changes a gradient. Within
the staleness bound they are close to s; only the size is taken from them, the costs themselves are as configured.
Coefficients are outside: they keep their meaning, and rewards are not scaled.

Legend: N tokens of one item, M its teachers, R rollouts of the batch, D domains.

One advantage per token out of rewards and several teachers.

    A_t = A_reward_t - sum over the token's teachers m of coef_m * cost_mt

A_reward comes in as it is to be used (already whitened, learner.objectives.advantages); what is subtracted is not
whitened with it. A token that no teacher grades has A = A_reward: zero in pure distillation, the reward alone in mixed.

Legend: N trained tokens of a microbatch, M teachers of the batch, D domains.

What an objective needs to know of a whole batch before its first microbatch: advantages from rewards, what a token
of each rollout counts, and each teacher's coefficient.

Legend: R items (rollouts) of the batch, N trained tokens of it in the order of the items, M teachers of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from learner.batch import TrainItem
from learner.objectives.advantages import Rewards, Values, ValueTargets
from learner.objectives.losses import Objective
from learner.objectives.sampled import CostFn


def cost_scales(items: Sequence[TrainItem], cost: CostFn) -> Tensor:
    """[R] float64: the scale of each rollout's domain; 1 for a domain without a graded token."""
    domains = {tag: d for d, tag in enumerate(dict.fromkeys(train_item.item.tag for train_item in items))}
    squares_D = torch.zeros(len(domains), dtype=torch.float64)
    tokens_D = torch.zeros(len(domains), dtype=torch.int64)
    for train_item in items:
        if not train_item.item.teachers or not train_item.n_trained:
            continue
        trained_L = train_item.train_mask_L
        behaviour_N = torch.from_numpy(train_item.behaviour_L[trained_L]).double()
        teacher_MN = torch.from_numpy(train_item.teacher_ML[:, trained_L]).double()
        cost_N = cost(behaviour_N[None], teacher_MN).sum(dim=0)
        domain_N = torch.full((len(cost_N),), domains[train_item.item.tag])
        squares, tokens = domain_sums(cost_N, domain_N, len(domains))
        squares_D, tokens_D = squares_D + squares, tokens_D + tokens
    scale_D = domain_scales(squares_D, tokens_D)
    return scale_D[[domains[train_item.item.tag] for train_item in items]]


def teacher_coefs(teachers: Sequence[str], coef: float, own: Mapping[str, float]) -> list[float]:
    """Coefficient of each teacher, in their order: its own one, else the common one."""
    return [own.get(name, coef) for name in teachers]


def domain_sums(cost_N: Tensor, domain_N: Tensor, n_domains: int) -> tuple[Tensor, Tensor]:
    """(sum of squared costs [D], tokens [D]), float64. They add up over microbatches."""
    squares_D = cost_N.new_zeros(n_domains, dtype=torch.float64).index_add_(0, domain_N, cost_N.double().square())
    return squares_D, torch.bincount(domain_N, minlength=n_domains)


def domain_scales(squares_D: Tensor, tokens_D: Tensor, *, floor: float = 1e-3) -> Tensor:
    """[D] root mean square of the cost per domain, at least `floor`; 1 where a domain has no token. Costs divided by it
    pull equally hard in every domain, whatever teachers and texts make of the size of their log-probs. To be taken of
    the whole batch (or of the steps before), never of a microbatch."""
    rms_D = (squares_D / tokens_D.clamp(min=1)).sqrt().clamp(min=floor)
    return torch.where(tokens_D > 0, rms_D, 1.0)


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
