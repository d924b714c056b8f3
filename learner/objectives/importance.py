"""Importance weights: how much a token counts that an older policy sampled. Pure functions; their names are in
`learner.objectives.registry.IMPORTANCE`.

    r_t = exp(s_t - mu_t)      s: log-prob under the policy being trained, mu: under the one that sampled the token

A weight w_t multiplies A_t * grad s_t. Clipped surrogates are weights too: min(r A, clip(r) A) has the gradient
r * A * grad s where the clip does not bind and none elsewhere, so its weight is r or 0. The reported loss is then w A s
instead of the surrogate's value; the gradient is the surrogate's.

Sequence-level members reduce over the trained tokens of one rollout in the batch. A microbatch never holds part of a
rollout, so packing does not change them.

Legend: N trained tokens of a microbatch, R rollouts of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from stillhouse.learner.objectives.options import Capped, Cispo, Clipped, Decoupled
from stillhouse.protocol.settings import Member


@dataclass(frozen=True)
class TokenRatios:
    """Inputs of a weight, without gradient."""

    student_N: Tensor
    """sg[s]."""
    behaviour_N: Tensor
    """mu."""
    advantage_N: Tensor
    """A, from rewards and divergences together. A clip binds on one side only, by the sign of A."""
    sequence_N: Tensor
    """int64: index of the token's rollout in the batch."""
    n_sequences: int
    """R."""
    proximal_N: Tensor | None = None
    """Log-prob under the policy at the start of several updates on one batch; None in the first update, where it is
    s."""

    def at_start(self) -> TokenRatios:
        """The same with s from the start of the step, in every update on its batch."""
        return self if self.proximal_N is None else replace(self, student_N=self.proximal_N)

    def ratio(self) -> Tensor:
        """r, [N]."""
        return torch.exp(self.student_N - self.behaviour_N)

    def sequence_log_ratio(self, *, mean: bool) -> Tensor:
        """[N] sum (or mean) of s - mu over the rollout of each token."""
        log_ratio_N = (self.student_N - self.behaviour_N).double()
        total_R = log_ratio_N.new_zeros(self.n_sequences).index_add_(0, self.sequence_N, log_ratio_N)
        if mean:
            # bincount would read the largest index, and on a GPU the host would wait for it.
            tokens_R = torch.zeros_like(total_R).index_add_(0, self.sequence_N, torch.ones_like(log_ratio_N))
            total_R = total_R / tokens_R.clamp(min=1)
        return total_R[self.sequence_N].to(self.student_N.dtype)


class Weights(NamedTuple):
    """No gradient flows through either."""

    weights_N: Tensor
    cut_N: Tensor
    """bool: the weight differs from r, because it was capped or clipped."""


ImportanceFn: TypeAlias = Callable[[TokenRatios, Any], Weights]
"""(ratios, the member's own options: `learner.objectives.options`) -> Weights."""


def no_weights(ratios: TokenRatios, options: Member) -> Weights:
    """w = 1: tokens count as if the current policy had sampled them. Biased as soon as it did not."""
    ratio_N = ratios.ratio()
    return Weights(torch.ones_like(ratio_N), torch.zeros_like(ratio_N, dtype=torch.bool))


def truncated(ratios: TokenRatios, options: Capped) -> Weights:
    """w = min(r, cap), token by token (TIS; Ionides 2008, Espeholt et al. 2018)."""
    return _capped(ratios.ratio(), options.cap)


def cispo(ratios: TokenRatios, options: Cispo) -> Weights:
    """w = r limited to [low, high], token by token, whatever the sign of A: no token loses its gradient (CISPO;
    MiniMax-M1, Chen et al. 2025)."""
    ratio_N = ratios.ratio()
    return Weights(ratio_N.clamp(options.low, options.high), (ratio_N < options.low) | (ratio_N > options.high))


def sequence(ratios: TokenRatios, options: Capped) -> Weights:
    """w = min(product of r over the rollout, cap): the exact ratio of whole rollouts, up to the cap. Its variance grows
    exponentially with the length."""
    return _capped(torch.exp(ratios.sequence_log_ratio(mean=False)), options.cap)


def geometric(ratios: TokenRatios, options: Capped) -> Weights:
    """w = min(geometric mean of r over the rollout, cap). Not a correction of the distribution (biased), but of the
    same size whatever the length."""
    return _capped(torch.exp(ratios.sequence_log_ratio(mean=True)), options.cap)


