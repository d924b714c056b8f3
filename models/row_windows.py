"""Rows of similar length attend together, so that one long rollout does not make all others read its empty cells.

Rows are kept in blocks of falling length class (`SlotTable.arrange` moves the few that are out of place); a block then
attends over a window as long as its own longest row. No torch here.

Legend: R rows.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_FIRST_CLASS_TOKENS = 64
_CLASSES = _FIRST_CLASS_TOKENS * 2 ** np.arange(24)
"""Longest row of each class. Doubling: a rollout changes its class, and perhaps its row, only a few times."""
_WINDOW_STEP_TOKENS = 16
"""Windows grow in steps of this: few distinct shapes."""
_BLOCK_COST_CELLS = 256
"""What attention in one more block costs (calls into torch), in cells read by one row; measured on a CPU."""


class RowWindow(NamedTuple):
    """Rows [start, stop) look at cells [0, window) of their slots."""

    start: int
    stop: int
    window: int


def length_classes(lengths_R: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0 for the shortest rows. [R]"""
    return np.searchsorted(_CLASSES, lengths_R)


def row_windows(lengths_R: npt.NDArray[np.int64], max_context: int) -> list[RowWindow]:
    """Blocks over rows in their order, cut where the class falls and where that saves more than it costs; at least
    one, empty when there are no rows."""
    n_rows = len(lengths_R)
    if n_rows == 0:
        return [RowWindow(0, 0, min(_WINDOW_STEP_TOKENS, max_context))]
    cuts = [0, *(np.flatnonzero(np.diff(length_classes(lengths_R))) + 1).tolist(), n_rows]
    blocks: list[RowWindow] = []
    for start, stop in pairwise(cuts):
        window = min(window_of(int(lengths_R[start:stop].max())), max_context)
        if blocks and (stop - start) * (blocks[-1].window - window) < _BLOCK_COST_CELLS:
            former = blocks.pop()
            start, window = former.start, max(former.window, window)
        blocks.append(RowWindow(start, stop, window))
    return blocks


def window_of(length: int) -> int:
    """The smallest window that holds `length` cells."""
    return -(-length // _WINDOW_STEP_TOKENS) * _WINDOW_STEP_TOKENS
