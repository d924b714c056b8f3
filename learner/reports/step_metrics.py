"""What a step reports: sums per trained token, added up over microbatches, then means. No mean of means.

No torch: sums arrive here as numbers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Sums over trained tokens of one microbatch, or of several; `ratio_max` is a maximum."""

    tokens: int
    loss: float
    """Already divided by the batch's trained tokens: shares add up to the loss."""
    divergence: float
    reverse_kl: float
    scored: float
    """Tokens with at least one teacher."""
    ratio: float
    ratio_squared: float
    cut: float
    weight: float
    entropy: float
    logprob: float
    advantage: float
    value_error: float
    """`learner.objectives.advantages.value_loss`, without its coefficient; 0 without a value function."""
    ratio_max: float

    @classmethod
    def zero(cls) -> StepSums:
        return cls(tokens=0, **dict.fromkeys(SUMS, 0.0))

    def plus(self, other: StepSums) -> StepSums:
        summed: dict[str, Any] = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        summed["ratio_max"] = max(self.ratio_max, other.ratio_max)
        return StepSums(**summed)


SUMS: Final = tuple(field.name for field in fields(StepSums) if field.name != "tokens")
"""Names of the sums beside the number of tokens, in the order in which a step reads them from the device."""


@dataclass(frozen=True)
class OfflineMetrics:
    """Of the trained tokens that the teacher wrote; no other figure of the step contains them but those that say so."""

    tokens: int
    items: int
    logprob: float
    """Under the current student: minus the cross-entropy on the teacher's text."""
    reverse_kl: float
    """s - q over the teacher's own tokens: minus an estimate of the FORWARD KL."""
    weight_mean: float

    @classmethod
    def of(cls, sums: StepSums, *, items: int) -> OfflineMetrics:
        n = sums.tokens
        return cls(n, items, sums.logprob / n, sums.reverse_kl / n, sums.weight / n)


@dataclass(frozen=True)
class ValueMetrics:
    """Of a value function, over the trained tokens of judged rollouts; None where the batch has none."""

    tokens: int
    loss: float | None
    """Mean of `value_loss`, without its coefficient, before the first update."""
    explained_variance: float | None
    """1 - Var(return - value) / Var(return): 1 is perfect, 0 no better than a constant. None: returns do not vary."""
    return_mean: float | None
    mean: float | None
    """Of the values."""
    grad_norm: float
    """Of the head's gradient before clipping; the student's own is `StepMetrics.grad_norm`."""


@dataclass(frozen=True)
class UpdatesMetrics:
    """Of a step that makes several updates of its batch. All but the counts: as the last update found it."""

    made: int
    lost: int
    """Not made: one of them was not finite."""
    ratio_max: float
    truncated_fraction: float
    logprob_shift: float
    """Mean over the trained tokens of s then minus s at the first update."""
    grad_norm: float

    @classmethod
    def of(cls, first: StepSums, last: StepSums, made: int, asked: int, grad_norm: float) -> UpdatesMetrics:
        n = first.tokens
        shift = (last.logprob - first.logprob) / n
        return cls(made, asked - made, last.ratio_max, last.cut / n, shift, grad_norm)


@dataclass(frozen=True)
class StepMetrics:
    """Figures of one optimizer step, at its first update. Means are over its trained tokens unless said otherwise; logs
    are natural. Tokens are those that the student wrote, as in the ledger; `offline` has the others."""

    tokens: int
    """Trained."""
    tokens_unscored: int
    """Trained tokens that no teacher graded: their advantage is 0."""
    input_tokens: int
    """Read by the model in one pass over the batch, context included, `offline` too."""
    items: int
    items_idle: int
    """Items without a token to train."""
    items_unrewarded: int
    """Items with a token to train and without a reward: no advantage comes from one."""
    microbatches: int
    loss: float
    divergence: float | None
    """What is trained on, summed over a token's teachers without their coefficients, mean over the graded tokens: the
    cost of the sampled tokens (k1: the same as reverse_kl), or the divergence between the distributions. None: no
    token was graded."""
    reverse_kl: float | None
    """sg[s] - q summed over a token's teachers, mean over the graded tokens; always under the current student. None: no
    token was graded."""
    ratio_mean: float
    """r = exp(s - mu); 1 in expectation whatever the staleness, so a drift tells of an engine that reports other
    log-probs than the learner computes."""
    ratio_max: float
    truncated_fraction: float
    """Share of tokens whose weight is not r itself (capped or masked)."""
    weight_mean: float
    ess: float
    """Effective sample size of the ratios over the number of tokens, (sum r)^2 / (n sum r^2), in (0, 1]."""
    entropy: float
    """Of the student at the trained positions, nats."""
    logprob: float
    """Of the trained tokens under the current student."""
    advantage_mean: float
    grad_norm: float
    """Before clipping."""
    lr: float
    step_s: float
    offline: OfflineMetrics | None = None
    """None: nothing was mixed into the batch."""
    value: ValueMetrics | None = None
    """None: no value function is trained."""
    updates: UpdatesMetrics | None = None
    """None: one update per batch."""

    @classmethod
    def of(
        cls,
        sums: StepSums,
        *,
        lr: float,
        grad_norm: float,
        items: int,
        items_idle: int,
        items_unrewarded: int,
        microbatches: int,
        input_tokens: int,
        step_s: float,
        offline: OfflineMetrics | None = None,
        offline_loss: float = 0.0,
        value: ValueMetrics | None = None,
        updates: UpdatesMetrics | None = None,
    ) -> StepMetrics:
        """Means from sums; `sums.tokens` >= 1."""
        n = sums.tokens
        return cls(
            tokens=n,
            tokens_unscored=n - int(sums.scored),
            input_tokens=input_tokens,
            items=items,
            items_idle=items_idle,
            items_unrewarded=items_unrewarded,
            microbatches=microbatches,
            loss=sums.loss + offline_loss,
            divergence=sums.divergence / sums.scored if sums.scored else None,
            reverse_kl=sums.reverse_kl / sums.scored if sums.scored else None,
            ratio_mean=sums.ratio / n,
            ratio_max=sums.ratio_max,
            truncated_fraction=sums.cut / n,
            weight_mean=sums.weight / n,
            ess=sums.ratio**2 / (n * sums.ratio_squared) if sums.ratio_squared else 0.0,
            entropy=sums.entropy / n,
            logprob=sums.logprob / n,
            advantage_mean=sums.advantage / n,
            grad_norm=grad_norm,
            lr=lr,
            step_s=step_s,
            offline=offline,
            value=value,
            updates=updates,
        )

    def as_dict(self) -> dict[str, float]:
        """For `MetricsWriter.step` and JSON; `offline` as `offline_<name>` and so on. Without what is None."""
        figures = asdict(self)
        for group in ("offline", "value", "updates"):
            figures |= {f"{group}_{name}": value for name, value in (figures.pop(group) or {}).items()}
        return {name: value for name, value in figures.items() if value is not None}
