"""What a process holds of named tensors: whole ones, or this rank's rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from stillhouse.models.transfer import Rows, host_copy, rows_of


@dataclass(frozen=True)
class Shares:
    tensors: Mapping[str, Tensor]
    """Whole ones, and this rank's rows of others."""
    rows: Mapping[str, Rows] = field(default_factory=dict[str, Rows])
    """The places of those rows; empty where all is whole."""

    @classmethod
    def copied(cls, named: Iterable[tuple[str, Tensor]]) -> Self:
        """Copies in host memory, one after the other."""
        tensors, rows = dict[str, Tensor](), dict[str, Rows]()
        for name, tensor in named:
            tensors[name] = host_copy(tensor)
            if (place := rows_of(tensor)) is not None:
                rows[name] = place
        return cls(tensors, rows)
