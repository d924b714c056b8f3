"""Parameters in shares: torch's FSDP2 around a student."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import PreTrainedModel

from models.layers import layers


class _Root(nn.Module):
    """Its forward pass is any function of the student, the loss with it: the head's weight is read there, so that its
    share must be gathered for longer than the student's own forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def sharded(model: PreTrainedModel, device: torch.device, size: int) -> nn.Module:
    """Shard the parameters of `model` in place, a group per layer and one for the rest. Returns the module whose call
    runs a function with all of them at hand. Gradients are sums over the ranks: the loss is divided by the whole
    batch's tokens already."""
    mesh = init_device_mesh(device.type, (size,))
    root = _Root(model)
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    # The root too: between two passes nothing is gathered, so that whoever reads parameters finds shares.
    fully_shard(root, mesh=mesh, reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return root
