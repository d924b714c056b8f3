"""The optimizers of `learner.optimizer`. A package adds its own in its pyproject.toml (docs/small-cards.md#optimizers):

[project.entry-points."stillhouse.optimizers"]
lion = "my_package.lion:lion"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim._muon import muon as muon_update
from transformers import PreTrainedModel

from stillhouse.learner.config import OPTIMIZER, LearnerConfig, Muon
from stillhouse.learner.config import Optimizer as Options
from stillhouse.learner.ranks.staging import row_range
from stillhouse.learner.step.host_moments import HostMomentsAdamW
from stillhouse.learner.step.optimizer import trained
from stillhouse.models.transfer import own_rows, share_of, whole
from stillhouse.weights.staged_weights import streams_of

BLOCK: Final = 256
"""Numbers that torchao gives one scale."""
LEAST: Final = 4096
"""Numbers of the smallest tensor whose moments it keeps in 8 bits."""


class OptimizerFn(Protocol):
    def __call__(self, model: PreTrainedModel, config: LearnerConfig, options: Any, /) -> Optimizer:
        """An optimizer of the parameters that require a gradient. With several ranks these are DTensors, divided by
        rows. Its groups' `lr` is set before each step. All that it remembers must be tensors in its `state`, by
        parameter: checkpoints hold those. `options`: of the class that is registered with it. Raises ValueError."""
        ...


def make_optimizer(model: PreTrainedModel, config: LearnerConfig) -> Optimizer:
    """The configured one. Raises ValueError."""
    chosen = OPTIMIZER.load(config.optimizer)
    made = chosen.function(model, config, chosen.options)
    if not isinstance(made, Optimizer):
        raise ValueError(
            f"learner.optimizer = {config.optimizer.name!r} gives a {type(made).__name__}, expected an "
            "object of a subclass of torch.optim.Optimizer"
        )
    return made


def adamw(model: PreTrainedModel, config: LearnerConfig, _: Options) -> Optimizer:
    """AdamW with weight decay on matrices (`is_matrix`), not on norms and biases. Its moments are where
    `config.moments` says."""
    return _adamw(trained(model), config)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether it has two or more dimensions and is used as a matrix: biases of experts have a row for each of them, and
    the decays of Mamba (A_log) one for each channel."""
    return parameter.ndim >= 2 and not name.endswith(("bias", "A_log"))


def muon(model: PreTrainedModel, config: LearnerConfig, options: Muon) -> Optimizer:
    """Muon on matrices that are no embedding and no head, as its author says; AdamW on the rest, to which experts that
    are one tensor for a whole layer belong."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    if (head := model.get_output_embeddings()) is not None:
        tables.add(id(head.weight))
    parameters = trained(model)
    hidden = {n: p for n, p in parameters.items() if p.ndim == 2 and is_matrix(n, p) and id(p) not in tables}
    rest = {n: p for n, p in parameters.items() if n not in hidden}
    settings = {"momentum": options.momentum, "nesterov": options.nesterov, "adjust_lr_fn": options.adjust_lr}
    parts: list[Optimizer] = [_adamw(rest, config)] if rest else []
    if hidden:
        parts.append(WholeMuon(list(hidden.values()), lr=config.lr, weight_decay=config.weight_decay, **settings))
    return Combined(parts)


def adamw8bit(model: PreTrainedModel, config: LearnerConfig, _: Options) -> Optimizer:
    """torchao's AdamW with moments in 8 bits for matrices of LEAST numbers and more, torch's AdamW for the rest. Raises
    ValueError without torchao, or if ranks cut a matrix where its blocks cannot be cut."""
    try:
        from torchao.optim import AdamW8bit
    except ImportError as error:
        raise ValueError(
            f"learner.optimizer = 'adamw8bit' needs torchao, which this environment lacks ({error}): "
            "pip install -e '.[torchao]'"
        ) from error
    parameters, shares = trained(model), config.ranks // config.replicas
    blocks = [p for n, p in parameters.items() if _in_blocks(n, p, shares)]
    rest = {n: p for n, p in parameters.items() if not _in_blocks(n, p, shares)}
    parts: list[Optimizer] = [_adamw(rest, config)] if rest else []
    if blocks:
        settings = {"betas": config.betas, "eps": config.eps, "weight_decay": config.weight_decay}
        parts.append(OnShares(blocks, lr=config.lr, make=AdamW8bit, settings=settings))
    return Combined(parts)


class Combined(Optimizer):
    """Several optimizers as one, which has the groups and the state of all. Each has parameters of its own."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = parts
        for part in parts:
            part.state = self.state

    def step(self, closure: None = None) -> None:
        for part in self._parts:
            part.step()


