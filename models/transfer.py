"""Copies between host memory and a device, such that the host waits for a GPU only where it must.

torch's plain `.to("cuda")` from ordinary memory waits until everything queued before it is done, as `.item()`, `bool()`
and `nonzero()` do. `upload` only queues a copy; `read` waits, and sleeps meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor


def upload(values: Tensor | np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """The values on `device`. For a CPU, writable host memory is not copied. `values` on another device are copied by
    that device, in its stream order."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(np.require(values, requirements="W"))
    if device.type == "cuda" and tensor.device.type == "cpu":
        # torch keeps the pinned memory alive until the copy is done.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def whole(tensor: Tensor) -> Tensor:
    """A tensor in full. If ranks hold it in shares (torch.distributed.tensor.DTensor), all must ask at the same time;
    any other is returned as it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def share_of(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; of any but a sharded one, all of it."""
    local = getattr(tensor, "to_local", None)
    return tensor if local is None else local()


class Rows(NamedTuple):
    """The place of a rank's share in a tensor: consecutive rows of it."""

    first: int
    shape: tuple[int, ...]
    """Shape of the whole tensor."""


def rows_of(tensor: Tensor) -> Rows | None:
    """Which rows of a sharded tensor this process holds; None for any other, which is whole here. Raises ValueError
    for shares that are not rows."""
    chunks_of = getattr(tensor, "__create_chunk_list__", None)  # how torch.distributed.checkpoint asks, too
    if chunks_of is None:
        return None
    chunks = chunks_of()
    shape = tuple(tensor.shape)
    if len(chunks) != 1 or tuple(chunks[0].sizes)[1:] != shape[1:] or any(chunks[0].offsets[1:]):
        raise ValueError(f"a tensor of shape {shape} is shared out as {chunks}; expected consecutive rows on each rank")
    return Rows(int(chunks[0].offsets[0]), shape)


def host_copy(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, in new memory of the host."""
    own = share_of(tensor.detach())
    return torch.empty(own.shape, dtype=own.dtype).copy_(own)


@dataclass(frozen=True)
class Shares:
    """What a process holds of named tensors: whole ones, or this rank's rows."""

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


def own_rows(parameter: Tensor, values: Tensor) -> Tensor:
    """A view of those values of a whole tensor that this process holds of a parameter of its shape."""
    rows = rows_of(parameter)
    return values if rows is None else values[rows.first : rows.first + len(share_of(parameter.detach()))]


def read(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, after everything queued before it is done."""
    if tensor.device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # without `blocking` the thread keeps a core busy while it waits
        done.record(torch.cuda.current_stream(tensor.device))
        done.synchronize()
    return tensor.cpu()
