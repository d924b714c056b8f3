"""The batch of the next step, decoded and packed on another thread while the present one trains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stillhouse.learner.batch import BatchError, PackedBatch, TrainItem, pack

log = logging.getLogger(__name__)


class _Packed(NamedTuple):
    items: Sequence[TrainItem]
    """As they were given, that is without their payloads decoded."""
    batch: PackedBatch


class PackAhead:
    """Holds the batches of steps that have not begun. `make` and `take` may be called from different threads."""

    def __init__(self, read: Callable[[Sequence[TrainItem], int], Sequence[TrainItem]], pack_tokens: int) -> None:
        """`read`: see `StepLoss.read`."""
        self._read = read
        self._pack_tokens = pack_tokens
        self._packed: dict[int, _Packed] = {}

    def make(self, items: Sequence[TrainItem], step: int) -> None:
        """Decode and pack the items of the step from `step` on. What is wrong with them is left to the step itself,
        which finds it again."""
        try:
            self._packed[step] = _Packed(items, pack(self._read(items, step), self._pack_tokens))
        except BatchError as error:
            log.info("the batch of step %d is not packed ahead: %s", step + 1, error)

    def take(self, items: Sequence[TrainItem], step: int) -> PackedBatch | None:
        """What was made of these items for this step; None if nothing was, or if other tokens are to be trained. The
        items' rewards may differ: they are not in the packs. Forgets what was made for this step and earlier ones."""
        packed = self._packed.get(step)
        for passed in [made for made in tuple(self._packed) if made <= step]:  # a copy in one go: `make` may add one
            del self._packed[passed]
        if packed is None or len(packed.items) != len(items):
            return None
        same = all(a.train_mask_L is b.train_mask_L for a, b in zip(packed.items, items, strict=True))
        return packed.batch if same else None
