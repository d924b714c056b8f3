"""The objective on packed 1-D tensors: pure functions, no model.

    cost_t = transform(cost(sg[s_t], q_t))          per teacher      learner.objectives.sampled; k1: s - q
                                                    (each pool may have a cost of its own: .divergences)
    A_t    = A_reward - sum over the token's teachers of coef * (cost_t - baseline_t)
    w_t    = sg[weight of exp(s_t - mu_t)], 0 for a rejected token   learner.objectives.importance, .rejection
    loss   = -sum_t share_t * w_t * A_t * s_t / divisor

s: the current student's log-prob of the sampled token (the only term with a gradient); mu: the log-prob that the engine
reported when it sampled the token; q: a teacher's log-prob. A token that no teacher scores has A = A_reward. For a
teacher with a divergence between distributions the cost is 0, and the divergence is added in `learner.step.step_loss`.

By default a token answers only for itself. With `cost_discount` g above 0 it answers for all trained tokens that follow
it too. With K_t = sum over teachers of coef * (cost_t - baseline_t), and u over the token and those behind it,

    A_t = A_reward - sum_u g ** (u - t) * K_u          with `cost_return` mean divided by sum_u g ** (u - t)

baseline_t is 0, or the mean of the cost over the student's whole distribution at the token's context, which does not
depend on the token. Since grad s has mean 0 over that distribution, it changes the variance and not the expectation.

With `turn_discount` the costs of a token are multiplied by turn_discount ** depth, where depth is the number of turns
before its own (learner.turns), with `prefix_gain` by the weights of `learner.objectives.batch_terms.prefix_weights`.

With spans (teachers with another tokenizer, docs/objectives.md) cost_t and w_t are those of the token's whole span: s,
mu and q in them are sums over its tokens.

With `entropy_coef` the entropy of the student's whole distribution is added, token by token with the same share and
divisor, in `learner.step.step_loss`.

An aggregation gives each rollout (or turn) its share and the loss its divisor, both from the WHOLE batch. Neither
depends on microbatches, so packing does not change the gradient; there is no mean of microbatch means.

Legend: N trained tokens of a microbatch, M teachers of the batch, R rollouts of the batch.
"""

# Why it is so: docs/decisions/objective-defaults.md

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from stillhouse.learner.objectives.advantages import RewardSignal, make_signal
from stillhouse.learner.objectives.config import CostReturn, DomainScale, ObjectiveConfig, TeacherBalance
from stillhouse.learner.objectives.divergences import Divergences, make_divergences
from stillhouse.learner.objectives.importance import TOKEN_LOCAL, ImportanceFn, TokenRatios, sums_after
from stillhouse.learner.objectives.length import LengthPenalty, make_length_penalty
from stillhouse.learner.objectives.options import Null
from stillhouse.learner.objectives.registry import (
    AGGREGATIONS,
    REJECTION,
    TURN_AGGREGATIONS,
    WEIGHT,
    counts_by_turn,
    find_member,
)
from stillhouse.learner.objectives.rejection import TOKEN_LOCAL as REJECTED_ALONE
from stillhouse.learner.objectives.rejection import RejectionFn
from stillhouse.protocol.settings import Member


class TokenShares(NamedTuple):
    share_R: Tensor
    """float64: weight of each trained token of a rollout."""
    divisor: int


class AggregationOptions(NamedTuple):
    max_new_tokens: int
    """Longest possible rollout, tokens."""


class TurnShares(NamedTuple):
    share_U: Tensor
    """float64: weight of each trained token of a turn (`learner.turns`)."""
    divisor: int


TurnAggregationFn: TypeAlias = Callable[[Tensor, Tensor], TurnShares]
"""(tokens_U int64: trained tokens of each turn, at least 1; rollout_U int64: its rollout, ascending) -> TurnShares."""


AggregationFn: TypeAlias = Callable[[Tensor, AggregationOptions], TokenShares]
"""(tokens_R int64: trained tokens, at least one of the batch; options) -> TokenShares."""


def token_mean(tokens_R: Tensor, options: AggregationOptions) -> TokenShares:
    """Mean over all trained tokens: every token counts the same, long rollouts more."""
    return TokenShares(torch.ones_like(tokens_R, dtype=torch.float64), int(tokens_R.sum()))


def sequence_mean(tokens_R: Tensor, options: AggregationOptions) -> TokenShares:
    """Mean over rollouts of the mean over a rollout's trained tokens: every rollout with a trained token counts the
    same, tokens of long ones less."""
    return TokenShares(1.0 / tokens_R.clamp(min=1).double(), int((tokens_R > 0).sum()))


