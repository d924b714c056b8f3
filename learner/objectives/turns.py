"""Turns of the student in a rollout, for losses and rewards that count by turn.

    tokens     p p p s s s e e s s e s          p prompt, s sampled, e environment
    turn             0 0 0     1 1   2

A turn is a run of sampled tokens on one branch. Version spans say which tokens were sampled, so tokens that were
trained in an earlier batch, or masked, keep their turn. The depth of a turn is the number of turns before it, as one
reads its branch from the beginning. A turn that continues another one in the middle of its tokens has the depth of that
one.

Legend: L tokens of an item, N trained tokens (of an item, or of the batch in the order of the items), U turns with a
trained token, R items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.batch import TrainItem
from protocol.branches import path_to
from protocol.messages import Branch

Int64s = npt.NDArray[np.int64]


class ItemTurns(NamedTuple):
    """Turns of one item that have a trained token, by their place in the row."""

    turn_N: Int64s
    """Index of each trained token's turn."""
    depth_U: Int64s
    end_U: Int64s
    """Offset behind the turn's last sampled token, trained or not."""


class Turns(NamedTuple):
    """Those of a whole batch. int64."""

    turn_N: Tensor
    tokens_U: Tensor
    """Trained tokens of the turn."""
    rollout_U: Tensor
    """Index of its item."""
    depth_U: Tensor


def sampled_mask(train_item: TrainItem) -> npt.NDArray[np.bool_]:
    """[L] The tokens that the student wrote."""
    sampled_L = train_item.train_mask_L.copy()
    for span in train_item.item.spans:
        sampled_L[span.start : span.end] = True
    return sampled_L


def turns_of(train_item: TrainItem) -> ItemTurns:
    branches, sampled_L = train_item.item.branches, sampled_mask(train_item)
    begins_L = sampled_L.copy()
    begins_L[1:] &= ~sampled_L[:-1]
    for branch in branches:
        begins_L[branch.start] = sampled_L[branch.start]
    run_L = np.cumsum(begins_L) - 1
    runs_U, turn_N = np.unique(run_L[train_item.train_mask_L], return_inverse=True)
    starts = np.flatnonzero(begins_L)
    ends = np.flatnonzero(sampled_L & ~np.append(sampled_L[1:] & ~begins_L[1:], False)) + 1
    depth_U = runs_U if not branches else np.array([_depth(branches, sampled_L, int(starts[u])) for u in runs_U])
    return ItemTurns(turn_N.reshape(-1).astype(np.int64), depth_U.astype(np.int64), ends[runs_U].astype(np.int64))


def batch_turns(items: Sequence[TrainItem]) -> Turns:
    each = [turns_of(train_item) for train_item in items]
    counts = [len(one.depth_U) for one in each]
    firsts = np.cumsum([0, *counts[:-1]])
    none = np.zeros(0, np.int64)
    turn_N = np.concatenate([none, *(one.turn_N + first for one, first in zip(each, firsts, strict=True))])
    return Turns(
        turn_N=torch.from_numpy(turn_N),
        tokens_U=torch.from_numpy(np.bincount(turn_N, minlength=sum(counts))),
        rollout_U=torch.from_numpy(np.repeat(np.arange(len(each)), counts)),
        depth_U=torch.from_numpy(np.concatenate([none, *(one.depth_U for one in each)])),
    )


def _depth(branches: Sequence[Branch], sampled_L: npt.NDArray[np.bool_], start: int) -> int:
    """Runs of sampled tokens that end before the one at `start`."""
    before_P = np.concatenate([sampled_L[s:e] for s, e in path_to(branches, start + 1)])[:-1]
    return int((before_P[:-1] & ~before_P[1:]).sum())
