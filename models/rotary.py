"""Rotary embeddings that depend on the length of a sequence: each sequence of a packed row is turned as it is alone.

transformers looks at the largest position of a whole call. longrope (Phi-3 and 4, PhiMoE) has other frequencies beyond
the original context, so that a short sequence would be turned like the long one beside it. `dynamic` has others only
beyond the context window, which `models.packed` refuses.

Legend: B rows, T tokens of a row, D size of a rotation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

Rotation: TypeAlias = tuple[Tensor, Tensor]
"""cos and sin, [B, T, D]."""
_FARTHEST: Final = 2**20
"""Length of the neighbour that `depends_on_neighbours` tries, where the configuration sets no limit."""


def moving_rope(config: PreTrainedConfig) -> str:
    """The type of rotary frequencies, if they depend on the longest position of a call in any layer; else empty."""
    for rope in _ropes(config).values():
        kind = str(rope.get("rope_type"))
        if "dynamic" in kind or _threshold(rope) is not None:
            return kind
    return ""


def switching_rope(config: PreTrainedConfig) -> bool:
    """Whether a sequence that grows within the context window gets other frequencies."""
    return any(_threshold(rope) is not None for rope in _ropes(config).values())


def turn_each_alone(model: PreTrainedModel) -> None:
    """Make the rotary embeddings of a model turn each sequence of a row as if it were alone. Idempotent."""
    if switching_rope(model.config):
        for module in _embeddings(model):
            if "forward" not in vars(module):
                module.forward = partial(_turned, type(module).forward, module)


@torch.no_grad()
def depends_on_neighbours(model: PreTrainedModel) -> str:
    """The class of a rotary embedding that turns a short sequence otherwise if the longest one possible is beside it;
    else empty. Runs these modules only, on seven positions."""
    window: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or _FARTHEST
    alone_1T = torch.arange(5, device=model.device)[None]
    among_1T = torch.cat([alone_1T, torch.tensor([[0, min(window, _FARTHEST) - 1]], device=model.device)], dim=1)
    x = torch.zeros((1, among_1T.shape[1], 1), device=model.device)  # gives no more than device and dtype
    for module in _embeddings(model):
        kinds = cast(Any, module).rope_type
        for more in [{"layer_type": kind} for kind in kinds] if isinstance(kinds, dict) else [{}]:
            alone, among = module(x, alone_1T, **more), module(x, among_1T, **more)
            if any(not torch.allclose(a, b[:, :5], rtol=1e-5, atol=1e-6) for a, b in zip(alone, among, strict=True)):
                return type(module).__name__
    return ""


def _turned(
    forward: Callable[..., Rotation], module: nn.Module, x: Tensor, position_ids: Tensor, *args: Any, **more: Any
) -> Rotation:
    """cos and sin of each sequence alone. Sequences begin at position 0; both sets are computed for all, and chosen
    without a wait for a GPU."""
    layer_type = more.get("layer_type", args[0] if args else "")
    threshold = _threshold(_ropes(cast(Any, module).config).get(layer_type or "", {}))
    if threshold is None:
        return forward(module, x, position_ids, *args, **more)
    sequence_BT = (position_ids == 0).cumsum(dim=1)
    last_BS = torch.zeros((len(position_ids), position_ids.shape[1] + 1), dtype=position_ids.dtype, device=x.device)
    last_BS = last_BS.scatter_reduce(1, sequence_BT, position_ids, "amax")
    long_BT = last_BS.gather(1, sequence_BT) >= threshold
    short = forward(module, x, position_ids.masked_fill(long_BT, 0), *args, **more)
    long = forward(module, x, position_ids, *args, **more)  # of no use unless one is long
    cos, sin = (torch.where(long_BT[..., None], b, a) for a, b in zip(short, long, strict=True))
    return cos, sin


def _embeddings(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Those of the text model; an image tower has positions of another kind."""
    text = getattr(model.base_model, "language_model", model)
    return (module for module in text.modules() if hasattr(module, "rope_type"))


def _ropes(config: PreTrainedConfig) -> dict[str, Mapping[str, Any]]:
    """Layer type -> its parameters; "" where all layers have the same."""
    rope: Mapping[str, Any] = getattr(config.get_text_config(), "rope_parameters", None) or {}
    return {name: one for name, one in rope.items() if isinstance(one, Mapping)} or {"": rope}


def _threshold(rope: Mapping[str, Any]) -> int | None:
    """The longest sequence with the first set of frequencies, or with their first scale (PhiMoE); None if there is only
    one."""
    switches = rope.get("rope_type") == "longrope" or "long_mscale" in rope
    return cast("int | None", rope.get("original_max_position_embeddings")) if switches else None
