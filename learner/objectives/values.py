"""Advantages per token from a learned value function: generalised advantage estimation, a value head and its loss.

Sampled tokens of one rollout follow one another as if an environment's tokens were not there: a state is the context of
a sampled token. The head of a run, its optimizer and its part of a step are in `learner.step.critic`.

Legend: N trained tokens, R rollouts, L tokens of the longest rollout, H hidden size.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from learner.objectives.advantages import EPSILON


class ValueHead(torch.nn.Module):
    """One linear layer on the hidden state that predicts a token: the expected return from there on."""

    def __init__(self, hidden_size: int, *, through_backbone: bool = False) -> None:
        """`through_backbone`: let the value loss train the model below, too. Starts at 0 everywhere."""
        super().__init__()
        self.through_backbone = through_backbone
        # Drawn from no random generator: a run with a head goes on with the same numbers as one without.
        self.linear = cast(torch.nn.Linear, torch.nn.utils.skip_init(torch.nn.Linear, hidden_size, 1))
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """[N]"""
        states_NH = hidden_NH if self.through_backbone else hidden_NH.detach()
        return cast(Tensor, self.linear(states_NH.to(self.linear.weight.dtype))).squeeze(1)


def gae(
    reward_N: Tensor,
    value_N: Tensor,
    sequence_N: Tensor,
    n_sequences: int,
    *,
    discount: float = 1.0,
    decay: float = 0.95,
) -> tuple[Tensor, Tensor]:
    """(advantage [N], return [N]) of generalised advantage estimation (Schulman et al. 2016), without gradient.

        delta_t = reward_t + discount * value_{t+1} - value_t          value behind the last token: 0
        A_t     = delta_t + discount * decay * A_{t+1}                 return_t = A_t + value_t

    reward_N: what is paid at a token (a rollout's reward at its last one). `sequence_N` int64 in [0, R); tokens of one
    rollout stand in their order, next to one another or not. The loop is over L, for all rollouts at a time."""
    place_N, longest = _places(sequence_N, n_sequences)
    shape = (n_sequences, longest + 1)  # one more: nothing follows the last token
    rewards_RL = reward_N.new_zeros(shape)
    values_RL = reward_N.new_zeros(shape)
    rewards_RL[sequence_N, place_N] = reward_N.detach()
    values_RL[sequence_N, place_N] = value_N.detach().to(reward_N.dtype)
    advantages_RL = reward_N.new_zeros(shape)
    for t in range(longest - 1, -1, -1):
        delta_R = rewards_RL[:, t] + discount * values_RL[:, t + 1] - values_RL[:, t]
        advantages_RL[:, t] = delta_R + discount * decay * advantages_RL[:, t + 1]
    advantage_N = advantages_RL[sequence_N, place_N]
    return advantage_N, advantage_N + values_RL[sequence_N, place_N]


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, *, clip: float = 0.0) -> Tensor:
    """[N] half the squared error; with clip > 0 the larger of that and of the error of a value that moved by at most
    `clip` since the batch was sampled (Schulman et al. 2017)."""
    error_N = (value_N - return_N).square()
    if clip > 0:
        near_N = old_value_N + (value_N - old_value_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (near_N - return_N).square())
    return 0.5 * error_N


def whitened(advantage_N: Tensor) -> Tensor:
    """Mean 0, standard deviation 1 over all tokens of the batch; give it the whole batch, before any divergence."""
    centred_N = advantage_N - advantage_N.mean()
    return centred_N / (centred_N.square().mean().sqrt() + EPSILON)


def _places(sequence_N: Tensor, n_sequences: int) -> tuple[Tensor, int]:
    """Place of each token in its rollout, from 0, and the tokens of the longest."""
    order_N = torch.argsort(sequence_N, stable=True)
    tokens_R = torch.bincount(sequence_N, minlength=n_sequences)
    firsts_R = tokens_R.cumsum(0) - tokens_R
    place_N = torch.empty_like(sequence_N)
    place_N[order_N] = torch.arange(len(sequence_N), device=sequence_N.device) - firsts_R[sequence_N[order_N]]
    return place_N, int(tokens_R.max()) if len(sequence_N) else 0