def constant(tokens_R: Tensor, options: AggregationOptions) -> TokenShares:
    """Sum over all trained tokens, divided by the rollouts with a trained token times max_new_tokens: the divisor
    does not depend on the actual lengths, so long wrong answers are not favoured (Dr. GRPO; Liu et al. 2025)."""
    return TokenShares(
        torch.ones_like(tokens_R, dtype=torch.float64), int((tokens_R > 0).sum()) * options.max_new_tokens
    )


def turn_mean(tokens_U: Tensor, rollout_U: Tensor) -> TurnShares:
    """Mean over all turns of the mean over a turn's trained tokens: every turn counts the same, however long it is."""
    return TurnShares(1.0 / tokens_U.double(), len(tokens_U))


def sequence_turn_mean(tokens_U: Tensor, rollout_U: Tensor) -> TurnShares:
    """Mean over rollouts of the mean over their turns of the mean over a turn's trained tokens: in a rollout every turn
    counts the same, and every rollout with a trained token counts the same. This is the turn-balanced weighting at the
    end of the schedule of TurnOPD (arXiv 2607.05804)."""
    turns_R = torch.bincount(rollout_U)
    return TurnShares(1.0 / (tokens_U * turns_R[rollout_U]).double(), int((turns_R > 0).sum()))


@dataclass(frozen=True)
class TokenInputs:
    """Inputs of the loss for the trained tokens of a microbatch, except the student's log-probs."""

    behaviour_N: Tensor
    """mu."""
    teacher_MN: Tensor
    """q; any finite number where not routed."""
    routed_MN: Tensor
    """bool: this teacher scores this token."""
    teachers: tuple[str, ...]
    """Names of the M teachers' pools."""
    coef_M: Tensor
    reward_advantage_N: Tensor
    """0 where rewards are not trained on."""
    share_N: Tensor
    """Weight of the token in the aggregation."""
    sequence_N: Tensor
    """int64: index of the token's rollout in the batch."""
    n_sequences: int
    """R."""
    cost_scale_N: Tensor | None = None
    """Divisor of the costs (learner.objectives.batch_terms); None = 1."""
    proximal_N: Tensor | None = None
    """s at the first of several updates on one batch; None in the first update."""
    divergence_weight_N: Tensor | None = None
    """Weight of the token's divergence, by its turn; None = 1."""
    baseline_MN: Tensor | None = None
    """Mean cost at the token's context; 0 where not routed. None = 0."""
    before_N: Tensor | None = None
    """int64: the last token before each one on its path (`Microbatch.before_N`). Only with a discount of costs, which
    some of the tokens alone do not have."""
    span_N: Tensor | None = None
    """int64: the first token of each one's span. None: each token is a span."""
    rest_MN: Tensor | None = None
    """bool: the cost of the token's span is k1 less `first_MN`, beside a divergence between distributions at its first
    token. None: of no token."""
    first_MN: Tensor | None = None
    """log p - log q of what the token is in the teacher's set, at the first token of a span; else 0. None = 0."""

    def at(self, place: slice) -> TokenInputs:
        """The inputs of some tokens."""
        return replace(
            self,
            behaviour_N=self.behaviour_N[place],
            teacher_MN=self.teacher_MN[:, place],
            routed_MN=self.routed_MN[:, place],
            reward_advantage_N=self.reward_advantage_N[place],
            share_N=self.share_N[place],
            sequence_N=self.sequence_N[place],
            cost_scale_N=None if self.cost_scale_N is None else self.cost_scale_N[place],
            proximal_N=None if self.proximal_N is None else self.proximal_N[place],
            divergence_weight_N=None if self.divergence_weight_N is None else self.divergence_weight_N[place],
            baseline_MN=None if self.baseline_MN is None else self.baseline_MN[:, place],
            before_N=None,
            span_N=None,  # a place may cut spans
            rest_MN=None if self.rest_MN is None else self.rest_MN[:, place],
            first_MN=None if self.first_MN is None else self.first_MN[:, place],
        )

    def by_span(self, student_N: Tensor) -> tuple[Tensor, TokenInputs]:
        """The student's log-probs and these inputs, with the sum over its span in place of each token's log-prob."""
        if self.span_N is None:
            return student_N, self
        return self._span_sums(student_N), replace(
            self,
            behaviour_N=self._span_sums(self.behaviour_N),
            teacher_MN=self._span_sums(self.teacher_MN),
            proximal_N=None if self.proximal_N is None else self._span_sums(self.proximal_N),
            first_MN=None if self.first_MN is None else self._span_sums(self.first_MN),
        )

    def once_per_span(self, cost_MN: Tensor) -> Tensor:
        """The costs, each divided by the number of tokens of its span, so that figures count it once."""
        if self.span_N is None:
            return cost_MN
        return cost_MN / self._span_sums(torch.ones_like(self.behaviour_N))

    def _span_sums(self, x: Tensor) -> Tensor:
        """[..., N] The sum over each token's span."""
        assert self.span_N is not None
        return torch.zeros_like(x).index_add_(-1, self.span_N, x)[..., self.span_N]

    def ratios(self, student_N: Tensor, advantage_N: Tensor | None = None) -> TokenRatios:
        """`student_N` has no gradient. `advantage_N`: 0 where the weights do not depend on it."""
        advantage_N = torch.zeros_like(student_N) if advantage_N is None else advantage_N
        return TokenRatios(student_N, self.behaviour_N, advantage_N, self.sequence_N, self.n_sequences, self.proximal_N)


