"""The value function of a trainer: its head and optimizer, and its part of a step.

    before the updates   v_t of the whole batch, without gradient     -> advantages, returns    objectives.advantages
    in each microbatch   coef * sum_t share_t * value_loss_t / divisor    beside the student's loss, same divisor
    after it             the head's own AdamW, learning rate and clipping norm

The head reads the hidden state that predicts a token. It belongs to the learner alone: it is in its checkpoints, but
not in the weights sent to actors, nor in exports.

Legend: N trained tokens of a microbatch, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple, cast

import torch
from torch import Tensor

from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.advantages import ValueTargets
from stillhouse.learner.objectives.options import TokenAdvantage
from stillhouse.learner.ranks.group import Ranks
from stillhouse.learner.reports.step_metrics import ValueMetrics
from stillhouse.learner.step.optimizer import (
    OptimizerState,
    dump_optimizer,
    learning_rate,
    load_optimizer,
    set_learning_rate,
)
from stillhouse.models.transfer import upload

log = logging.getLogger(__name__)

_HEAD, _OPTIMIZER = "head/", "optimizer/"


class CriticStateError(ValueError):
    """This run cannot use the saved value head; the message says why."""


class ValueHead(torch.nn.Module):
    """One linear layer on the hidden state that predicts a token: the expected return from there on."""

    def __init__(self, hidden_size: int, *, through_backbone: bool = False) -> None:
        """Starts at 0 everywhere. `through_backbone` lets the value loss train the model, too."""
        super().__init__()
        self.through_backbone = through_backbone
        # No random generator is used, so that a run with a head draws the same numbers as one without.
        self.linear = cast(torch.nn.Linear, torch.nn.utils.skip_init(torch.nn.Linear, hidden_size, 1))
        torch.nn.init.zeros_(self.linear.weight)
        torch.nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_NH: Tensor) -> Tensor:
        """[N]"""
        states_NH = hidden_NH if self.through_backbone else hidden_NH.detach()
        return cast(Tensor, self.linear(states_NH.to(self.linear.weight.dtype))).squeeze(1)


def value_loss(value_N: Tensor, old_value_N: Tensor, return_N: Tensor, *, clip: float = 0.0) -> Tensor:
    """[N] half the squared error; with clip > 0 the larger of that and of the error of a value that moved by at most
    `clip` since the batch was sampled (Schulman et al. 2017)."""
    error_N = (value_N - return_N).square()
    if clip > 0:
        near_N = old_value_N + (value_N - old_value_N).clamp(-clip, clip)
        error_N = torch.maximum(error_N, (near_N - return_N).square())
    return 0.5 * error_N


class ValueTerms(NamedTuple):
    loss: Tensor
    """Scalar with a gradient: these tokens' share of the batch's value loss."""
    error_N: Tensor
    """[N] float, no gradient: `value_loss`, 0 where not judged."""

    @classmethod
    def nothing(cls, states_NH: Tensor) -> ValueTerms:
        zero = states_NH.new_zeros(())
        return cls(zero, zero.expand(len(states_NH)))


class Critic:
    """A value function. This base class is the case without one: its part of the loss is 0."""

    def values(self, states_NH: Tensor) -> Tensor:
        """[N] without gradient."""
        raise TypeError("learner.objective.advantage of single tokens without a value head")

    def loss(self, states_NH: Tensor, targets: ValueTargets | None, share_N: Tensor, divisor: int) -> ValueTerms:
        return ValueTerms.nothing(states_NH)

    def gradients(self) -> list[Tensor]:
        return []

    def add_up(self, ranks: Ranks) -> None:
        """Give each rank the sum of all ranks' gradients."""

    def update(self, step: int) -> None:
        """Apply the gradients, clipped, at the learning rate of optimizer step `step`."""

    def zero_grad(self) -> None: ...

    def state_dict(self) -> dict[str, Tensor]:
        """Copies on the CPU; empty without a value function."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Resume from a `state_dict`. Raises CriticStateError, changing nothing."""
        if state:
            log.warning("the checkpoint's value head is left out: this run's learner.objective.advantage uses none")


