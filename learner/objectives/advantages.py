"""Advantages from rewards, per rollout or per token, for every trained token of a batch.

They are computed once per batch, before it is divided into microbatches, so packing cannot change them. Whitening
happens here, BEFORE any divergence is subtracted: the coefficient of a divergence keeps its meaning whatever the spread
of the rewards (see `learner.objectives.losses.token_loss`). A rollout without a reward has the advantage 0 and
is in no mean.

Advantages of single tokens need a value function. The sampled tokens of a path follow one another as if the
environment's tokens were not there: a state is the context of a sampled token. A turn's reward is paid at its last
sampled token; a reward that belongs to no turn, at the end of each path, as all paths of a rollout share it.

Legend: R rollouts of the batch, N trained tokens of it in the order of the rollouts, L tokens of the longest rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from stillhouse.learner.batch import BatchError
from stillhouse.learner.objectives.importance import sums_before
from stillhouse.learner.objectives.options import Grpo, TokenAdvantage, TurnAdvantage, TurnReturns
from stillhouse.learner.objectives.registry import ADVANTAGE
from stillhouse.protocol.settings import Member

EPSILON = 1e-6
"""Added to standard deviations."""
MAX_REWARD = 1e12
"""The buffer's range (buffer.reward_limit) is narrower; this is for what comes from elsewhere."""
SPREADS = 30.0
"""Before something is divided by a standard deviation, a member that differs from the mean of the others by more than
this many of their standard deviations, and by more than 1, is taken to differ by that much: a single one would
otherwise leave the others no signal. It still has the largest advantage."""


@dataclass(frozen=True)
class Rewards:
    """Rewards of a batch, and how its rollouts are grouped."""

    reward_R: Tensor
    """float64; any finite number where not `rewarded_R`."""
    rewarded_R: Tensor
    """bool."""
    group_R: Tensor
    """int64 in [0, R): rollouts of one prompt have the same number."""
    tokens_R: Tensor
    """int64: trained tokens of each rollout."""
    lengths_R: Tensor | None = None
    """int64: tokens of each rollout that the student wrote, trained or not; None if no length penalty reads them."""
    turns: Callable[[], TurnRewards] | None = None
    """The rewards by turn, for advantages of turns and tokens; None if none reads them."""
    parts: tuple[str, ...] = ()
    """Rollouts that continue in a later batch, so that their reward is not known yet."""
    rollouts: tuple[str, ...] = ()
    """Their ids, for messages."""

    def __post_init__(self) -> None:
        """Raises BatchError for a reward that no statistic could hold."""
        for r in torch.nonzero(self.rewarded_R & ~(self.reward_R.abs() <= MAX_REWARD)).flatten().tolist():
            name = self.rollouts[r] if self.rollouts else str(r)
            raise BatchError(
                f"rollout {name} has the reward {float(self.reward_R[r]):g}, expected a number within "
                f"+-{MAX_REWARD:g} (buffer.reward_limit)",
                (name,),
            )

    def refuse_parts(self, name: str, key: str = "advantage") -> None:
        """Raises BatchError if there are parts: half a rollout has no reward, and half a group no mean."""
        if self.parts:
            raise BatchError(
                f"{key} = {name!r} needs whole rollouts, got parts of {list(self.parts)[:8]}; "
                "set buffer.release = 'rollout'",
                self.parts,
            )


AdvantageFn: TypeAlias = Callable[[Rewards, Any], Tensor]
"""(rewards, the member's own options: `learner.objectives.options`) -> advantage_R float64, 0 where not rewarded."""


@dataclass(frozen=True)
class TurnRewards:
    """Rewards of a batch by turn of the student (`learner.turns`), of all its rollouts. V turns: those of a
    rollout stand together, in the order of its row, also those without a token to train."""

    reward_V: Tensor
    """float64; their sum over a rollout is its reward. Any finite number where not `rewarded_V`."""
    rewarded_V: Tensor
    """bool: the rollout has a reward."""
    rollout_V: Tensor
    """int64, ascending."""
    group_V: Tensor
    """int64: rollouts of one prompt have the same number."""
    turn_N: Tensor
    """int64: turn of each trained token."""
    paid_N: Tensor
    """float64: reward that is paid at each trained token (`learner.turns.paid_at`)."""
    before_N: Tensor
    """int64: the last trained token before each on its path; -1: none."""