@dataclass(frozen=True)
class Objective:
    """The members that the configuration names, loaded, and their options."""

    divergences: Divergences
    coef: float
    teacher_coefs: Mapping[str, float]
    importance: ImportanceFn
    options: Member
    """Options of the importance weight."""
    rejection: RejectionFn
    rejection_options: Member
    signal: RewardSignal
    aggregation: AggregationFn
    aggregation_options: AggregationOptions
    domain_scale: DomainScale = "none"
    turn_aggregation: TurnAggregationFn | None = None
    """In place of `aggregation`, if there is one."""
    turn_discount: float = 1.0
    prefix_gain: float = 0.0
    cost_discount: float = 0.0
    cost_return: CostReturn = "sum"
    entropy_coef: float = 0.0
    teacher_balance: TeacherBalance = "none"
    reads_teachers: bool = True
    """False: the cost is that of every token, once, whichever teachers it has."""
    length_penalty: LengthPenalty | None = None

    @property
    def by_token(self) -> bool:
        """True if neither advantage nor weight nor rejection of a token depends on costs and ratios of others."""
        return self.importance in TOKEN_LOCAL and self.rejection in REJECTED_ALONE and not self.cost_discount

    def returns(self, cost_N: Tensor, before_N: Tensor | None) -> Tensor:
        """[N] the costs that each token answers for, from the cost of each."""
        if not self.cost_discount:
            return cost_N
        if before_N is None:
            raise ValueError("a discount of costs needs the tokens before each one, and the microbatch as a whole")
        total_N = sums_after(cost_N, before_N, self.cost_discount)
        if self.cost_return == "sum":
            return total_N
        return total_N / sums_after(torch.ones_like(cost_N), before_N, self.cost_discount)


@dataclass(frozen=True)
class LossTerms:
    """Terms of the loss per token. Only `loss` has a gradient."""

    loss: Tensor
    """Scalar: these tokens' share of the batch's loss (shares add up), the sum of slope * s."""
    slope_N: Tensor
    """d loss / d s."""
    divergence_MN: Tensor
    """Cost of the token by each of its teachers, without coefficients and baselines; one row for the null teacher."""
    student_N: Tensor
    """sg[s]."""
    weights_N: Tensor
    cut_N: Tensor
    """Tokens with another weight than r, except those rejected."""
    rejected_N: Tensor
    reverse_kl_N: Tensor
    """sg[s] - q, summed over the token's teachers; 0 where it has none."""
    advantage_N: Tensor

    def at(self, place: slice | Tensor) -> LossTerms:
        """The terms of some tokens. `loss` stays that of all tokens."""
        return LossTerms(self.loss, *(getattr(self, name)[..., place] for name in _PER_TOKEN))

    @staticmethod
    def joined(parts: Sequence[LossTerms]) -> LossTerms:
        """Concatenate the terms. The loss is NaN: the caller sums it up, and it may contain more than these terms."""
        columns = (torch.cat([getattr(part, name) for part in parts], dim=-1) for name in _PER_TOKEN)
        return LossTerms(parts[0].loss.new_full((), torch.nan), *columns)


