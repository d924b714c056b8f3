"""Terms of an objective that depend on the whole batch: advantages from rewards, the share of each rollout in the loss,
each teacher's coefficient, and the scale of each domain's costs. They are computed before the first microbatch.

Scaled by domain (`domain_scale = rms`; a domain is a tag), costs of different sizes pull equally hard:

    c_t     = sum over the token's teachers m of cost(mu_t, q_mt)
    scale_d = max(1e-3, sqrt(mean of c_t^2 over the scored tokens t of domain d in the batch))
    A_t     = A_reward_t - sum over m of coef_m * cost_mt / scale_d(t)

The size is measured with mu, the log-probs at sampling: they are known for the whole batch before the student's forward
pass, so neither packing nor the order of items changes a gradient, and within the staleness bound they are close to s.
Only the size comes from them; the costs themselves are as configured. Coefficients and rewards are not scaled.

Legend: R items (rollouts) of the batch, N trained tokens of it in the order of the items, M teachers, D domains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch
from torch import Tensor

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.objectives.advantages import Rewards, Values, ValueTargets
from stillhouse.learner.objectives.divergences import Divergences
from stillhouse.learner.objectives.importance import sums_before
from stillhouse.learner.objectives.losses import Objective
from stillhouse.learner.objectives.turns import batch_rewards, batch_turns
from stillhouse.learner.turns import sampled_mask

LEAST_SCALE: Final = 1e-3


def cost_scales(items: Sequence[TrainItem], divergences: Divergences) -> Tensor:
    """[R] float64: the root mean square of the cost in each rollout's domain, at least LEAST_SCALE; 1 for a domain
    without a scored token. Of the whole batch, never of a microbatch."""
    domains = {tag: d for d, tag in enumerate(dict.fromkeys(train_item.item.tag for train_item in items))}
    squares_D = torch.zeros(len(domains), dtype=torch.float64)
    tokens_D = torch.zeros(len(domains), dtype=torch.int64)
    for train_item in items:
        if not train_item.item.teachers or not train_item.n_trained:
            continue
        trained_L = train_item.train_mask_L
        behaviour_N = torch.from_numpy(train_item.behaviour_L[trained_L]).double()
        teacher_MN = torch.from_numpy(train_item.teacher_ML[:, trained_L]).double()
        cost_N = divergences.costs(behaviour_N, behaviour_N, teacher_MN, train_item.item.teachers).sum(dim=0)
        domain = domains[train_item.item.tag]
        squares_D += torch.zeros_like(squares_D).index_add_(0, torch.full((len(cost_N),), domain), cost_N.square())
        tokens_D[domain] += len(cost_N)
    rms_D = (squares_D / tokens_D.clamp(min=1)).sqrt().clamp(min=LEAST_SCALE)
    scale_D = torch.where(tokens_D > 0, rms_D, 1.0)
    return scale_D[[domains[train_item.item.tag] for train_item in items]]


def teacher_coefs(teachers: Sequence[str], objective: Objective, scales: Mapping[str, float] | None = None) -> Tensor:
    """coef_M float64, in the order of `teachers`: the coefficient of each pool, else the common one, times its scale
    (`teacher_scales`) where the objective balances teachers."""
    scales = scales if scales is not None and objective.teacher_balance == "tokens" else {}
    coefs = [objective.teacher_coefs.get(name, objective.coef) * scales.get(name, 1.0) for name in teachers]
    return torch.tensor(coefs, dtype=torch.float64)


def teacher_scales(items: Sequence[TrainItem], share_N: Tensor) -> dict[str, float]:
    """Pool -> factor of its divergences that makes the total weight of each pool's tokens in the batch the same, and
    leaves the sum over all pools as it is.

        W_m = sum of the shares of the tokens that pool m scores          factor_m = mean of W over the pools / W_m

    Pools without a token are left out. The cause that Open-MOPD (arXiv 2608.19098) finds for teachers that are not
    learned from is that others score more tokens."""
    totals: dict[str, float] = {}
    begin = 0
    for train_item in items:
        end = begin + train_item.n_trained
        weight = float(share_N[begin:end].sum())
        begin = end
        for name in train_item.item.teachers if weight else ():
            totals[name] = totals.get(name, 0.0) + weight
    return {name: sum(totals.values()) / len(totals) / total for name, total in totals.items()}


@dataclass(frozen=True)
class BatchTerms:
    """On the CPU, float64. A microbatch takes the entries of its tokens or their rollouts."""

    tokens_R: Tensor
    """int64: trained tokens of each rollout."""
    reward_advantage_N: Tensor
    values: ValueTargets | None
    """None without a value function."""
    share_N: Tensor
    cost_scale_R: Tensor
    """Scale of the costs of each rollout; 1 without `domain_scale`."""
    divisor: int
    """Divisor of the loss: trained tokens, or rollouts, of the whole batch."""
    items_unrewarded: int
    """Rollouts that have trained tokens but no reward."""
    divergence_weight_N: Tensor | None = None
    """Weight of each token's divergence; None without `turn_discount` and `prefix_gain`."""
    teacher_scales: dict[str, float] = field(default_factory=dict[str, float])
    """Factor of each pool's divergences; empty without `teacher_balance`."""
    length_penalty: float | None = None
    """Mean over the rollouts with a reward; None without one."""

    def of(self, index: int) -> BatchTerms:
        """The terms of item `index`, with its share of the batch."""
        return self.part(slice(index, index + 1))

    def part(self, place: slice) -> BatchTerms:
        """The terms of some items, with their shares of the batch."""
        begins, ends = (int(self.tokens_R[:r].sum()) for r in place.indices(len(self.tokens_R))[:2])
        tokens = slice(begins, ends)
        return replace(
            self,
            tokens_R=self.tokens_R[place],
            reward_advantage_N=self.reward_advantage_N[tokens],
            values=None if self.values is None else self.values.at(tokens),
            share_N=self.share_N[tokens],
            cost_scale_R=self.cost_scale_R[place],
            divergence_weight_N=None if self.divergence_weight_N is None else self.divergence_weight_N[tokens],
        )