TurnAdvantageFn: TypeAlias = Callable[[TurnRewards, Any], Tensor]
"""(rewards, the member's own options, a `TurnAdvantage`) -> advantage_V float64, 0 where not rewarded."""


def turn_returns(rewards: TurnRewards, options: TurnReturns) -> Tensor:
    """Return from each turn on, G_v = r_v + discount * G_{v+1}, minus the mean over all turns of the group, divided by
    their standard deviation (n - 1) where options.std: normalised discounted returns as advantages, as in GTPO
    (arXiv 2511.14846). The turns of a rollout follow one another in the order of its row, also on branches."""
    return_V = rewards.reward_V.clone()
    for v in range(len(return_V) - 2, -1, -1):
        if rewards.rollout_V[v] == rewards.rollout_V[v + 1]:
            return_V[v] += options.discount * return_V[v + 1]
    judged_V = rewards.rewarded_V.double()
    if options.std:
        return_V = _bounded(return_V, judged_V, rewards.group_V)
    n_groups = int(rewards.group_V.max()) + 1 if len(return_V) else 0

    def group_sum(value_V: Tensor) -> Tensor:
        return torch.zeros(n_groups, dtype=torch.float64).index_add_(0, rewards.group_V, value_V)[rewards.group_V]

    n_V = group_sum(judged_V).clamp(min=1)
    centred_V = torch.where(rewards.rewarded_V, return_V - group_sum(judged_V * return_V) / n_V, 0.0)
    if not options.std:
        return centred_V
    return centred_V / ((group_sum(centred_V.square()) / (n_V - 1).clamp(min=1)).sqrt() + EPSILON)


def no_advantage(rewards: Rewards, options: Member) -> Tensor:
    """0 everywhere: rewards are not trained on."""
    return torch.zeros_like(rewards.reward_R)


def grpo(rewards: Rewards, options: Grpo) -> Tensor:
    """reward - mean of its group, divided by the group's standard deviation (n - 1) where options.std (GRPO; Shao et
    al. 2024). Without: Dr. GRPO (Liu et al. 2025), which does not favour prompts that are nearly always, or never,
    solved. A group with one judged rollout gives 0."""
    rewards.refuse_parts("grpo")
    if not options.std:
        return _centred(rewards)
    rewards = _within_groups(rewards)
    centred_R = _centred(rewards)
    n_R = _group_sum(rewards.rewarded_R.double(), rewards)
    variance_R = _group_sum(centred_R.square(), rewards) / (n_R - 1).clamp(min=1)
    return centred_R / (variance_R.sqrt() + EPSILON)


def reinforce_pp(rewards: Rewards, options: Member) -> Tensor:
    """reward, whitened over the trained tokens of the whole batch (REINFORCE++; Hu et al. 2025)."""
    rewards.refuse_parts("reinforce_pp")
    return _whitened(torch.where(rewards.rewarded_R, rewards.reward_R, 0.0), rewards)


def reinforce_pp_baseline(rewards: Rewards, options: Member) -> Tensor:
    """reward - mean of its group (the n-sample baseline), then whitened over the trained tokens of the whole batch."""
    rewards.refuse_parts("reinforce_pp_baseline")
    return _whitened(_centred(_within_groups(rewards)), rewards)


def _group_sum(value_R: Tensor, rewards: Rewards) -> Tensor:
    """Sum over the judged rollouts of a group, at each of its rollouts."""
    judged_R = torch.where(rewards.rewarded_R, value_R, 0.0)
    return torch.zeros_like(judged_R).index_add_(0, rewards.group_R, judged_R)[rewards.group_R]


def _centred(rewards: Rewards) -> Tensor:
    n_R = _group_sum(rewards.rewarded_R.double(), rewards).clamp(min=1)
    mean_R = _group_sum(rewards.reward_R, rewards) / n_R
    return torch.where(rewards.rewarded_R, rewards.reward_R - mean_R, 0.0)


def _within_groups(rewards: Rewards) -> Rewards:
    return replace(rewards, reward_R=_bounded(rewards.reward_R, rewards.rewarded_R.double(), rewards.group_R))


