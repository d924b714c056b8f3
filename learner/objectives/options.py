"""Options of each member of an objective, as sections of the configuration. No torch here.

One class may serve several names. The options of a package's member are a subclass of its group's base
(`learner.objectives.registry`): `Sampled`, `Distributions`, `TokenAdvantage`, or `Member` for weights, rejections and
advantages of rollouts."""

# Why it is so: docs/decisions/objective-section.md

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from stillhouse.protocol.settings import Member, NonNegativeFloat, PositiveFloat, PositiveInt, Settings, Share

KlStudent: TypeAlias = Literal["current", "behaviour"]
Baseline: TypeAlias = Literal["none", "expected_cost"]


class SampledDivergence(Member, frozen=True, kw_only=True):
    """A cost of sampled tokens."""

    name: str = "k1"
    kl_student: KlStudent = "current"
    """Log-prob of the student inside the cost. current: recomputed in this step. behaviour: reported when sampled."""


class LogRatio(SampledDivergence, frozen=True, kw_only=True):
    """The cost s - q."""

    baseline: Baseline = "none"
    """Subtracted from the cost of each token. expected_cost: the mean cost over all tokens that the student could have
    sampled there, which is the reverse KL (vOPD). The expected gradient stays the same; its variance usually falls.
    Needs teacher.top_k, or teacher.payload = hidden. none: nothing."""


class Null(SampledDivergence, frozen=True, kw_only=True):
    """A cost of unlikely tokens that no teacher has a part in: the control of a distillation."""

    name: str = "null"
    threshold: PositiveFloat = 4.2
    """Tokens whose log-prob under the student is below minus this, in nats, have the cost. About a fifth of the tokens
    of a small pre-trained model are below -4.2; the published control takes the least likely fifth."""
    cost: PositiveFloat = 0.5
    """Cost of such a token, which is minus its advantage. Others have none."""


class Clip(Member, frozen=True, kw_only=True):
    """Costs limited in both directions."""

    name: str = "clip"
    limit: PositiveFloat = 5.0
    """Largest cost, and minus the smallest one, in nats."""


class Distributions(Member, frozen=True, kw_only=True):
    """A divergence between distributions."""

    name: str = "reverse_kl"
    context_cap: NonNegativeFloat = 0.0
    """Cap on the weight of a token's context: the product of r over the rollout's earlier trained tokens, at most this.
    The ratio of the sampled token itself cannot correct the context. 0: contexts are not weighted."""
    temperature: PositiveFloat = 1.0
    """Temperature at which the two distributions are compared: softmax(z / temperature) on both sides. Other than 1
    only with teacher.payload = hidden, because a top-k set does not tell what its tail is at another temperature. The
    temperature that tokens are sampled at is tasks.temperature."""


class Mixed(Distributions, frozen=True, kw_only=True):
    name: str = "mixed"
    weight: Share = 0.5
    """Weight of the forward KL; the reverse KL gets the rest."""


class Jsd(Distributions, frozen=True, kw_only=True):
    name: str = "jsd"
    beta: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """Weight of the teacher in the mixture, in (0, 1). Near the ends the divergence vanishes; use forward_kl or
    reverse_kl there."""


class MultiSample(Distributions, frozen=True, kw_only=True):
    name: str = "multi_sample"
    samples: PositiveInt = 4
    """Tokens drawn from the student at each position."""


class Capped(Member, frozen=True, kw_only=True):
    """Weights min(r, cap)."""

    name: str = "truncated"
    cap: PositiveFloat = 2.0
    """Largest weight. A fresh token has r = 1; with a few steps of staleness, 2 cuts only the tail. A cap nearer to 1
    biases the gradient of the reverse KL more."""


class RatioBounds(Member, frozen=True, kw_only=True):
    """A range [low, high] for r."""

    name: str = "token"
    low: NonNegativeFloat = 0.5
    """Lower bound of r, at most 1; 0: none. Other trainers take the distance from 1 (eps): their 0.2 is 0.8 here."""
    high: PositiveFloat = 2.0
    """Upper bound of r, at least 1; an eps of 0.28 is 1.28 here."""

    def __post_init__(self) -> None:
        """Raises ValueError for bounds on one side of 1: tokens of the current policy, with r = 1, would have no
        gradient."""
        super().__post_init__()
        low, high = self.low, self.high
        got = f"low = {low:g}, high = {high:g}: expected low <= 1 <= high"
        if high < 1.0:
            own_low = low if low == type(self)().low else 1.0 - low
            raise ValueError(
                f"{got}, the bounds of the ratio itself. If these are eps_low and eps_high, the distances from 1 that "
                f"verl, TRL and slime take, use low = {own_low:g} and high = {1.0 + high:g}"
            )
        if low > 1.0:
            raise ValueError(f"{got}; tokens of the present policy have the ratio 1")
        if not low < high:
            raise ValueError(f"low must be below high, got {low} and {high}")


