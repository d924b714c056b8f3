"""Numbers that are not finite, traced to the rollouts they came from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from learner.batch.packing import BatchError, Microbatch, TrainItem


class NonFiniteError(BatchError):
    """The forward or backward pass gave NaN or infinity. `rollout_ids` are those that do so by themselves; empty when
    only their sum does. The update did not happen."""


def refuse_nonfinite(
    value_N: Tensor, microbatch: Microbatch, items: Sequence[TrainItem], *, update: str, what: str
) -> None:
    """Raises NonFiniteError naming the rollouts. `update`: which it is; `what` the values are."""
    finite_N = torch.isfinite(value_N)
    if bool(finite_N.all()):
        return
    wrong = np.unique(microbatch.item_N[~finite_N.cpu().numpy()])
    culprits = [items[int(i)].item.rollout_id for i in wrong]
    raise NonFiniteError(
        f"{update}: the {what} of {int((~finite_N).sum())} tokens is not finite, in the rollouts {culprits}; it was "
        "not made (weights that have diverged give this for every rollout)",
        culprits,
    )
