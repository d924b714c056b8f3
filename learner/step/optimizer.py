"""Learning-rate schedule, and an optimizer's state by parameter name (no pickle)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.step.host_moments import HostMomentsAdamW
from stillhouse.models.transfer import Rows, Shares, host_copy, rows_of, share_of

_SCALE: Final = ".scale"
_AT_ONCE_BYTES: Final = 2**28
"""Parameters for which state is made at one time."""


@dataclass(frozen=True)
class OptimizerState:
    """Copies on the CPU by "KEY/<parameter name>": of AdamW "step" [], "exp_avg" and "exp_avg_sq" of the parameter's
    shape. A parameter that no forward pass has used yet (an idle expert) has none."""

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


def set_learning_rate(optimizer: Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def dump_optimizer(model: torch.nn.Module, optimizer: Optimizer, *, steps_done: int) -> OptimizerState:
    """Raises ValueError for a state that cannot be saved."""
    _wait(optimizer)
    own, rows = dict[str, Tensor](), dict[str, Rows]()
    never_stepped: list[str] = []
    for name, parameter in trained(model).items():
        if not optimizer.state.get(parameter):
            never_stepped.append(name)
        for key, tensor, place in _pieces(name, parameter, optimizer):
            own[key] = host_copy(tensor)
            if place is not None:
                rows[key] = place
    return OptimizerState(own, tuple(never_stepped), steps_done, rows)


def load_optimizer(model: torch.nn.Module, optimizer: Optimizer, state: OptimizerState) -> None:
    """Replace the optimizer's state by a whole one. Raises ValueError, changing nothing, for wrong names or shapes."""
    own = trained(model)
    stepped = {name: p for name, p in own.items() if name not in state.never_stepped}
    fresh = [p for p in stepped.values() if not optimizer.state.get(p)]
    _begin(optimizer, fresh)
    pieces = {key: (tensor, place) for name, p in stepped.items() for key, tensor, place in _pieces(name, p, optimizer)}
    wanted = {key: tuple(tensor.shape) if place is None else place.shape for key, (tensor, place) in pieces.items()}
    got = {name: tuple(tensor.shape) for name, tensor in state.tensors.items()}
    if got != wanted or not set(state.never_stepped) <= own.keys():
        for parameter in fresh:
            del optimizer.state[parameter]
        missing = sorted(wanted.keys() - got.keys())
        unknown = sorted((got.keys() - wanted.keys()) | (set(state.never_stepped) - own.keys()))
        misshapen = sorted(name for name in wanted.keys() & got.keys() if wanted[name] != got[name])
        raise ValueError(
            f"optimizer state does not fit the model: missing {missing[:4]}, unknown {unknown[:4]}, of another shape "
            f"{misshapen[:4]}; the checkpoint belongs to another architecture or learner.optimizer"
        )
    _wait(optimizer)
    for key, (tensor, place) in pieces.items():
        values = state.tensors[key]
        tensor.copy_(values if place is None else values[place.first : place.first + len(tensor)])
    for name in state.never_stepped:
        optimizer.state.pop(own[name], None)


def _begin(optimizer: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Have the optimizer make the state of these parameters, as it does at their first step. They keep their values."""
    waiting, size = list[Tensor](), 0
    for parameter in [*parameters, None]:
        if waiting and (parameter is None or size + share_of(parameter.detach()).nbytes > _AT_ONCE_BYTES):
            kept = [share_of(p.detach()).clone() for p in waiting]
            for p in waiting:
                p.grad = torch.zeros_like(p)
            optimizer.step()
            for p, values in zip(waiting, kept, strict=True):
                p.grad = None
                share_of(p.detach()).copy_(values)
            waiting, size = [], 0
        if parameter is not None:
            waiting.append(parameter)
            size += share_of(parameter.detach()).nbytes


def _pieces(name: str, parameter: Tensor, optimizer: Optimizer) -> Iterator[tuple[str, Tensor, Rows | None]]:
    """Name in a checkpoint, what this process holds, and its place, of each tensor in the state of a parameter. Those
    of torchao, in 8 bits, are two: codes of the parameter's shape, and a scale per block. Raises ValueError."""
    rows, share = rows_of(parameter), share_of(parameter.detach())
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"the optimizer's {key!r} of {name} is a {type(value).__name__}, expected a tensor: checkpoints hold "
                "nothing else"
            )
        own: Any = share_of(value)
        if rows is not None and own.ndim and own.shape != share.shape:
            raise ValueError(
                f"the optimizer's {key!r} of {name} has shape {tuple(own.shape)} here, expected {tuple(share.shape)}: "
                "with several ranks checkpoints hold rows of the parameter's shape"
            )
        for part, tensor in stored_in(value).items():
            in_blocks = part == _SCALE and rows is not None
            place = _of_blocks(rows, own.block_size) if in_blocks else rows if own.ndim else None
            yield f"{key}{part}/{name}", tensor, place


def stored_in(value: Tensor) -> dict[str, Tensor]:
    """What holds the numbers of a tensor of the state in this process: that itself, or for torchao's, in 8 bits, codes
    and scales."""
    own: Any = share_of(value)
    return {".codes": own.codes, _SCALE: own.scale} if hasattr(own, "codes") else {"": own}


def _of_blocks(rows: Rows, block: int) -> Rows:
    """Where the blocks of these rows are among all blocks."""
    of_row = math.prod(rows.shape[1:])
    return Rows(rows.first * of_row // block, (rows.shape[0] * of_row // block,))


def _wait(optimizer: Optimizer) -> None:
    if isinstance(optimizer, HostMomentsAdamW):
        optimizer.wait()


def trained(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
