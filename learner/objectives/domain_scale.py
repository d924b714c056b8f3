"""Bringing the costs of several domains to one size, from the whole batch and before its first microbatch.

    c_t     = sum over the token's teachers m of cost(mu_t, q_mt)
    scale_d = max(1e-3, sqrt(mean of c_t^2 over the graded tokens t of domain d in the batch))
    A_t     = A_reward_t - sum over m of coef_m * cost_mt / scale_d(t)

A domain is a tag. The size is measured with mu, the log-probs the tokens were sampled with: they are there before the
student's forward pass, for all of the batch, so that neither packing nor the order of items changes a gradient. Within
the staleness bound they are close to s; only the size is taken from them, the costs themselves are as configured.
Coefficients are outside: they keep their meaning, and rewards are not scaled.

Legend: N tokens of one item, M its teachers, R rollouts of the batch, D domains.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from learner.batch.packing import TrainItem
from learner.objectives.combine import domain_scales, domain_sums
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
