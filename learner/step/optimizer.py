"""AdamW for a Hugging Face model, its learning-rate schedule, and its state by parameter name (no pickle)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.ranks.shares import Shares
from stillhouse.learner.step.host_moments import HostMomentsAdamW
from stillhouse.models.transfer import Rows, host_copy, like, own_rows, rows_of, share_of
from stillhouse.weights.staged_weights import streams_of

_KEYS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamWState:
    """Copies on the CPU: "step/<parameter name>" [], "exp_avg/<...>" and "exp_avg_sq/<...>" of the parameter's shape. A
    parameter that no forward pass has used yet (an idle expert) has none."""

    tensors: dict[str, Tensor]
    """With several ranks, the rows of this one."""
    never_stepped: tuple[str, ...]
    steps_done: int
    rows: Mapping[str, Rows] = field(default_factory=dict[str, Rows])
    """The places of those rows."""

    @property
    def shares(self) -> Shares:
        return Shares(self.tensors, self.rows)


def learning_rate(config: LearnerConfig, step: int, total_steps: int, *, highest: float | None = None) -> float:
    """Learning rate of optimizer step `step` = 0, 1, ...: linear warm-up to lr over warmup_steps (step 0 is not at 0),
    then the schedule, which reaches lr * min_lr_ratio at step total_steps - 1 and stays there. `highest` replaces
    config.lr."""
    lr = config.lr if highest is None else highest
    if step < config.warmup_steps:
        return lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return lr
    progress = (step - config.warmup_steps + 1) / max(1, total_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)


def make_adamw(model: PreTrainedModel, config: LearnerConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on parameters of two or more dimensions, not on norms and biases. Its moments are where
    `config.moments` says."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.moments == "host":
        streams = streams_of(share_of(parameters[0].detach()).device)
        return HostMomentsAdamW(groups, streams=streams, lr=config.lr, betas=config.betas, eps=config.eps)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def dump_adamw(model: torch.nn.Module, optimizer: torch.optim.AdamW, *, steps_done: int) -> AdamWState:
    _wait(optimizer)
    own, rows = dict[str, Tensor](), dict[str, Rows]()
    never_stepped: list[str] = []
    for name, parameter in _trained(model).items():
        state: dict[str, Tensor] | None = optimizer.state.get(parameter)
        if not state:
            never_stepped.append(name)
            continue
        own.update({f"{key}/{name}": host_copy(state[key]) for key in _KEYS})
        if (place := rows_of(parameter)) is not None:
            rows.update({f"{key}/{name}": place for key in _KEYS[1:]})
    return AdamWState(own, tuple(never_stepped), steps_done, rows)


def load_adamw(model: torch.nn.Module, optimizer: torch.optim.AdamW, state: AdamWState) -> None:
    """Replace the optimizer's state by a whole one. Raises ValueError, changing nothing, for wrong names or shapes."""
    trained = _trained(model)
    stepped = {name: p for name, p in trained.items() if name not in state.never_stepped}
    wanted = {
        f"{key}/{name}": torch.Size() if key == "step" else p.shape for name, p in stepped.items() for key in _KEYS
    }
    got = {name: tensor.shape for name, tensor in state.tensors.items()}
    if got != wanted or not set(state.never_stepped) <= trained.keys():
        missing = sorted(wanted.keys() - got.keys())
        unknown = sorted((got.keys() - wanted.keys()) | (set(state.never_stepped) - trained.keys()))
        misshapen = sorted(name for name in wanted.keys() & got.keys() if wanted[name] != got[name])
        raise ValueError(
            f"optimizer state does not fit the model: missing {missing[:4]}, unknown {unknown[:4]}, of another shape "
            f"{misshapen[:4]}; the checkpoint belongs to another architecture"
        )
    _wait(optimizer)
    optimizer.state.clear()
    for name, parameter in stepped.items():
        step, first, second = (state.tensors[f"{key}/{name}"] for key in _KEYS)
        step = step.clone().to(parameter.device)
        if isinstance(optimizer, HostMomentsAdamW):
            optimizer.place(parameter, step, own_rows(parameter, first), own_rows(parameter, second))
        else:
            moments = {"exp_avg": like(parameter, first), "exp_avg_sq": like(parameter, second)}
            optimizer.state[parameter] = {"step": step, **moments}


def _wait(optimizer: torch.optim.AdamW) -> None:
    if isinstance(optimizer, HostMomentsAdamW):
        optimizer.wait()


def _trained(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
