"""Turns of the student in a rollout, for what counts by turn. No torch.

    tokens     p p p s s s e e s s e s          p prompt, s sampled, e environment
    turn             0 0 0     1 1   2

A turn is a run of sampled tokens, as one reads its branch. Where branches are written at the same time, the row has it
in several pieces, each of which follows the one before. Version spans say which tokens were sampled, so tokens that
were trained in an earlier batch, or masked, keep their turn.

The depth of a turn is the number of turns before it on its branch. A turn that begins in the middle of another one (the
student was asked again behind half of a response) is a turn of its own, and has the depth of that one.

Legend: L tokens of an item, N trained tokens of it, P pieces, V turns of it, U those with a trained token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from stillhouse.protocol.branches import path_to
from stillhouse.protocol.messages import Branch, TurnReward

if TYPE_CHECKING:
    from stillhouse.learner.batch import TrainItem  # loads torch

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]


class TurnPieces(NamedTuple):
    begin_P: Int64s
    """Offset of the first token, ascending."""
    turn_P: Int64s
    """Turns are numbered by their first piece."""

    def of(self, offsets: Int64s) -> Int64s:
        """The turn of each sampled token; of other tokens, that of the piece before them."""
        return self.turn_P[np.maximum(np.searchsorted(self.begin_P, offsets, side="right") - 1, 0)]

    @property
    def n_turns(self) -> int:
        return int(self.turn_P.max()) + 1 if len(self.turn_P) else 0


class EpisodeTurns(NamedTuple):
    """All turns of one item, trained or not."""

    begin_V: Int64s
    """Offset of the first token."""
    turn_N: Int64s
    """Index of each trained token's turn."""
    pieces: TurnPieces


class ItemTurns(NamedTuple):
    """Turns of one item that have a trained token."""

    turn_N: Int64s
    """Index of each trained token's turn."""
    depth_U: Int64s


def sampled_mask(train_item: TrainItem) -> Bools:
    """[L] The tokens that the student wrote."""
    sampled_L = train_item.train_mask_L.copy()
    for span in train_item.item.spans:
        sampled_L[span.start : span.end] = True
    return sampled_L


def pieces_of(sampled_L: Bools, branches: Sequence[Branch]) -> TurnPieces:
    begins_L = sampled_L.copy()
    begins_L[1:] &= ~sampled_L[:-1]
    for branch in branches:
        begins_L[branch.start] = sampled_L[branch.start]
    begin_P = np.flatnonzero(begins_L)
    turn_P, n_turns = np.empty(len(begin_P), np.int64), 0
    follows = {branch.start: branch.follows for branch in branches}
    for piece, begin in enumerate(begin_P.tolist()):
        behind = follows.get(begin, begin)  # a piece that begins no branch stands behind a token of the environment
        ends_there = behind > 0 and sampled_L[behind - 1] and not (sampled_L[behind] and not begins_L[behind])
        if ends_there:
            turn_P[piece] = turn_P[int(np.searchsorted(begin_P, behind - 1, side="right")) - 1]
        else:
            turn_P[piece], n_turns = n_turns, n_turns + 1
    return TurnPieces(begin_P, turn_P)


def episode_turns(train_item: TrainItem) -> EpisodeTurns:
    pieces = pieces_of(sampled_mask(train_item), train_item.item.branches)
    _, first = np.unique(pieces.turn_P, return_index=True)
    trained = np.flatnonzero(train_item.train_mask_L)
    return EpisodeTurns(pieces.begin_P[first], pieces.of(trained) if len(trained) else trained, pieces)


def turns_of(train_item: TrainItem) -> ItemTurns:
    of_episode, branches = episode_turns(train_item), train_item.item.branches
    turns_U, turn_N = np.unique(of_episode.turn_N, return_inverse=True)
    depth_U = turns_U
    if branches:
        sampled_L = sampled_mask(train_item)
        depth_U = np.array([_depth(branches, sampled_L, int(of_episode.begin_V[turn])) for turn in turns_U], np.int64)
    return ItemTurns(turn_N.reshape(-1), depth_U)


def turn_rewards(parts: Sequence[TurnReward], turns: EpisodeTurns, reward: float) -> Floats:
    """[V] The rewards by turn. What belongs to none is the last one's."""
    reward_V, rest = _by_turn(parts, turns, reward)
    reward_V[-1:] += rest
    return reward_V


def paid_rewards(train_item: TrainItem, turns: EpisodeTurns, reward: float) -> Floats:
    """[N] The reward that is paid at each trained token: that of a turn at its last one; for a turn without one, at the
    last before it on its path, or the first that follows it. What belongs to no turn is paid at the end of each path,
    as all paths of a rollout share its reward."""
    trained, before_N = np.flatnonzero(train_item.train_mask_L), train_item.before
    reward_V, rest = _by_turn(train_item.item.turn_rewards, turns, reward)
    paid_N = np.full(len(trained), rest)
    paid_N[before_N[before_N >= 0]] = 0.0
    lasts_V = dict(zip(turns.turn_N.tolist(), range(len(trained)), strict=True))  # of several, the last one stays
    for turn in np.flatnonzero(reward_V).tolist():
        at = lasts_V.get(turn)
        if at is None:
            at = _nearest(train_item.item.branches, trained, int(turns.begin_V[turn]))
        if at is not None:
            paid_N[at] += reward_V[turn]
    return paid_N


def _by_turn(parts: Sequence[TurnReward], turns: EpisodeTurns, reward: float) -> tuple[Floats, float]:
    reward_V = np.zeros(len(turns.begin_V))
    for part in parts:
        reward_V[turns.pieces.of(np.array([part.end - 1]))] += part.reward
    return reward_V, reward - sum(part.reward for part in parts)


def _nearest(branches: Sequence[Branch], trained: Int64s, begin: int) -> int | None:
    """The last trained token before `begin` on its path, else the first that is read behind it, if there is one."""
    for start, end in reversed(path_to(branches, begin)):
        last = int(np.searchsorted(trained, end)) - 1
        if last >= 0 and trained[last] >= start:
            return last
    follows = (any(start <= begin < end for start, end in path_to(branches, t)) for t in trained.tolist())
    return next((n for n, follow in enumerate(follows) if follow), None)


def _depth(branches: Sequence[Branch], sampled_L: Bools, start: int) -> int:
    """Runs of sampled tokens that end before the one at `start`."""
    before_P = np.concatenate([sampled_L[s:e] for s, e in path_to(branches, start + 1)])[:-1]
    return int((before_P[:-1] & ~before_P[1:]).sum())