def _bounded(value_V: Tensor, weight_V: Tensor, group_V: Tensor) -> Tensor:
    """The values, with the one that is furthest from its group's mean brought nearer (SPREADS). float64. A group whose
    others are all alike stays as it is."""
    n_groups = int(group_V.max()) + 1 if len(group_V) else 0

    def mean(x_V: Tensor, weight_V: Tensor) -> tuple[Tensor, Tensor]:
        sums = torch.zeros((2, n_groups), dtype=torch.float64).index_add_(
            1, group_V, torch.stack([weight_V * x_V, weight_V])
        )
        return (sums[0] / sums[1].clamp(min=EPSILON))[group_V], sums[1][group_V]

    distance_V = torch.where(weight_V > 0, (value_V - mean(value_V, weight_V)[0]).abs(), 0.0)
    furthest_V = torch.zeros(n_groups, dtype=torch.float64).scatter_reduce_(0, group_V, distance_V, "amax")[group_V]
    others_V = torch.where(distance_V < furthest_V, weight_V, 0.0)
    centre_V, weight_of_others_V = mean(value_V, others_V)
    spread_V = mean((value_V - centre_V).square(), others_V)[0].sqrt()
    most_V = torch.where((weight_of_others_V > 0) & (spread_V > 0), (SPREADS * spread_V).clamp(min=1.0), torch.inf)
    return torch.minimum(torch.maximum(value_V, centre_V - most_V), centre_V + most_V)


def _whitened(value_R: Tensor, rewards: Rewards) -> Tensor:
    tokens_R = torch.where(rewards.rewarded_R, rewards.tokens_R, 0).double()
    value_R = _bounded(value_R, tokens_R, torch.zeros_like(rewards.group_R))
    n = tokens_R.sum().clamp(min=1)
    mean = (tokens_R * value_R).sum() / n
    std = ((tokens_R * (value_R - mean).square()).sum() / n).sqrt()
    return torch.where(rewards.rewarded_R, (value_R - mean) / (std + EPSILON), 0.0)


def gae(
    reward_N: Tensor, value_N: Tensor, before_N: Tensor, *, discount: float = 1.0, decay: float = 0.95
) -> tuple[Tensor, Tensor]:
    """(advantage [N], return [N]) of generalised advantage estimation (Schulman et al. 2016), without gradient.

        delta_t = reward_t + discount * value_{t+1} - value_t          behind the last token of a path: 0
        A_t     = delta_t + discount * decay * A_{t+1}                 return_t = A_t + value_t

    `before_N` int64: the token before each on its path, -1 where there is none. Where several tokens follow one, value
    and A at t + 1 are their means: each branch is one way on. reward_N: reward paid at a token. The loop is over the
    length of the longest path, for all at a time."""
    n_tokens = len(reward_N)
    before_N = torch.where(before_N < 0, n_tokens, before_N)
    value_N = value_N.detach().to(reward_N.dtype)
    advantage_N, following_N = (
        torch.zeros_like(reward_N),
        reward_N.new_zeros(n_tokens + 1).index_add_(0, before_N, torch.ones_like(reward_N)),
    )
    next_2N = reward_N.new_zeros(2, n_tokens + 1)  # sums of what follows: values, advantages
    for own in _from_the_ends(before_N):
        next_value, next_advantage = next_2N[:, own] / following_N[own].clamp(min=1)
        delta = reward_N[own].detach() + discount * next_value - value_N[own]
        advantage_N[own] = delta + discount * decay * next_advantage
        next_2N.index_add_(1, before_N[own], torch.stack([value_N[own], advantage_N[own]]))
    return advantage_N, advantage_N + value_N


