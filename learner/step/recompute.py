"""Layers that keep nothing for their backward pass but their input, and compute the rest again there (activation
checkpointing, Chen et al. 2016, arXiv:1604.06174). It costs another forward pass of these layers, up to a third
more time per step, and changes no number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from stillhouse.models import routing
from stillhouse.models.layers import layers


def recompute(model: PreTrainedModel, share: float) -> int:
    """Have a share of the layers, evenly spread, compute again what they do not keep. Returns their number, rounded
    down. Raises ValueError for a model whose layers are not known."""
    if not share:
        return 0
    found = layers(model)
    chosen = [layer for i, layer in enumerate(found) if is_chosen(i, share)]
    for layer in chosen:
        layer.forward = functools.partial(_again, layer.forward)
    return len(chosen)


def is_chosen(index: int, share: float) -> bool:
    """Whether layer `index` = 0, 1, ... is among a share of them. The last one is, with any share that gives one."""
    return int((index + 1) * share + 1e-9) > int(index * share + 1e-9)


def _again(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # There is no dropout, so no random state needs to be kept.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=routing.again, **kwargs)