def ppo(ratios: TokenRatios, options: Clipped) -> Weights:
    """Gradient of PPO's clipped surrogate (Schulman et al. 2017) with bounds low = 1 - eps_low and high = 1 + eps_high,
    and with dual > 0 of the dual clip (Ye et al. 2020): where A < 0, r above dual gives nothing either."""
    return _clipped(ratios.ratio(), ratios.advantage_N, options)


def gspo(ratios: TokenRatios, options: Clipped) -> Weights:
    """The same clip on the geometric mean of r over the rollout (GSPO; Zheng et al. 2025). Belongs together with
    aggregation = sequence_mean and an advantage that is one number per rollout."""
    return _clipped(torch.exp(ratios.sequence_log_ratio(mean=True)), ratios.advantage_N, options)


def decoupled(ratios: TokenRatios, options: Decoupled) -> Weights:
    """min(exp(prox - mu), cap) times the weight of `ppo` for exp(s - prox): what is off-policy is corrected against the
    policy that sampled, what one update may change is clipped against the one the update began from (Hilton et al.
    2022; AReaL, Fu et al. 2025). In the first update on a batch prox = s, and this is `truncated`."""
    proximal_N = ratios.student_N if ratios.proximal_N is None else ratios.proximal_N
    behaviour = _capped(torch.exp(proximal_N - ratios.behaviour_N), options.cap)
    update = _clipped(torch.exp(ratios.student_N - proximal_N), ratios.advantage_N, options)
    weights_N = torch.where(update.weights_N == 0, 0.0, behaviour.weights_N * update.weights_N)
    return Weights(weights_N, behaviour.cut_N | update.cut_N)


TOKEN_LOCAL = (no_weights, truncated, cispo, ppo, decoupled)
"""Members whose weight of a token does not depend on other tokens."""


def sums_before(value_N: Tensor, before_N: Tensor) -> Tensor:
    """[N] sum of the values of all tokens before each one on its path, without its own. `before_N` int64: the last
    token before it; -1: none. Each round adds as many tokens as all rounds before it."""
    n_tokens = len(value_N)
    value_N = torch.cat([value_N, value_N.new_zeros(1)])  # what is before a first token
    before_N = torch.cat([torch.where(before_N < 0, n_tokens, before_N), before_N.new_full((1,), n_tokens)])
    total_N = value_N[before_N]
    for _ in range(n_tokens.bit_length()):
        total_N = total_N + total_N[before_N]
        before_N = before_N[before_N]
    return total_N[:n_tokens]


def sums_after(value_N: Tensor, before_N: Tensor, discount: float) -> Tensor:
    """[N] sum of discount ** d * value over each token itself (d = 0) and all tokens that follow it, d tokens later;
    behind a branching point those of all branches. `before_N`: see `sums_before`. After each round a token has the sum
    over twice as many tokens."""
    n_tokens = len(value_N)
    before_N = torch.cat([torch.where(before_N < 0, n_tokens, before_N), before_N.new_full((1,), n_tokens)])
    total_N = torch.cat([value_N, value_N.new_zeros(1)])  # the last entry gathers what leaves the start: not used
    for _ in range(n_tokens.bit_length()):
        total_N[n_tokens] = 0.0
        total_N = total_N.index_add(0, before_N, discount * total_N)
        before_N, discount = before_N[before_N], discount * discount
    return total_N[:n_tokens]


def context_weights(ratios: TokenRatios, before_N: Tensor, cap: float) -> Tensor:
    """w = min(product of r over the trained tokens BEFORE this one on its path, cap), [N]: the weight of terms that
    depend on the context alone, such as a divergence between distributions. The token's own r is not part of it.
    `before_N`: see `sums_before`."""
    log_ratio_N = (ratios.student_N - ratios.behaviour_N).double()
    return sums_before(log_ratio_N, before_N).exp().clamp(max=cap).to(ratios.student_N.dtype)


def _capped(ratio_N: Tensor, cap: float) -> Weights:
    return Weights(ratio_N.clamp(max=cap), ratio_N > cap)


def _clipped(ratio_N: Tensor, advantage_N: Tensor, options: Clipped) -> Weights:
    """r where min(r A, clip(r) A), or with the dual clip max(that, dual * A), still depends on r."""
    rises_N = advantage_N > 0
    falls_N = advantage_N < 0
    cut_N = (rises_N & (ratio_N > options.high)) | (falls_N & (ratio_N < options.low))
    if options.dual > 0:
        cut_N = cut_N | (falls_N & (ratio_N > options.dual))
    return Weights(torch.where(cut_N, 0.0, ratio_N), cut_N)