def make_objective(config: ObjectiveConfig, *, max_new_tokens: int) -> Objective:
    """Load the configured members. `max_new_tokens` is the longest possible rollout. Raises ValueError listing the
    known names."""
    importance, options, _ = WEIGHT.load(config.importance)
    rejection, rejection_options, _ = REJECTION.load(config.rejection)
    by_turn = counts_by_turn(config.aggregation)
    aggregation = find_member(TURN_AGGREGATIONS if by_turn else AGGREGATIONS, config.aggregation)
    return Objective(
        divergences=make_divergences(config),
        coef=config.coef,
        teacher_coefs=config.teacher_coefs,
        importance=importance,
        options=options,
        rejection=rejection,
        rejection_options=rejection_options,
        signal=make_signal(config.advantage),
        aggregation=token_mean if by_turn else cast(AggregationFn, aggregation),
        aggregation_options=AggregationOptions(max_new_tokens=max_new_tokens),
        domain_scale=config.domain_scale,
        turn_aggregation=cast(TurnAggregationFn, aggregation) if by_turn else None,
        turn_discount=config.turn_discount,
        prefix_gain=config.prefix_gain,
        cost_discount=config.cost_discount,
        cost_return=config.cost_return,
        entropy_coef=config.entropy_coef,
        teacher_balance=config.teacher_balance,
        reads_teachers=not isinstance(config.divergence, Null),
        length_penalty=make_length_penalty(config.length_penalty, max_new_tokens=max_new_tokens),
    )


def token_loss(student_N: Tensor, inputs: TokenInputs, objective: Objective, divisor: int) -> LossTerms:
    """The loss above. `student_N` may carry a gradient; `divisor` >= 1 is that of the whole batch."""
    current_N = student_N.detach()
    reverse_kl_N = torch.where(inputs.routed_MN, current_N[None] - inputs.teacher_MN, 0.0).sum(dim=0)
    if not objective.reads_teachers:
        inputs = _null_teacher(inputs, objective.coef)
    total_N, spans = inputs.by_span(current_N)
    cost_MN = objective.divergences.costs(total_N, spans.behaviour_N, spans.teacher_MN, inputs.teachers)
    if inputs.rest_MN is not None:
        ratio_MN = total_N - spans.teacher_MN
        rest_MN = ratio_MN if spans.first_MN is None else ratio_MN - spans.first_MN
        cost_MN = torch.where(inputs.rest_MN, rest_MN, cost_MN)
    scale = 1.0 if inputs.cost_scale_N is None else inputs.cost_scale_N.to(current_N.dtype)
    weighted_MN = (cost_MN if inputs.baseline_MN is None else cost_MN - inputs.baseline_MN) / scale
    if inputs.divergence_weight_N is not None:
        weighted_MN = weighted_MN * inputs.divergence_weight_N.to(current_N.dtype)
    own_N = total_cost(weighted_MN, inputs.routed_MN, inputs.coef_M.to(current_N.dtype))
    advantage_N = inputs.reward_advantage_N.to(current_N.dtype) - objective.returns(own_N, inputs.before_N)
    ratios = inputs.ratios(current_N, advantage_N)
    of_spans = ratios if spans is inputs else spans.ratios(total_N, advantage_N)
    rejecting = of_spans if objective.rejection in REJECTED_ALONE else ratios
    rejected_N = objective.rejection(rejecting.at_start(), objective.rejection_options)
    weighting = of_spans if objective.importance in TOKEN_LOCAL else ratios
    weights_N, cut_N = objective.importance(weighting, objective.options)
    weights_N = torch.where(rejected_N, 0.0, weights_N)  # not a product: inf * 0 is NaN
    slope_N = -(weights_N * advantage_N * inputs.share_N.to(current_N.dtype)) / divisor
    return LossTerms(
        loss=(slope_N * student_N).sum(),
        slope_N=slope_N,
        divergence_MN=inputs.once_per_span(torch.where(inputs.routed_MN, cost_MN, 0.0)),
        student_N=current_N,
        weights_N=weights_N,
        cut_N=cut_N & ~rejected_N,
        rejected_N=rejected_N,
        reverse_kl_N=reverse_kl_N,
        advantage_N=advantage_N,
    )


def _null_teacher(inputs: TokenInputs, coef: float) -> TokenInputs:
    """The inputs with one teacher in place of all others. It scores every token, and its scores mean nothing."""
    every_1N = torch.ones_like(inputs.behaviour_N, dtype=torch.bool)[None]
    scores_1N = torch.zeros_like(inputs.behaviour_N)[None]
    return replace(
        inputs,
        teacher_MN=scores_1N,
        routed_MN=every_1N,
        coef_M=torch.full_like(inputs.behaviour_N[:1], coef),
        span_N=None,
        rest_MN=None,
    )


_PER_TOKEN = tuple(field.name for field in fields(LossTerms) if field.name != "loss")


def total_cost(cost_MN: Tensor, routed_MN: Tensor, coef_M: Tensor) -> Tensor:
    """[N] sum of coef * cost over each token's teachers. `cost_MN` is ignored where a teacher is not routed."""
    return torch.where(routed_MN, coef_M[:, None] * cost_MN, 0.0).sum(dim=0)