def batch_terms(
    items: Sequence[TrainItem], objective: Objective, offline: Sequence[TrainItem] = (), *, values: Values
) -> BatchTerms:
    """Terms of [*items, *offline]. Offline items have no part in the advantages from rewards; in the mean over the
    batch they count like any other. `values` computes the values of the trained tokens of `items`, if the advantage
    needs them. Raises BatchError if the advantage needs whole rollouts and got parts."""
    rewards, penalty = _penalised(_rewards(items), items, objective)
    tokens_offline_R = _tokens(offline)
    tokens_R, n_offline = torch.cat([rewards.tokens_R, tokens_offline_R]), int(tokens_offline_R.sum())
    share_N, divisor = _shares([*items, *offline], tokens_R, objective)
    scale_R = cost_scales(items, objective.divergences) if objective.domain_scale == "rms" else _ones(len(items))
    rewards = replace(rewards, turns=lambda: batch_rewards(items, rewards))
    signal = objective.signal(rewards, values)
    return BatchTerms(
        tokens_R=tokens_R,
        reward_advantage_N=torch.cat([signal.advantage_N, signal.advantage_N.new_zeros(n_offline)]),
        values=None if signal.values is None else signal.values.followed_by(n_offline),
        share_N=share_N,
        cost_scale_R=torch.cat([scale_R, _ones(len(offline))]),
        divisor=divisor,
        items_unrewarded=int(((rewards.tokens_R > 0) & ~rewards.rewarded_R).sum()),
        divergence_weight_N=_divergence_weights(items, n_offline, objective),
        teacher_scales=teacher_scales(items, share_N) if objective.teacher_balance == "tokens" else {},
        length_penalty=penalty,
    )


def _shares(items: Sequence[TrainItem], tokens_R: Tensor, objective: Objective) -> tuple[Tensor, int]:
    if objective.turn_aggregation is not None:
        turns = batch_turns(items)
        by_turn = objective.turn_aggregation(turns.tokens_U, turns.rollout_U)
        return by_turn.share_U[turns.turn_N], by_turn.divisor
    shares = objective.aggregation(tokens_R, objective.aggregation_options)
    return shares.share_R.repeat_interleave(tokens_R), shares.divisor


def _divergence_weights(items: Sequence[TrainItem], n_offline: int, objective: Objective) -> Tensor | None:
    """turn_discount ** depth for each trained token, times its prefix weight. Text of the teacher has the weight 1."""
    if objective.turn_discount == 1.0 and not objective.prefix_gain:
        return None
    weight_N = _ones(sum(train_item.n_trained for train_item in items))
    if objective.turn_discount != 1.0:
        turns = batch_turns(items)
        weight_N = objective.turn_discount ** turns.depth_U[turns.turn_N].double()
    if objective.prefix_gain:
        weight_N = weight_N * torch.cat([prefix_weights(one, objective.prefix_gain) for one in items])
    return torch.cat([weight_N, _ones(n_offline)])


def prefix_weights(train_item: TrainItem, gain: float) -> Tensor:
    """[n] float64: 1 + gain * (1 - D_t / T) for each trained token (IW-OPD, arXiv 2606.22600).

        d_t = |sum over its teachers of (mu_t - q_t)|          D_t = sum of d over trained tokens before t on its path
        T   = sum of d over all of the rollout's trained tokens in the batch, on all branches

    A rollout on which student and teacher agree to the last bit has the weight 1 + gain everywhere."""
    trained_L = train_item.train_mask_L
    behaviour_n = torch.from_numpy(train_item.behaviour_L[trained_L]).double()
    teacher_Mn = torch.from_numpy(train_item.teacher_ML[:, trained_L]).double()
    distance_n = (behaviour_n - teacher_Mn).sum(dim=0).abs()
    before_n = sums_before(distance_n, torch.from_numpy(train_item.before))
    return 1.0 + gain * (1.0 - before_n / distance_n.sum().clamp(min=1e-8))


def _penalised(rewards: Rewards, items: Sequence[TrainItem], objective: Objective) -> tuple[Rewards, float | None]:
    """The rewards with the length penalty, and its mean over those that there are."""
    if objective.length_penalty is None:
        return rewards, None
    rewards = replace(rewards, lengths_R=torch.tensor([int(sampled_mask(item).sum()) for item in items]))
    penalty_R = torch.where(rewards.rewarded_R, objective.length_penalty(rewards), 0.0)
    n = int(rewards.rewarded_R.sum())
    return replace(rewards, reward_R=rewards.reward_R + penalty_R), float(penalty_R.sum()) / n if n else None


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
        rollouts=tuple(t.item.rollout_id for t in items),
        parts=tuple(t.item.rollout_id for t in items if t.n_trained and not t.item.final),
    )


def _tokens(items: Sequence[TrainItem]) -> Tensor:
    return torch.tensor([train_item.n_trained for train_item in items], dtype=torch.int64)
