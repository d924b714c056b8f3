"""What the routers of a mixture of experts chose at each cell of the embedded engine's slots, beside their keys and
values: what fills a cell again is recorded again, and what is copied is copied with it.

Legend: S slots, C cells of each, L layers with a router, K chosen experts, W cells that a forward pass fills.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.models.routing import Recording, expert_shape, prepare, under
from stillhouse.protocol.messages import ExpertShape
from stillhouse.protocol.payloads.expert_ids import MOST_EXPERTS, ExpertIds


class SlotExperts:
    def __init__(self, model: PreTrainedModel, shape: ExpertShape, n_slots: int, capacity: int) -> None:
        """Raises ValueError if the model's routers are not those of `shape`."""
        own = expert_shape(model)
        if own != shape or shape.experts > MOST_EXPERTS:
            raise ValueError(f"the experts of {shape} are asked for; this engine's model has {own}")
        prepare(model, shape)
        self.shape = shape
        self._ids_SCLK = np.zeros((n_slots, capacity, len(shape.layers), shape.chosen), np.uint16)

    @contextmanager
    def recording(self, slots_W: Tensor, positions_W: Tensor, sources_W: Tensor | None) -> Generator[None]:
        """Record a forward pass. `sources_W`: its token that fills each cell; None: token w fills cell w."""
        recorded = Recording(self.shape)
        with under(recorded):
            yield
        ids = recorded.ids if sources_W is None else recorded.ids[sources_W]
        self._ids_SCLK[slots_W.cpu().numpy(), positions_W.cpu().numpy()] = ids.cpu().numpy()

    def copy(self, sources: Sequence[int], targets: Sequence[int], n_tokens: int) -> None:
        self._ids_SCLK[list(targets), :n_tokens] = self._ids_SCLK[list(sources), :n_tokens]

    def of_tokens(self, slot: int, start: int, end: int) -> ExpertIds:
        """By token [start, end) of the slot's sequence, start >= 1: the choices at the cell before it. A copy."""
        return self._ids_SCLK[slot, start - 1 : end - 1].copy()
