"""The repeated blocks of an architecture."""

from __future__ import annotations

from typing import cast

from torch import nn
from transformers import PreTrainedModel


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """The layers of a model, as transformers names them, in their order. Raises ValueError if it names none."""
    kinds = set(cast("list[str] | None", getattr(model, "_no_split_modules", None)) or ())
    found = [module for module in model.modules() if type(module).__name__ in kinds]
    if not found:
        raise ValueError(
            f"{type(model).__name__} does not say which of its modules are layers (_no_split_modules), so they can "
            "neither be divided among ranks nor computed again; expected learner.ranks = 1 and learner.recompute = 0"
        )
    return found
