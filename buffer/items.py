"""Wire form of what the learner is sent: items of rollouts with their arrays, and the batch that it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from stillhouse.buffer.rollouts import HeldSegment, RolloutState
from stillhouse.buffer.tokens import Array
from stillhouse.protocol.messages import EXPERT_IDS, BatchItem, Settled, TopKPiece, WeightVersion


class Piece(NamedTuple):
    """Segments of one rollout that are leased together."""

    rollout: RolloutState
    segments: tuple[HeldSegment, ...]


@dataclass(slots=True, eq=False, repr=False)
class LeasedBatch:
    """A batch that the learner holds, kept complete so that a repeated request gets the same answer."""

    batch_id: int
    version: WeightVersion
    pieces: tuple[Piece, ...]
    items: tuple[BatchItem, ...]
    arrays: tuple[Array, ...]
    staleness: dict[int, int]
    settled: tuple[Settled, ...]
    n_tokens: int

    def contents(self) -> tuple[Any, ...]:
        """Contents for an image. Of the arrays, it has those that do not follow from the rollouts."""
        derived = self._derived()
        same = [array.tobytes() == own.tobytes() for array, own in zip(derived, self.arrays, strict=False)]
        others = tuple(self.arrays[i] for i in range(len(self.arrays)) if not (i < len(same) and same[i]))
        return (
            *(self.batch_id, self.version, self.pieces, self.items, np.array(same, np.uint8), others),
            *(self.staleness, self.settled, self.n_tokens),
        )

    def fill(self, contents: Sequence[Any]) -> None:
        """Fill a batch that was made without `__init__` with what `contents` returned, after its rollouts."""
        self.batch_id, self.version, self.pieces, self.items, same, others, *rest = contents
        self.staleness, self.settled, self.n_tokens = rest
        derived, left = self._derived(), iter(others)
        kept = [array if is_same else next(left) for array, is_same in zip(derived, same, strict=False)]
        self.arrays = (*kept, *left)

    def _derived(self) -> list[Array]:
        """The arrays as they follow from the rollouts that are not over."""
        pairs = zip(self.pieces, self.items, strict=False)  # witnesses have an item only
        return [array for piece, item in pairs for array in item_arrays(*piece, item.end)]


def make_item(rollout: RolloutState, segments: tuple[HeldSegment, ...]) -> tuple[BatchItem, tuple[Array, ...]]:
    """The wire form of these segments of a rollout and everything before them: the item and its four or five arrays.

    If nothing open follows them the item extends to the rollout's end, so that it carries reward and finish reason."""
    last = segments[-1] if segments else None
    n_segments = len(rollout.segments)
    if last is not None and not (rollout.closed and all(s.state.settled for s in rollout.segments[last.index + 1 :])):
        n_segments = last.index + 1
    end = rollout.segments[n_segments - 1].end
    pieces = tuple(piece for piece, _ in _payloads(rollout, segments, end))
    task = rollout.slot.task.task
    final = rollout.final and n_segments == len(rollout.segments)
    item = BatchItem(
        rollout_id=rollout.rollout_id,
        task_id=task.task_id,
        sample_index=rollout.slot.sample_index,
        group_size=task.group_size,
        tag=task.tag,
        teachers=task.teachers,
        end=end,
        spans=rollout.spans(n_segments),
        final=final,
        finish_reason=rollout.finish_reason if final else None,
        reward=rollout.reward if final else None,
        n_turns=rollout.n_turns,
        branches=tuple(branch for branch in rollout.branches if branch.start < end),
        top_k=pieces,
        turn_rewards=rollout.turn_rewards if final else (),
    )
    return item, item_arrays(rollout, segments, end)


def item_arrays(rollout: RolloutState, segments: Iterable[HeldSegment], end: int) -> tuple[Array, ...]:
    """The arrays of an item that ends at `end`."""
    train_mask_T = np.zeros(end, np.uint8)
    for segment in segments:
        train_mask_T[segment.start : segment.end] = rollout.tokens.open_mask(segment.start, segment.end)
    payloads = [payload for _, payload in _payloads(rollout, segments, end)]
    tokens = rollout.tokens
    arrays = (tokens.ids(end), tokens.logprobs(end), train_mask_T, tokens.teacher_logprobs(end))
    return (*arrays, np.frombuffer(b"".join(payloads), np.uint8)) if payloads else arrays


def _payloads(rollout: RolloutState, segments: Iterable[HeldSegment], end: int) -> Iterator[tuple[TopKPiece, bytes]]:
    """Those of the segments, and the experts of all tokens before `end`."""
    for segment in segments:
        for pool_index, payload in sorted(segment.top_k.items()):
            yield TopKPiece(pool_index, segment.top_start, segment.top_end, len(payload)), payload
    for segment in rollout.segments:
        if segment.experts and segment.end <= end:
            yield TopKPiece(EXPERT_IDS, segment.start, segment.end, len(segment.experts)), segment.experts