class WholeMuon(torch.optim.Muon):
    """torch's Muon. Of a matrix that ranks share, each rank gathers weights, gradient and momentum, makes the whole
    update, and keeps its own rows: an update depends on the whole matrix, and so it is the same to the bit with any
    number of ranks. One matrix is whole at a time."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            settings = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, settings)

    def _update(self, parameter: Tensor, settings: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter.grad)  # pyright: ignore[reportArgumentType]
        kept = (parameter.detach(), state["momentum_buffer"])
        weight, momentum = map(whole, kept)
        muon_update([weight], [whole(parameter.grad)], [momentum], has_complex=False, **settings)  # pyright: ignore
        for tensor, new in zip(kept, (weight, momentum), strict=True):
            if tensor is not new:
                share_of(tensor).copy_(own_rows(tensor, new))


class OnShares(Optimizer):
    """An optimizer that treats each number, or each block, by itself: it gets the shares of this rank as plain
    tensors. On a CPU what it would compile runs as it is, which needs no C++ compiler."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        *,
        lr: float,
        make: Callable[..., Optimizer],
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self._own = {parameter: share_of(parameter.detach()) for parameter in parameters}
        self._inner = make(list(self._own.values()), lr=lr, **settings)
        self._stance = "force_eager" if next(iter(self._own.values())).device.type == "cpu" else "default"

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for parameter, own in self._own.items():
            own.grad = None if parameter.grad is None else share_of(parameter.grad)
            if self.state[parameter]:
                self._inner.state[own] = self.state[parameter]
            else:
                self._inner.state.pop(own, None)
        self._inner.param_groups[0]["lr"].fill_(self.param_groups[0]["lr"])
        with torch.compiler.set_stance(self._stance):
            self._inner.step()
        for parameter, own in self._own.items():
            own.grad = None
            self.state[parameter] = self._inner.state[own]


def _adamw(parameters: Mapping[str, Tensor], config: LearnerConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for n, p in parameters.items() if is_matrix(n, p)], "weight_decay": config.weight_decay},
        {"params": [p for n, p in parameters.items() if not is_matrix(n, p)], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.moments == "host":
        streams = streams_of(share_of(next(iter(parameters.values())).detach()).device)
        return HostMomentsAdamW(groups, streams=streams, **settings)
    return torch.optim.AdamW(groups, fused=True, **settings)


def _in_blocks(name: str, parameter: Tensor, shares: int) -> bool:
    """Whether the moments of a parameter have 8 bits: by its whole shape, so that a checkpoint does not depend on the
    number of ranks. Raises ValueError if a share of it cannot have them."""
    if not is_matrix(name, parameter) or parameter.numel() < LEAST or parameter.numel() % BLOCK:
        return False
    of_row = parameter.numel() // len(parameter)
    for share in range(shares):
        low, high = row_range(len(parameter), share, shares)
        if (high - low) * of_row < LEAST or (high - low) * of_row % BLOCK:
            raise ValueError(
                f"learner.optimizer = 'adamw8bit': {name} of shape {tuple(parameter.shape)} would have {high - low} "
                f"rows on rank {share} of {shares}; expected a multiple of {BLOCK} numbers, at least {LEAST}, on each. "
                "Use another learner.ranks, more learner.replicas, or adamw"
            )
    return True
