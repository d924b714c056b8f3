"""Metrics of a step: sums over trained tokens, added up over microbatches, then divided. No mean of means. No torch:
sums arrive here as numbers."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Sums over trained tokens of one microbatch, or of several; `ratio_max` is a maximum."""

    tokens: int
    loss: float
    """Already divided by the divisor of the batch: the parts add up to the loss."""
    divergence: float
    reverse_kl: float
    scored: float
    """Tokens with at least one teacher."""
    ratio: float
    ratio_squared: float
    cut: float
    rejected: float
    weight: float
    entropy: float
    logprob: float
    advantage: float
    value_error: float
    """`learner.objectives.advantages.value_loss`, without its coefficient; 0 without a value function."""
    hidden_error: float
    """|q computed from hidden states - q sent|, nats."""
    hidden_scores: int
    """Number of its terms, one per token and teacher; 0 without hidden states."""
    scores: float
    """Pairs of a token and a teacher that scores it."""
    excess: float
    """Those at which the student's probability of the sampled token is more than twice the teacher's."""
    deficit: float
    """Those at which it is less than half of the teacher's."""
    set_teacher_mass: float
    """Over pairs with a top-k set: the teacher's probability of its set."""
    set_student_mass: float
    set_overlap: float
    """Share of the student's likeliest tokens in the set (`TopKTeacher.agreement_T3`)."""
    set_scores: int
    """Number of their terms; 0 without top-k sets that the objective uses."""
    pools: dict[str, tuple[float, int]]
    """Pool -> (its part of `divergence`, tokens that it scored)."""
    heads: dict[str, tuple[float, float, float]]
    """Teacher with hidden states and tag -> (its part of `hidden_error`, sum of s - q, number of terms)."""
    ratio_max: float

    @classmethod
    def zero(cls) -> StepSums:
        return cls(tokens=0, hidden_scores=0, set_scores=0, pools={}, heads={}, **dict.fromkeys(SUMS, 0.0))

    def of_sets(self) -> dict[str, float]:
        """Means over the scores that have a top-k set."""
        n = self.set_scores
        names = ("set_teacher_mass", "set_student_mass", "set_overlap")
        return {name: float(getattr(self, name)) / n for name in names} if n else {}

    def plus(self, other: StepSums) -> StepSums:
        names = (field.name for field in fields(self) if field.name not in ("pools", "heads"))
        summed: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        summed["ratio_max"] = max(self.ratio_max, other.ratio_max)
        pools = dict(self.pools)
        for pool, (divergence, n) in other.pools.items():
            before, n_before = pools.get(pool, (0.0, 0))
            pools[pool] = (before + divergence, n_before + n)
        heads = dict(self.heads)
        for name, (error, kl, terms) in other.heads.items():
            before = heads.get(name, (0.0, 0.0, 0.0))
            heads[name] = (before[0] + error, before[1] + kl, before[2] + terms)
        return StepSums(pools=pools, heads=heads, **summed)


COUNTS: Final = ("tokens", "hidden_scores", "set_scores", "pools", "heads")
"""Sums that the host knows, and those of pools and heads."""
SUMS: Final = tuple(field.name for field in fields(StepSums) if field.name not in COUNTS)
"""Names of the other sums, in the order in which a step reads them from the device."""


@dataclass(frozen=True)
class OfflineMetrics:
    """Figures of the trained tokens that a teacher wrote. Other figures do not include them unless they say so."""

    tokens: int
    items: int
    logprob: float
    """Mean log-prob under the current student: minus the cross-entropy on the teacher's text."""
    reverse_kl: float
    """s - q over the teacher's own tokens: minus an estimate of the FORWARD KL."""
    weight_mean: float

    @classmethod
    def of(cls, sums: StepSums, *, items: int) -> OfflineMetrics:
        n = sums.tokens
        return cls(n, items, sums.logprob / n, sums.reverse_kl / n, sums.weight / n)


@dataclass(frozen=True)
class ValueMetrics:
    """Figures of a value function, over the trained tokens of rollouts with a reward; None without any."""

    tokens: int
    loss: float | None
    """Mean of `value_loss`, without its coefficient, before the first update."""
    explained_variance: float | None
    """1 - Var(return - value) / Var(return): 1 is perfect, 0 no better than a constant. None if the returns do not
    vary."""
    return_mean: float | None
    mean: float | None
    """Mean of the values."""
    grad_norm: float
    """Norm of the value head's gradient, before clipping."""