class ValueCritic(Critic):
    """A linear value head with its own optimizer, so that errors of the values neither clip nor scale the student's
    gradient. No weight decay."""

    def __init__(
        self,
        hidden_size: int,
        config: LearnerConfig,
        advantage: TokenAdvantage,
        *,
        total_steps: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Schedule, AdamW's parameters and the clipping norm are the student's, from `config`."""
        value = advantage.value
        self.head = ValueHead(hidden_size, through_backbone=value.through_backbone).to(device, dtype)
        self._config = config
        self._advantage = advantage
        self._total_steps = total_steps
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=value.lr, betas=config.betas, eps=config.eps, weight_decay=0.0, fused=True
        )

    def values(self, states_NH: Tensor) -> Tensor:
        with torch.no_grad():
            return self.head(states_NH)

    def loss(self, states_NH: Tensor, targets: ValueTargets | None, share_N: Tensor, divisor: int) -> ValueTerms:
        if targets is None or not bool(targets.judged_N.any()):
            return ValueTerms.nothing(states_NH)
        value_N: Tensor = self.head(states_NH)
        old_N, return_N = (upload(x, value_N.device).to(value_N.dtype) for x in (targets.old_N, targets.return_N))
        error_N = value_loss(value_N, old_N, return_N, clip=self._advantage.value.clip)
        error_N = torch.where(upload(targets.judged_N, value_N.device), error_N, 0.0)
        loss = self._advantage.value.coef * (share_N.to(value_N) * error_N).sum() / divisor
        return ValueTerms(loss, error_N.detach())

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.head.parameters() if p.grad is not None]

    def add_up(self, ranks: Ranks) -> None:
        if ranks.world_size > 1:
            for parameter in self.head.parameters():  # none where no token of this rank is judged
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            ranks.all_reduce(self.gradients())

    def update(self, step: int) -> None:
        if self._config.max_grad_norm > 0:
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), self._config.max_grad_norm)
        lr = learning_rate(self._config, step, self._total_steps, highest=self._advantage.value.lr)
        set_learning_rate(self._optimizer, lr)
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Tensor]:
        moments = dump_optimizer(self.head, self._optimizer, steps_done=0).tensors
        head = {f"{_HEAD}{name}": p.detach().cpu().clone() for name, p in self.head.named_parameters()}
        return head | {f"{_OPTIMIZER}{name}": tensor for name, tensor in moments.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if not state:
            raise CriticStateError(
                "the checkpoint has no value head, which learner.objective.advantage = "
                f"{self._advantage.name!r} needs: the run was started with another advantage. Resume with that one, "
                "or start a new run with the checkpoint as --student; its head starts at 0"
            )
        head = {name.removeprefix(_HEAD): tensor for name, tensor in state.items() if name.startswith(_HEAD)}
        moments = {name.removeprefix(_OPTIMIZER): t for name, t in state.items() if name.startswith(_OPTIMIZER)}
        own = dict(self.head.named_parameters())
        got, wanted = ({name: tuple(t.shape) for name, t in tensors.items()} for tensors in (head, own))
        if got != wanted:
            raise CriticStateError(f"the saved value head has {got}; expected {wanted}: it belongs to another student")
        never = tuple(name for name in own if f"step/{name}" not in moments)
        try:
            load_optimizer(self.head, self._optimizer, OptimizerState(moments, never, 0))
        except ValueError as error:
            raise CriticStateError(f"the saved value head: {error}") from error
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(head[name])


def make_critic(
    hidden_size: int, config: LearnerConfig, *, total_steps: int, dtype: torch.dtype, device: torch.device
) -> Critic:
    """A ValueCritic if the configured advantage needs values. Uses no random generator of torch."""
    advantage = config.objective.advantage
    if not isinstance(advantage, TokenAdvantage):
        return Critic()
    return ValueCritic(hidden_size, config, advantage, total_steps=total_steps, dtype=dtype, device=device)


def value_metrics(targets: ValueTargets, error_sum: float, grad_norm: float) -> ValueMetrics:
    """Metrics of a batch. `error_sum` is the sum of `value_loss` over its tokens."""
    value_N, return_N = targets.old_N[targets.judged_N], targets.return_N[targets.judged_N]
    n = len(value_N)
    if not n:
        return ValueMetrics(0, None, None, None, None, grad_norm)
    spread, left = float(return_N.var(correction=0)), float((return_N - value_N).var(correction=0))
    explained = 1.0 - left / spread if spread > 0 else None
    return ValueMetrics(n, error_sum / n, explained, float(return_N.mean()), float(value_N.mean()), grad_norm)
