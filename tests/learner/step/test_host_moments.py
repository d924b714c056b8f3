"""AdamW with its moments in host memory does, to the bit, what torch's does with them on the device.

There is no GPU here. What stands for host memory is memory that torch did not allocate (numpy's). torch's profiler
counts what torch allocates, and so sees only what would be on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LoraConfig
from stillhouse.learner.step import host_moments, optimizers
from stillhouse.learner.step.finite_step import finite_step
from stillhouse.learner.step.lora import Adapters
from stillhouse.learner.step.train_step import Trainer
from stillhouse.weights.staged_weights import NoStreams
from tests.allocated import allocated
from tests.learner.conftest import make_item, tiny_student
from tests.learner.settings import learner_config

CASES: dict[str, dict[str, Any]] = {
    "all weights": {"weight_decay": 0.1},
    "several updates, clipped": {"importance": "decoupled", "updates_per_batch": 3, "max_grad_norm": 1e-3},
    "value head": {"importance": "ppo", "advantage": ("gae", {"value": {"lr": 2e-2, "through_backbone": True}})},
    "adapters": {"lora": LoraConfig(rank=2, alpha=4.0)},
    "bfloat16 products": {"dtype": "bfloat16"},
}


@dataclass
class Host(NoStreams):
    """Host memory that torch did not allocate."""

    runs: list[Any] = field(default_factory=list[Any])

    def host_bytes(self, n_bytes: int) -> Tensor:
        self.runs.append(np.zeros(n_bytes, np.uint8))
        return torch.from_numpy(self.runs[-1])

    def holds(self, tensor: Tensor) -> bool:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(run.ctypes.data <= begin and end <= run.ctypes.data + run.nbytes for run in self.runs)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    made = Host()

    def streams_of(_: torch.device) -> Host:
        return made

    monkeypatch.setattr(optimizers, "streams_of", streams_of)
    monkeypatch.setattr(host_moments, "PIECE", 64)  # of 368 and fewer numbers
    return made


def trainer_of(model: PreTrainedModel, settings: dict[str, Any], moments: str) -> Trainer:
    config = learner_config(**{"lr": 1e-2, "warmup_steps": 0, **settings}, moments=moments)
    torch.manual_seed(1)
    adapters = Adapters(model, config.lora, base="tiny") if config.lora.rank else None
    return Trainer(model, config, total_steps=9, adapters=adapters)


def items_of(seed: int) -> list[TrainItem]:
    masks = [0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 1, 0, 0], [0] + [1] * 9
    return [make_item(f"r{i}", mask, seed=10 * seed + i, reward=float(i)) for i, mask in enumerate(masks)]


def everything(trainer: Trainer) -> dict[str, Tensor]:
    found = {f"weight {name}": p.detach().clone() for name, p in trainer.model.named_parameters()}
    found |= {f"moment {name}": tensor for name, tensor in trainer.state_dict().tensors.items()}
    return found | {f"critic {name}": tensor for name, tensor in trainer.critic.state_dict().items()}


def assert_same(one: Trainer, other: Trainer) -> None:
    ones, others = everything(one), everything(other)
    assert ones.keys() == others.keys() and any(name.startswith("moment exp_avg/") for name in ones)
    assert not [name for name in ones if not torch.equal(ones[name], others[name])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_same_to_the_bit(host: Host, case: str, dtype: torch.dtype) -> None:
    one, other = (trainer_of(tiny_student(dtype=dtype), CASES[case], moments) for moments in ("device", "host"))
    for seed in range(4):
        items = items_of(seed)
        if seed == 2:  # a step that is not made, or made without a rollout, changes the moments of neither wrongly
            items[1].teacher_ML[:] = np.inf
        mine, theirs = (finite_step(trainer, items) for trainer in (one, other))
        assert mine.masked == theirs.masked and bool(mine.masked) == (seed == 2)
        assert_same(one, other)


@pytest.mark.parametrize("moments", ["device", "host"])
def test_the_device_holds_one_piece_of_the_moments_and_none_after_the_update(
    host: Host, monkeypatch: pytest.MonkeyPatch, moments: str
) -> None:
    """The first update makes the moments, 8 bytes per parameter; without the option the device has them ever after."""
    monkeypatch.setattr(host_moments, "PIECE", 4096)
    trainer = trainer_of(tiny_student(vocab=2048), {}, moments)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    parameters = list(trainer.model.parameters())
    n_bytes, clocks = 8 * sum(p.numel() for p in parameters), 64 * len(parameters)  # torch aligns scalars to 64 bytes
    assert n_bytes > 4 * 8 * 4096
    kept, most = allocated(trainer._optimizer.step)  # pyright: ignore[reportPrivateUsage]
    if moments == "device":
        assert n_bytes <= kept <= n_bytes + 2 * clocks
    else:
        assert kept <= clocks and 8 * 4096 <= most <= 2 * 8 * 4096 + 2 * clocks


def test_a_state_goes_from_host_to_device_and_back(host: Host) -> None:
    one, other = (trainer_of(tiny_student(), {}, moments) for moments in ("device", "host"))
    for trainer, seed in ((one, 0), (other, 1)):
        trainer.step(items_of(seed))
    of_one, of_other = one.state_dict(), other.state_dict()
    frozen = {name: tensor.clone() for name, tensor in of_other.tensors.items()}
    weights = [{name: p.detach().clone() for name, p in t.model.named_parameters()} for t in (one, other)]
    for trainer, state, values in ((one, of_other, weights[1]), (other, of_one, weights[0])):
        trainer.load_state_dict(state)
        trainer.model.load_state_dict(values, strict=False)
        trainer.step(items_of(2))
    straight = [trainer_of(tiny_student(), {}, "device") for _ in range(2)]
    for trainer, seed in zip(straight, (1, 0), strict=True):
        trainer.step(items_of(seed))
        trainer.step(items_of(2))
    assert_same(one, straight[0])
    assert_same(other, straight[1])
    assert all(torch.equal(of_other.tensors[name], tensor) for name, tensor in frozen.items()), "a copy"


class _Event:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def synchronize(self) -> None:
        self._log.append("waited")


def test_the_host_waits_for_the_device_before_it_reads_or_replaces_moments(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies into host memory are only queued on a GPU, so a checkpoint must wait for the mark after them."""
    log: list[str] = []

    def mark(_: Host) -> _Event:
        log.append("marked")
        return _Event(log)

    monkeypatch.setattr(Host, "mark", mark)
    trainer = trainer_of(tiny_student(), {}, "host")
    trainer.step(items_of(0))
    assert log == ["marked"]
    state = trainer.state_dict()
    assert log == ["marked", "waited"]
    trainer.load_state_dict(state)
    assert log == ["marked", "waited", "waited"]