@dataclass(frozen=True)
class UpdatesMetrics:
    """Figures of a step with several updates. Except for the counts, they are those of the last update."""

    made: int
    lost: int
    """Updates not made, because one was not finite."""
    ratio_max: float
    truncated_fraction: float
    logprob_shift: float
    """Mean of s at the last update minus s at the first."""
    grad_norm: float

    @classmethod
    def of(cls, first: StepSums, last: StepSums, made: int, asked: int, grad_norm: float) -> UpdatesMetrics:
        n = first.tokens
        shift = (last.logprob - first.logprob) / n
        return cls(made, asked - made, last.ratio_max, last.cut / n, shift, grad_norm)


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one optimizer step, at its first update. Means are over the trained tokens that the student wrote,
    unless said otherwise; logs are natural."""

    tokens: int
    """Trained tokens, as in the ledger."""
    tokens_unscored: int
    """Trained tokens that no teacher scored."""
    input_tokens: int
    """Tokens that the model reads in one pass over the batch, including context and `offline`."""
    items: int
    items_idle: int
    """Items without a token to train."""
    items_unrewarded: int
    """Items that have a token to train but no reward."""
    microbatches: int
    loss: float
    divergence: float | None
    """Divergence that the loss uses, summed over a token's teachers without coefficients, mean over the scored tokens:
    the cost of the sampled tokens (k1: the same as reverse_kl), or the divergence between the distributions. None if no
    token was scored."""
    reverse_kl: float | None
    """s - q summed over a token's teachers, mean over the scored tokens, under the current student. None if no token
    was scored."""
    ratio_mean: float
    """Mean of r = exp(s - mu). It is 1 in expectation at any staleness, so a drift shows that an engine's log-probs
    differ from the learner's."""
    ratio_max: float
    truncated_fraction: float
    """Share of tokens whose weight was capped or clipped, rejected ones left out."""
    rejected_fraction: float
    """Share of tokens that objective.rejection left out of the loss."""
    weight_mean: float
    ess: float
    """Effective sample size of the ratios over the number of tokens, (sum r)^2 / (n sum r^2), in (0, 1]."""
    entropy: float
    """Mean entropy of the student at the trained positions, nats."""
    logprob: float
    """Mean log-prob under the current student."""
    advantage_mean: float
    grad_norm: float
    """Before clipping."""
    lr: float
    step_s: float
    hidden_error: float | None = None
    """Mean of |q computed from a teacher's hidden states - q that it sent|, nats; None without hidden states."""
    excess_share: float | None = None
    """Share of the scores (a token and one of its teachers) with s - q above log 2. None if no token was scored."""
    deficit_share: float | None = None
    """The same with q - s above log 2."""
    set_teacher_mass: float | None = None
    """Mean probability that a teacher gives to the tokens of the top-k set that it sent; None if the objective reads no
    sets."""
    set_student_mass: float | None = None
    """The same of the student."""
    set_overlap: float | None = None
    """Mean share of the student's likeliest tokens, as many as the set has but at most 16, that are in the set."""
    length_penalty: float | None = None
    """Mean of the term that objective.length_penalty adds to rewards; None without it."""
    offline: OfflineMetrics | None = None
    """None without offline tokens."""
    value: ValueMetrics | None = None
    """None without a value function."""
    updates: UpdatesMetrics | None = None
    """None with one update per batch."""
    pools: dict[str, float] = field(default_factory=dict[str, float])
    """Pool -> its divergence, mean over the tokens that it scored."""

    @classmethod
    def of(cls, sums: StepSums, *, offline_loss: float = 0.0, **given: Any) -> StepMetrics:
        """Means from sums; `sums.tokens` >= 1. `given`: the fields that are no means."""
        n, scored = sums.tokens, sums.scored
        return cls(
            tokens=n,
            tokens_unscored=n - int(scored),
            loss=sums.loss + offline_loss,
            divergence=sums.divergence / scored if scored else None,
            reverse_kl=sums.reverse_kl / scored if scored else None,
            ratio_mean=sums.ratio / n,
            ratio_max=sums.ratio_max,
            truncated_fraction=sums.cut / n,
            rejected_fraction=sums.rejected / n,
            weight_mean=sums.weight / n,
            ess=sums.ratio**2 / (n * sums.ratio_squared) if sums.ratio_squared else 0.0,
            entropy=sums.entropy / n,
            logprob=sums.logprob / n,
            advantage_mean=sums.advantage / n,
            hidden_error=sums.hidden_error / sums.hidden_scores if sums.hidden_scores else None,
            excess_share=sums.excess / sums.scores if sums.scores else None,
            deficit_share=sums.deficit / sums.scores if sums.scores else None,
            pools={pool: divergence / n for pool, (divergence, n) in sums.pools.items() if n},
            **sums.of_sets(),
            **given,
        )

    def as_dict(self) -> dict[str, float]:
        """Flat figures for the metrics: `offline` as `offline_<name>`, and so on. Figures that are None are left
        out, and those of pools, which are in `of_pools`."""
        figures = asdict(self)
        del figures["pools"]
        for group in ("offline", "value", "updates"):
            figures |= {f"{group}_{name}": value for name, value in (figures.pop(group) or {}).items()}
        return {name: value for name, value in figures.items() if value is not None}

    def of_pools(self) -> dict[str, float]:
        """Figures of pools, by tag."""
        return {f"teachers/{pool}/divergence": value for pool, value in sorted(self.pools.items())}
