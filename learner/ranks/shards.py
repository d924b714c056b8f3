"""Parameters in shares: torch's FSDP2 around a student."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from stillhouse.learner.ranks.mesh import Mesh
from stillhouse.models.layers import layers
from stillhouse.models.packed import WAYS, set_way, way_of
from stillhouse.models.transfer import own_rows, share_of


class _Root(nn.Module):
    """Its forward pass is any function of the student, the loss with it: the head's weight is read there, so that its
    share must be gathered for longer than the student's own forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def sharded(model: PreTrainedModel, device: torch.device, ranks: Mesh, *, bfloat16: bool = False) -> nn.Module:
    """Shard the parameters of `model` in place, a group per layer and one for the rest. Returns the module whose call
    runs a function with all of them at hand. Gradients are sums over the ranks: the loss is divided by the whole
    batch's tokens already.

    The values are those of rank 0. The others may have the model without any (models.loading, `weights=False`), so that
    one copy of it exists as a whole, in the memory of rank 0 and only here.

    `bfloat16`: products are in it, by autocast. Layers are then gathered in bfloat16, half the bytes, and autocast has
    nothing to round or to keep. Their gradients are added up in float32. The embedding, and with it the states between
    layers, stay in float32, as with one rank."""
    mesh = ranks.of_devices(device.type)
    root = _Root(model)
    values = [tensor.detach() for tensor in _tensors(model)]
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bfloat16 else None,
        reduce_dtype=torch.float32 if bfloat16 else None,
        cast_forward_inputs=False,
    )
    for layer in layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
    # The root too: between two passes nothing is gathered, so that whoever reads parameters finds shares.
    fully_shard(root, mesh=mesh, reshard_after_forward=True)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    if values[0].is_meta:
        model.to_empty(device=device)
    for tensor, value in zip(_tensors(model), values, strict=True):
        _take_from_first(tensor, value, device)
    way = torch.tensor(WAYS.index(way_of(model)), device=device)
    dist.broadcast(way, src=0)  # the others had no weights to measure it with
    set_way(model, WAYS[int(way)], most=lambda n: _most(n, device))
    return root


def _most(number: int, device: torch.device) -> int:
    largest = torch.tensor(number, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest)


def _tensors(model: nn.Module) -> list[Tensor]:
    """In the same order on all ranks, tied weights once."""
    return [*model.parameters(), *model.buffers()]


@torch.no_grad()
def _take_from_first(tensor: Tensor, value: Tensor, device: torch.device) -> None:
    """Fill `tensor`, this rank's share or a buffer, with the `value` of rank 0."""
    full = torch.empty_like(value, device=device) if dist.get_rank() else value.to(device).contiguous()
    dist.broadcast(full, src=0)
    share_of(tensor.detach()).copy_(own_rows(tensor, full))