class Cispo(RatioBounds, frozen=True, kw_only=True):
    name: str = "cispo"
    low: NonNegativeFloat = 0.0
    """Smallest weight, at most 1. 0: no lower bound, as published."""
    high: PositiveFloat = 5.0
    """Largest weight, at least 1 (published: ScaleRL, 4 to 8). Where others take eps, it is 1 + eps here."""


class Clipped(RatioBounds, frozen=True, kw_only=True):
    """Weights of clipped surrogates."""

    name: str = "ppo"
    low: NonNegativeFloat = 0.8
    """Lower bound of r, at most 1; 0: none. Other trainers take the distance from 1 (eps): their 0.2 is 0.8 here."""
    high: PositiveFloat = 1.2
    """Upper bound of r, at least 1; an eps of 0.28 is 1.28 here."""
    dual: NonNegativeFloat = 0.0
    """Dual clip: where A < 0, tokens with r above this are not trained (published: 3). 0: off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0.0 < self.dual <= self.high:
            raise ValueError(f"dual: got {self.dual}, expected 0 (off) or above high = {self.high}")


class Gspo(Clipped, frozen=True, kw_only=True):
    name: str = "gspo"
    low: NonNegativeFloat = 0.9997
    """Lower bound of the geometric mean of r over a rollout, at most 1 (published: 1 - 3e-4)."""
    high: PositiveFloat = 1.0004
    """Upper bound, at least 1 (published: 1 + 4e-4)."""


class Decoupled(Clipped, frozen=True, kw_only=True):
    name: str = "decoupled"
    cap: PositiveFloat = 2.0
    """Largest weight of the part that corrects for the policy that sampled."""


class Grpo(Member, frozen=True, kw_only=True):
    name: str = "grpo"
    std: bool = True
    """Divide by the group's standard deviation."""


class Overlong(Member, frozen=True, kw_only=True):
    name: str = "overlong"
    margin: Annotated[float, Meta(gt=0, le=1)] = 0.2
    """Share of tasks.max_new_tokens, at its end, over which the penalty falls from 0 to -1 (DAPO: 4,096 of 20,480
    tokens)."""
    weight: PositiveFloat = 1.0
    """Factor of the penalty."""


class GroupLength(Member, frozen=True, kw_only=True):
    name: str = "group_length"
    weight: PositiveFloat = 1.0
    """Factor of the term, which is between -0.5 and 0.5."""


class ValueConfig(Settings, frozen=True, kw_only=True):
    """A learned value function: one linear layer on the student's last hidden state, trained beside it."""

    coef: PositiveFloat = 0.5
    """Weight of the value loss. The value head has its own optimizer, so this matters only with through_backbone."""
    lr: PositiveFloat = 1e-4
    """Peak learning rate of the value head, with the student's warm-up and schedule. One update moves a value by up to
    about lr * hidden size."""
    clip: NonNegativeFloat = 0.0
    """Largest useful change of a value within one batch (Schulman et al. 2017). It takes effect from the second of
    several updates_per_batch. 0: off."""
    through_backbone: bool = False
    """Let the value loss train the student's layers too. Off: it trains only the value head."""


class TurnAdvantage(Member, frozen=True, kw_only=True):
    """Advantages of turns of the student, from the rewards of each turn."""

    name: str = "turn_returns"


class TurnReturns(TurnAdvantage, frozen=True, kw_only=True):
    discount: Share = 1.0
    """Discount per turn (gamma). 1: the sum of the rewards from the turn on."""
    std: bool = True
    """Divide by the standard deviation over the turns of the group."""


class TokenAdvantage(Member, frozen=True, kw_only=True):
    """Advantages of single tokens, which need a value function."""

    name: str = "gae"
    discount: Share = 1.0
    """Discount per token (gamma)."""
    decay: Share = 0.95
    """Lambda of GAE. 1: reward minus value, unbiased. 0: the value of the next token replaces all later rewards."""
    value: ValueConfig = msgspec.field(default_factory=ValueConfig)
    """The value function."""
