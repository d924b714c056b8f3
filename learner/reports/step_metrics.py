"""Figures of an optimizer step: sums over trained tokens, added up over microbatches, then divided. No mean of means.
No torch: sums arrive here as numbers.

A mean of the step is declared as a field of StepMetrics, and its sum is made under the field's name by
learner.step.forward: these are the only two places that a new one touches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Final

from stillhouse.learner.reports.figure import Figure, Reduction

AUXILIARY: Final = (
    *("loss", "scored", "scores", "ratio_squared", "value_error", "ratio_max"),
    *("routers_given", "routed_inputs"),
)
"""Sums that are no mean's. loss: already divided by the divisor of the batch. scored: tokens with at least one teacher.
scores: pairs of a token and a teacher that scores it. value_error: `learner.step.critic.value_loss`, without its
coefficient; 0 without a value function. ratio_max is a maximum. routers_given: pairs of an input token and a layer
whose router was given its choice; routed_inputs: input tokens, if routers are given anything."""


def figure(
    meaning: str,
    *,
    unit: str = "",
    over: str = "",
    reduction: Reduction = "mean",
    chart: tuple[str, str] | None = None,
    result: bool = False,
    prometheus: str = "",
    default: Any = MISSING,
) -> Any:
    """A field of StepMetrics. `over`: what the sum of its name is divided by (None where that is 0)."""
    declared = Figure("", meaning, unit, reduction, over, chart, "", result, prometheus)
    return field(default=default, metadata={"figure": declared})


@dataclass(frozen=True, kw_only=True)
class StepSums:
    """Sums over trained tokens of one microbatch, or of several."""

    tokens: int
    sums: dict[str, float]
    """By the names in SUMS."""
    hidden_scores: int = 0
    """Pairs of a token and a teacher that sent its hidden state."""
    set_scores: int = 0
    """Those with a top-k set that the objective uses."""
    pools: dict[str, tuple[float, int]] = field(default_factory=dict[str, tuple[float, int]])
    """Pool -> (its part of `divergence`, tokens that it scored)."""
    heads: dict[str, tuple[float, float, float]] = field(default_factory=dict[str, tuple[float, float, float]])
    """Teacher with hidden states and tag -> (its part of `hidden_error`, sum of s - q, number of terms)."""

    def __getitem__(self, name: str) -> float:
        return self.sums[name]

    @classmethod
    def zero(cls, **known: float) -> StepSums:
        """`known`: of no tokens, or of `tokens` whose other sums are 0."""
        tokens = int(known.pop("tokens", 0))
        return cls(tokens=tokens, sums=dict.fromkeys(SUMS, 0.0) | known)

    def plus(self, other: StepSums) -> StepSums:
        sums = {name: self[name] + other[name] for name in SUMS}
        sums["ratio_max"] = max(self["ratio_max"], other["ratio_max"])
        return StepSums(
            tokens=self.tokens + other.tokens,
            sums=sums,
            hidden_scores=self.hidden_scores + other.hidden_scores,
            set_scores=self.set_scores + other.set_scores,
            pools=_added(self.pools, other.pools),
            heads=_added(self.heads, other.heads),
        )

    def over(self, count: str) -> float:
        """By what a sum is divided."""
        return self.sums[count] if count in self.sums else getattr(self, count)


def _added(one: Mapping[str, tuple[Any, ...]], other: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    both = dict(one)
    for name, numbers in other.items():
        both[name] = tuple(map(sum, zip(both[name], numbers, strict=True))) if name in both else numbers
    return both


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
        return cls(n, items, sums["logprob"] / n, sums["reverse_kl"] / n, sums["weight_mean"] / n)


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
        shift = (last["logprob"] - first["logprob"]) / n
        return cls(made, asked - made, last["ratio_max"], last["truncated_fraction"] / n, shift, grad_norm)


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Figures of one optimizer step, at its first update. Means are over the trained tokens that the student wrote,
    unless said otherwise; logs are natural. A figure that could not be computed is None."""

    loss: float = figure("the loss", prometheus="stillhouse_loss")
    divergence: float | None = figure(
        "the divergence that the loss uses: summed over a token's teachers, mean over the scored tokens",
        unit="nats",
        over="scored",
    )
    reverse_kl: float | None = figure(
        "s - q, mean over the scored tokens; reported for every choice of divergence",
        unit="nats",
        over="scored",
        chart=("Learning", "Reverse KL, nats"),
        result=True,
        prometheus="stillhouse_reverse_kl_nats",
    )
    hidden_error: float | None = figure(
        "with `teacher.payload = hidden`: mean difference between q as the learner computes it from the hidden "
        "states and q as the teacher sent it, in nats; the rounding of bfloat16. A step at which it is above 0.5 "
        "is not made",
        unit="nats",
        over="hidden_scores",
    )
    excess_share: float | None = figure(
        "share of the scores (a token and one of its teachers) at which the sampled token is more than twice as "
        "likely for the student as for the teacher; with `k1` these are pushed down",
        unit="share",
        over="scores",
    )
    deficit_share: float | None = figure(
        "share of the scores at which the sampled token is less than half as likely for the student as for the "
        "teacher; with `k1` these are pushed up",
        unit="share",
        over="scores",
    )
    set_teacher_mass: float | None = figure(
        "if the objective reads top-k sets: mean probability that the teacher gives to the set it sent. What is "
        "missing to 1 is in the tail",
        unit="share",
        over="set_scores",
    )
    set_student_mass: float | None = figure(
        "if the objective reads top-k sets: mean probability that the student gives to the set. Far below the "
        "teacher's, much of the student's probability is compared as one bucket: raise `teacher.top_k`, or use "
        "`teacher.top_k_of = student`",
        unit="share",
        over="set_scores",
    )
    set_overlap: float | None = figure(
        "if the objective reads top-k sets: mean share of the student's likeliest tokens, as many as the set has "
        "but at most 16, that are in the set",
        unit="share",
        over="set_scores",
    )
    entropy: float = figure(
        "mean entropy of the student at the trained positions",
        unit="nats",
        over="tokens",
        chart=("Learning", "Entropy, nats"),
    )
    logprob: float = figure("mean of s", unit="nats", over="tokens")
    advantage_mean: float = figure("mean advantage of the trained tokens", over="tokens")
    length_penalty: float | None = figure(
        "mean term that `objective.length_penalty` adds to rewards; absent without it", default=None
    )
    ratio_mean: float = figure(
        "mean of r. It is 1 in expectation; a drift means that an engine's log-probs differ from the learner's",
        over="tokens",
        chart=("Staleness", "Importance ratio, mean"),
    )
    ratio_max: float = figure("maximum of r", reduction="max")
    truncated_fraction: float = figure(
        "share of tokens whose importance weight was capped or clipped",
        unit="share",
        over="tokens",
        chart=("Staleness", "Capped or clipped tokens, and rejected ones, share"),
    )
    rejected_fraction: float = figure(
        "share of tokens that `objective.rejection` left out of the loss; these are not in `train/truncated_fraction`",
        unit="share",
        over="tokens",
        chart=("Staleness", "Capped or clipped tokens, and rejected ones, share"),
    )
    weight_mean: float = figure("mean importance weight", over="tokens")
    ess: float = figure(
        "effective sample size of r, divided by the number of tokens",
        unit="share",
        chart=("Staleness", "Effective sample size, share"),
    )
    tokens: int = figure("tokens trained", unit="tokens", reduction="sum")
    tokens_unscored: int = figure("trained tokens that no teacher scored", unit="tokens", reduction="sum")
    input_tokens: int = figure("tokens read, including context", unit="tokens", reduction="sum")
    microbatches: int = figure("number of packed forward passes", reduction="sum")
    items: int = figure("rollouts (or pieces of them) in the batch", reduction="sum")
    items_idle: int = figure("rollouts (or pieces of them) without a token to train", reduction="sum")
    items_unrewarded: int = figure("rollouts (or pieces of them) without a reward", reduction="sum")
    routers_differ: float | None = figure(
        "with `learner.routing_replay`: share of the routers (a layer, at an input token) whose own choice of experts "
        "is another than the one of the engine that they are given",
        unit="share",
        over="routers_given",
        chart=("Staleness", "Routers that disagree with the engine, share"),
    )
    routers_free_trained: float | None = figure(
        "with `learner.routing_replay`: share of the input tokens whose routers choose freely, because the engine did "
        "not report their experts, and that predict a token to train",
        unit="share",
        over="routed_inputs",
    )
    routers_free_context: float | None = figure(
        "the same for input tokens that predict none: prompts, text of environments, tokens trained before",
        unit="share",
        over="routed_inputs",
    )
    grad_norm: float = figure("gradient norm before clipping", reduction="last", chart=("Learning", "Gradient norm"))
    lr: float = figure("learning rate", reduction="last")
    step_s: float = figure("seconds spent in the model", unit="seconds", reduction="sum")
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
        means: dict[str, float | None] = {}
        for name, over in MEANS.items():
            n = sums.over(over)
            means[name] = sums[name] / n if n else None
        return cls(
            tokens=sums.tokens,
            tokens_unscored=sums.tokens - int(sums["scored"]),
            loss=sums["loss"] + offline_loss,
            ratio_max=sums["ratio_max"],
            ess=sums["ratio_mean"] ** 2 / (sums.tokens * sums["ratio_squared"]) if sums["ratio_squared"] else 0.0,
            pools={pool: divergence / n for pool, (divergence, n) in sums.pools.items() if n},
            **means,  # pyright: ignore[reportArgumentType]
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


_DECLARED: Final[dict[str, Figure]] = {
    one.name: one.metadata["figure"] for one in fields(StepMetrics) if "figure" in one.metadata
}
MEANS: Final = {name: declared.over for name, declared in _DECLARED.items() if declared.over}
"""Name -> what its sum is divided by."""
SUMS: Final = (*MEANS, *AUXILIARY)
"""Names of the sums, in the order in which a step reads them from the device."""
STEP_FIGURES: Final = tuple(declared._replace(tag=f"train/{name}") for name, declared in _DECLARED.items())
