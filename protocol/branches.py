"""Reading a rollout that branches: which of its tokens are read before a given one.

branches  (7, 5), (9, 0)           tokens   0 1 2 3 4 5 6 | 7 8 | 9 10
path to 7                                   0 1 2 3 4 5 6
path to 9                                   0 1 2 3 4 7 8           behind its first 5 tokens
path to 11                                  9 10                    a root
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from stillhouse.protocol.messages import Branch


def path_to(branches: Sequence[Branch], end: int) -> list[tuple[int, int]]:
    """Ranges [start, end) of the rollout, in reading order, of the tokens up to and including token `end` - 1.
    `branches`: by ascending start, each with 0 <= follows < start."""
    ranges: list[tuple[int, int]] = []
    while end > 0:
        i = bisect_left(branches, end, key=_start)
        branch = branches[i - 1] if i else Branch(0, 0)
        ranges.append((branch.start, end))
        end = branch.follows
    return ranges[::-1]


def _start(branch: Branch) -> int:
    return branch.start
