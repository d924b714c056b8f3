"""The plan of one forward of the generation engine: its tokens, and the cache cells that it fills.

    tokens of a step   | row 0 | row 1 | .. | row R-1 | prompt | prompt | ..     [T]

A joining request decodes its last prompt token as a row, while the tokens before it are prefilled in the same step.
Within each layer all keys are written before the rows attend, so the row sees its whole prompt.

Prompts of similar length form a bucket, in which each is padded to the longest, so that their attention is a view and
one kernel call. Padding is computed but never cached.

Legend: T tokens of a step, R rows that decode, W cache cells written, n tokens of one prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stillhouse.engines.torch.slots import RowWindow, row_windows
from stillhouse.models.packed_layout import Bucket, RowLayout, shortest_beside

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Tokens that only fill the cache, in one slot or in several that share a prompt."""

    ids: npt.NDArray[np.int32]
    """[n], n >= 1; cell i of each slot is filled by token i."""
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Made once per forward, read by every layer."""

    n_rows: int
    """R; row r lives in slot r."""
    ids_T: Tensor
    positions_T: Tensor
    row_windows: Sequence[RowWindow]
    """The rows in blocks, each with its window."""
    n_cells: int
    """Number of cells per slot that this step reads or writes."""
    cell_slots_W: Tensor
    cell_positions_W: Tensor
    cell_sources_W: Tensor | None
    """The token of the step that fills each cell; None = token w fills cell w."""
    prefill: RowLayout | None
    """The prompts after the rows, longest first, each bucket padded to one length."""


def plan_step(
    ids_R: Int64s, positions_R: Int64s, prefills: Sequence[Prefill], *, max_context: int, device: torch.device
) -> DecodeStep:
    """Rows take `ids_R` as input at `positions_R`; the cells before are filled already, or by a prefill of this step.

    On a CPU the step may be a view of the given arrays, valid until they change."""
    n_rows = len(ids_R)
    ids, positions, layout = ids_R, positions_R, None
    slots, cells, sources = np.arange(n_rows), positions_R, None
    if prefills:
        prefills = sorted(prefills, key=lambda prefill: -len(prefill.ids))
        padded = _padded_lengths([len(prefill.ids) for prefill in prefills])
        ids = np.concatenate((ids_R, _padded_ids(prefills, padded)))
        positions = np.concatenate((positions_R, *map(np.arange, padded)))
        layout = _layout(padded, device)
        fill_slots, fill_cells, fill_sources = _fills(prefills, padded, n_rows)
        slots = np.concatenate((slots, fill_slots))
        cells = np.concatenate((positions_R, fill_cells))
        sources = np.concatenate((np.arange(n_rows), fill_sources))
    windows = row_windows(positions_R + 1, max_context)
    n_cells = max(int(cells.max()) + 1, *(window.window for window in windows))

    def to_device(array: npt.NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return DecodeStep(
        n_rows=n_rows,
        ids_T=to_device(ids),
        positions_T=to_device(positions),
        row_windows=windows,
        n_cells=n_cells,
        cell_slots_W=to_device(slots),
        cell_positions_W=to_device(cells),
        cell_sources_W=None if sources is None else to_device(sources),
        prefill=layout,
    )


def _padded_lengths(lengths: Sequence[int]) -> list[int]:
    """The padded length of each prompt; `lengths` are in descending order."""
    padded: list[int] = []
    for length in lengths:
        longest = padded[-1] if padded else length
        padded.append(longest if length >= shortest_beside(longest) else length)
    return padded


def _padded_ids(prefills: Sequence[Prefill], padded: Sequence[int]) -> Int64s:
    ids = np.zeros(sum(padded), np.int64)
    end = 0
    for prefill, width in zip(prefills, padded, strict=True):
        ids[end : end + len(prefill.ids)] = prefill.ids
        end += width
    return ids


def _layout(padded: Sequence[int], device: torch.device) -> RowLayout:
    buckets: list[Bucket] = []
    start = 0
    for width in dict.fromkeys(padded):
        n_sequences = padded.count(width)
        end = start + n_sequences * width
        buckets.append(Bucket(start, end, n_sequences, width, None, None))
        start = end
    # The step has the positions: attention never reads those of the layout.
    return RowLayout(tuple(padded), tuple(buckets), torch.empty(0, dtype=torch.int64, device=device))


def _fills(prefills: Sequence[Prefill], padded: Sequence[int], n_rows: int) -> tuple[Int64s, Int64s, Int64s]:
    """Slot, position in the slot and source token of every cell that the prompts fill."""
    starts = n_rows + np.cumsum(padded) - padded
    shares = [(slot, len(p.ids), start) for p, start in zip(prefills, starts, strict=True) for slot in p.slots]
    lengths = [length for _, length, _ in shares]
    slots = np.repeat([slot for slot, _, _ in shares], lengths)
    cells = np.concatenate([np.arange(length) for length in lengths])
    return slots, cells, np.repeat([start for _, _, start in shares], lengths) + cells