def whitened(advantage_N: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 over all tokens. It must get the whole batch, before any divergence."""
    centred_N = advantage_N - advantage_N.mean()
    return centred_N / (centred_N.square().mean().sqrt() + EPSILON)


def _from_the_ends(before_N: Tensor) -> list[Tensor]:
    """The tokens by their number of tokens before, most first."""
    depth_N = sums_before(torch.ones_like(before_N), before_N)
    order_N = torch.argsort(depth_N, descending=True, stable=True)
    return list(order_N.split(torch.bincount(depth_N).flip(0).tolist())) if len(before_N) else []


@dataclass(frozen=True)
class TokenRewards:
    """Tokens of the whole batch, except those of rollouts without a reward."""

    reward_N: Tensor
    """float64: reward paid at the token."""
    value_N: Tensor
    """float64: value of the token's context, before the batch is trained."""
    sequence_N: Tensor
    """int64 in [0, R)."""
    n_sequences: int
    """R."""
    before_N: Tensor
    """int64: the token before each on its path (rollouts may branch); -1: none."""


class TokenAdvantages(NamedTuple):
    advantage_N: Tensor
    """The advantage to train with; a member whitens it if it should be white."""
    return_N: Tensor
    """Target of the value function."""


TokenAdvantageFn: TypeAlias = Callable[[TokenRewards, Any], TokenAdvantages]
"""(rewards, the member's own options, a `TokenAdvantage`) -> TokenAdvantages. float64 in, float64 out, no gradient."""


def gae_whitened(rewards: TokenRewards, options: TokenAdvantage) -> TokenAdvantages:
    """`learner.objectives.advantages.gae`, whitened over all tokens of the judged rollouts (PPO)."""
    advantage_N, return_N = gae(
        rewards.reward_N, rewards.value_N, rewards.before_N, discount=options.discount, decay=options.decay
    )
    return TokenAdvantages(whitened(advantage_N) if len(advantage_N) else advantage_N, return_N)


@dataclass(frozen=True)
class ValueTargets:
    """Training targets of a value function. On the CPU."""

    old_N: Tensor
    """float64: its values before the batch is trained."""
    return_N: Tensor
    """float64; any finite number where not judged."""
    judged_N: Tensor
    """bool: the token's rollout has a reward. Other tokens train no value."""

    def at(self, places: slice | Tensor) -> ValueTargets:
        """The targets of some tokens."""
        return ValueTargets(self.old_N[places], self.return_N[places], self.judged_N[places])

    def followed_by(self, n_tokens: int) -> ValueTargets:
        """The targets, and `n_tokens` more tokens that train no value."""
        old_N, return_N = (torch.cat([x, x.new_zeros(n_tokens)]) for x in (self.old_N, self.return_N))
        return ValueTargets(old_N, return_N, torch.cat([self.judged_N, self.judged_N.new_zeros(n_tokens)]))


class TokenSignal(NamedTuple):
    advantage_N: Tensor
    """float64; 0 where the token's rollout has no reward."""
    values: ValueTargets | None
    """None without a value function."""


Values: TypeAlias = Callable[[], Tensor]
"""Computes the value of each trained token, [N] float64. It takes a forward pass over the batch, so it is called only
if needed."""


RewardSignal: TypeAlias = Callable[[Rewards, Values], TokenSignal]
"""Raises BatchError for parts of rollouts whose reward is not known yet."""


def make_signal(advantage: Member) -> RewardSignal:
    """Raises ValueError for a name that cannot be loaded."""
    function, options, _ = ADVANTAGE.load(advantage)
    if isinstance(options, TurnAdvantage):
        return partial(_of_turns, function, options)
    return partial(_of_tokens if isinstance(options, TokenAdvantage) else _of_rollouts, function, options)


def _of_rollouts(advantage: AdvantageFn, options: Member, rewards: Rewards, values: Values) -> TokenSignal:
    return TokenSignal(advantage(rewards, options).repeat_interleave(rewards.tokens_R), None)


def _of_turns(advantage: TurnAdvantageFn, options: TurnAdvantage, rewards: Rewards, values: Values) -> TokenSignal:
    rewards.refuse_parts(options.name)
    assert rewards.turns is not None
    turns = rewards.turns()
    return TokenSignal(advantage(turns, options)[turns.turn_N], None)


def _of_tokens(advantage: TokenAdvantageFn, options: Member, rewards: Rewards, values: Values) -> TokenSignal:
    rewards.refuse_parts(options.name)
    assert rewards.turns is not None
    n_rollouts, turns, old_N = len(rewards.tokens_R), rewards.turns(), values()
    sequence_N = torch.arange(n_rollouts).repeat_interleave(rewards.tokens_R)
    judged_N = rewards.rewarded_R[sequence_N]
    before_N = turns.before_N[judged_N]
    before_N = torch.where(before_N < 0, -1, judged_N.cumsum(0)[before_N] - 1)
    judged = TokenRewards(turns.paid_N[judged_N], old_N[judged_N], sequence_N[judged_N], n_rollouts, before_N)
    advantage_N, return_N = torch.zeros_like(old_N), old_N.clone()
    advantage_N[judged_N], return_N[judged_N] = advantage(judged, options)
    return TokenSignal(advantage_N, ValueTargets(old_N, return_N, judged_N))
