"""What each member of an objective reads, as sections of the configuration. No torch here.

A class may serve several names. A package's own member brings a subclass of its group's base
(`learner.objectives.registry`), which is `Sampled`, `Distributions`, `TokenAdvantage` or, for weights and advantages of
rollouts, `Member` itself.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from protocol.settings import Member, NonNegativeFloat, PositiveFloat, PositiveInt, Settings, Share

KlStudent: TypeAlias = Literal["current", "behaviour"]


class Sampled(Member, frozen=True, kw_only=True):
    """A cost of sampled tokens."""

    name: str = "k1"
    kl_student: KlStudent = "current"
    """The student's log-prob inside the cost: `current` = recomputed in this step, `behaviour` = as when sampled."""


class Distributions(Member, frozen=True, kw_only=True):
    """A divergence between distributions."""

    name: str = "reverse_kl"
    context_cap: NonNegativeFloat = 0.0
    """Weight of a context, which no ratio of the sampled token can correct: the product of r over the rollout's trained
    tokens before it, at most this. 0: each context counts as the student came upon it."""


class Mixed(Distributions, frozen=True, kw_only=True):
    name: str = "mixed"
    weight: Share = 0.5
    """Weight of the forward KL; the reverse KL gets the rest."""


class Jsd(Distributions, frozen=True, kw_only=True):
    name: str = "jsd"
    beta: Annotated[float, Meta(gt=0, lt=1)] = 0.5
    """The teacher's weight in the mixture that both are compared with. At 0 and 1 the divergence is 0: use forward_kl
    or reverse_kl there."""


class MultiSample(Distributions, frozen=True, kw_only=True):
    name: str = "multi_sample"
    samples: PositiveInt = 4
    """Tokens drawn from the student at each position."""


class Capped(Member, frozen=True, kw_only=True):
    """Weights min(r, cap)."""

    name: str = "truncated"
    cap: PositiveFloat = 2.0
    """Largest weight. A fresh token has r = 1, so 2 leaves room for all but the tail of what a few steps of staleness
    do, and bounds what one token can weigh. Lowering it towards 1 biases the reverse KL most."""


class Bounded(Member, frozen=True, kw_only=True):
    """Weights that depend on whether r lies inside [low, high]."""

    name: str = "masked"
    low: PositiveFloat = 0.5
    """Lower bound of r, at most 1. This is not eps, the distance from 1 that other trainers take: their 0.2 is 0.8
    here."""
    high: PositiveFloat = 2.0
    """Upper bound of r, at least 1; an eps of 0.28 is 1.28 here."""

    def __post_init__(self) -> None:
        """Bounds on one side of 1 would leave tokens of the present policy, where r = 1, without any gradient."""
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


class Clipped(Bounded, frozen=True, kw_only=True):
    """Weights of clipped surrogates."""

    name: str = "ppo"
    low: PositiveFloat = 0.8
    """Lower bound of r, at most 1. This is not eps, the distance from 1 that other trainers take: their 0.2 is 0.8
    here."""
    high: PositiveFloat = 1.2
    """Upper bound of r, at least 1; an eps of 0.28 is 1.28 here."""
    dual: NonNegativeFloat = 0.0
    """Dual clip: where A < 0, r above this gives nothing (published: 3). 0 = off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0.0 < self.dual <= self.high:
            raise ValueError(f"dual: got {self.dual}, expected 0 (off) or above high = {self.high}")


class Gspo(Clipped, frozen=True, kw_only=True):
    name: str = "gspo"
    low: PositiveFloat = 0.9997
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


class ValueConfig(Settings, frozen=True, kw_only=True):
    """A learned value function: one linear layer on the student's last hidden state, trained beside it."""

    coef: PositiveFloat = 0.5
    """Weight of the value loss. The head has an optimizer of its own, so this matters only where through_backbone lets
    the loss into the student's gradient too."""
    lr: PositiveFloat = 1e-4
    """Highest learning rate of the head; warm-up and schedule are the student's. One update moves a value by up to
    about lr * hidden size."""
    clip: NonNegativeFloat = 0.0
    """A value that has moved by more than this since the batch came is trained no further towards the return (Schulman
    et al. 2017). Acts from the second of several updates_per_batch on. 0 = off."""
    through_backbone: bool = False
    """Let the value loss train the student's other layers as well. Without it only the head learns from it."""


class TokenAdvantage(Member, frozen=True, kw_only=True):
    """Advantages of single tokens, which need a value function."""

    name: str = "gae"
    discount: Share = 1.0
    """Discount of what is paid one token later (gamma)."""
    decay: Share = 0.95
    """GAE's lambda. 1: reward minus value, without bias; 0: the next token's value in place of all that follows."""
    value: ValueConfig = msgspec.field(default_factory=ValueConfig)
    """The value function."""
