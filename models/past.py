"""Keys and values of tokens that a packed forward does not run again, because an earlier forward kept them.

    sequence   p p p p p | n n n        p: its past, attended to only; n: tokens of this forward

Legend: n tokens, P tokens of a past, L tokens of a sequence in this forward, G key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Cells:
    """Keys and values of consecutive tokens, ([G, n, D], [G, n, D of values]) by layer. A forward fills them."""

    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict[int, tuple[Tensor, Tensor]])

    def fill(self, layer: int, key_GND: Tensor, value_GND: Tensor) -> None:
        """Copy: a view would keep the tensors of the whole forward alive."""
        self.layers[layer] = (
            key_GND.detach().clone(memory_format=torch.contiguous_format),
            value_GND.detach().clone(memory_format=torch.contiguous_format),
        )

    @property
    def nbytes(self) -> int:
        return sum(key.nbytes + value.nbytes for key, value in self.layers.values())


class CellSpan(NamedTuple):
    """The first `n_tokens` of some cells."""

    cells: Cells
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Past:
    """All tokens before a sequence, in order; the first has position 0."""

    pieces: tuple[CellSpan, ...]

    @property
    def n_tokens(self) -> int:
        return sum(piece.n_tokens for piece in self.pieces)

    def before(self, layer: int, key_GLD: Tensor, value_GLD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the past and then of the sequence, [G, P + L, D]."""
        known = [(piece.cells.layers[layer], piece.n_tokens) for piece in self.pieces]
        keys = [key[:, :n] for (key, _), n in known]
        values = [value[:, :n] for (_, value), n in known]
        return torch.cat([*keys, key_GLD], dim=1), torch.cat([*values, value_GLD], dim=1)


class CacheUse(NamedTuple):
    """What a sequence of a packed forward continues, and what is kept of it."""

    past: Past | None = None
    cells: Cells | None = None
    """Filled with its last `keep_last` tokens."""
    keep_last: int = 0
