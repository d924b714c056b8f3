"""How much fits into one message to the learner, so that a batch which cannot be sent is never formed.

A rollout of a batch takes its tokens and all before them (9 bytes each, and 4 for each teacher), its top-k payloads,
and a part of the header. What does not fit waits for the next batch; what fits into none is masked as `too_large`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from buffer.rollouts import Rollout
from protocol.codec import MAX_FRAME_BYTES, MAX_HEADER_BYTES, MAX_ITEMS, MAX_MESSAGE_BYTES

BATCH_BYTES: Final = MAX_MESSAGE_BYTES - MAX_HEADER_BYTES
"""Of all arrays."""
HEADER_BYTES: Final = MAX_HEADER_BYTES // 2
"""Of all items; the rest is for the snapshot."""
TOKEN_BYTES: Final = 9
"""Id, behaviour log-prob and train mask."""
SCORE_BYTES: Final = 4
"""For each teacher."""
_ITEM_HEADER_BYTES: Final = 512
_ENTRY_BYTES: Final = 32
"""At most, of a version span or a top-k piece."""
_CHARACTER_BYTES: Final = 4


class Size(NamedTuple):
    """What one rollout takes."""

    array_bytes: int
    largest_frame_bytes: int
    header_bytes: int


def size_of(rollout: Rollout) -> Size:
    """With all that it could let go, and all its context."""
    task, n_tokens = rollout.slot.task.task, rollout.length
    payloads = [len(payload) for segment in rollout.offered_segments() for payload in segment.top_k.values()]
    scores_bytes = SCORE_BYTES * len(task.teachers) * n_tokens
    n_entries = len(payloads) + sum(len(segment.spans) for segment in rollout.segments)
    names = len(task.tag) + sum(map(len, task.teachers)) + len(rollout.finish_reason or "")
    return Size(
        array_bytes=TOKEN_BYTES * n_tokens + scores_bytes + sum(payloads),
        largest_frame_bytes=max(4 * n_tokens, scores_bytes, sum(payloads)),
        header_bytes=_ITEM_HEADER_BYTES + _CHARACTER_BYTES * names + _ENTRY_BYTES * n_entries,
    )


class Room:
    """What is left of one message."""

    def __init__(self) -> None:
        self._array_bytes, self._header_bytes, self._items = BATCH_BYTES, HEADER_BYTES, MAX_ITEMS

    def take(self, sizes: Sequence[Size]) -> bool:
        """For rollouts that leave together: False, and nothing is taken, if they do not fit."""
        array_bytes = self._array_bytes - sum(size.array_bytes for size in sizes)
        header_bytes = self._header_bytes - sum(size.header_bytes for size in sizes)
        items = self._items - len(sizes)
        frames_fit = all(size.largest_frame_bytes <= MAX_FRAME_BYTES for size in sizes)
        if min(array_bytes, header_bytes, items) < 0 or not frames_fit:
            return False
        self._array_bytes, self._header_bytes, self._items = array_bytes, header_bytes, items
        return True


def fits_alone(sizes: Sequence[Size]) -> bool:
    """Whether these could leave together, in a message of their own."""
    return Room().take(sizes)
