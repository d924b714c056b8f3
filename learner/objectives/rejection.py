"""Rejection: which tokens are not trained because two policies disagree on them too much. Pure functions; their names
are in `learner.objectives.registry.REJECTIONS`.

    r_t = exp(s_t - mu_t)      s: log-prob under the policy at the start of the step, mu: under the one that sampled

A token is rejected if r (of itself, or of its whole rollout) is outside [low, high]. Rejection decides whether a token
is trained; an importance weight (`learner.objectives.importance`) decides how much. With several updates on one batch,
all of them reject the same tokens.

Legend: N trained tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stillhouse.learner.objectives.importance import TokenRatios
from stillhouse.learner.objectives.options import RatioBounds
from stillhouse.protocol.settings import Member

RejectionFn: TypeAlias = Callable[[TokenRatios, Any], Tensor]
"""(ratios at the start of the step, the member's own options) -> bool [N]: the token is not trained."""


def none(ratios: TokenRatios, options: Member) -> Tensor:
    """Every token is trained."""
    return torch.zeros_like(ratios.student_N, dtype=torch.bool)


def token(ratios: TokenRatios, options: RatioBounds) -> Tensor:
    """r of the token itself."""
    return _outside(ratios.ratio(), options)


def sequence(ratios: TokenRatios, options: RatioBounds) -> Tensor:
    """Product of r over the rollout: the whole rollout is rejected or kept. Long rollouts leave any range sooner."""
    return _outside(torch.exp(ratios.sequence_log_ratio(mean=False)), options)


def geometric(ratios: TokenRatios, options: RatioBounds) -> Tensor:
    """Geometric mean of r over the rollout: the whole rollout is rejected or kept, whatever its length."""
    return _outside(torch.exp(ratios.sequence_log_ratio(mean=True)), options)


TOKEN_LOCAL = (none, token)
"""Members that decide on a token without looking at other tokens."""


def _outside(ratio_N: Tensor, options: RatioBounds) -> Tensor:
    return ~((ratio_N >= options.low) & (ratio_N <= options.high))
