"""Size limits of a message, so that no batch is ever formed that could not be sent.

In a batch, a rollout takes up its tokens and all tokens before them (9 bytes each, and 4 for each teacher), its top-k
payloads and a part of the header. A rollout that does not fit waits for the next batch. One that fits into no message
is masked as `too_large`. Tickets and score leases are spread over as many messages as they need.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

import msgspec

from stillhouse.buffer.rollouts import RolloutState
from stillhouse.buffer.tokens import Array
from stillhouse.protocol.codec import MAX_FRAME_BYTES, MAX_HEADER_BYTES, MAX_ITEMS, MAX_MESSAGE_BYTES

BATCH_BYTES: Final = MAX_MESSAGE_BYTES - MAX_HEADER_BYTES
"""Room for all arrays of a batch."""
HEADER_BYTES: Final = MAX_HEADER_BYTES // 2
"""Room in the header for all items; the rest is for the snapshot."""
TOKEN_BYTES: Final = 9
"""Bytes of a token: id, behaviour log-prob and train mask."""
SCORE_BYTES: Final = 4
"""Bytes of a token's log-prob, for each teacher."""
_ITEM_HEADER_BYTES: Final = 512
_ENTRY_BYTES: Final = 32
"""Upper bound for a version span, a branch or a top-k piece."""
_CHARACTER_BYTES: Final = 4
MOST_ROLLOUTS: Final = HEADER_BYTES // (_ITEM_HEADER_BYTES + _ENTRY_BYTES)
"""More rollouts than this do not fit into a batch, however short they are."""


PartT = TypeVar("PartT", bound=msgspec.Struct)
_encode = msgspec.msgpack.Encoder().encode


class Size(NamedTuple):
    """Bytes that one rollout takes up in a batch."""

    array_bytes: int
    largest_frame_bytes: int
    header_bytes: int


def size_of(rollout: RolloutState) -> Size:
    """Size of a rollout with everything that it could release, and its whole context."""
    task, n_tokens = rollout.slot.task.task, rollout.length
    payloads = [len(payload) for segment in rollout.offered_segments() for payload in segment.top_k.values()]
    payloads += [len(segment.experts) for segment in rollout.segments if segment.experts]
    scores_bytes = SCORE_BYTES * len(task.teachers) * n_tokens
    n_entries = (
        len(payloads)
        + len(rollout.branches)
        + len(rollout.turn_rewards)
        + sum(len(segment.spans) for segment in rollout.segments)
    )
    names = len(task.tag) + sum(map(len, task.teachers)) + len(rollout.finish_reason or "")
    return Size(
        array_bytes=TOKEN_BYTES * n_tokens + scores_bytes + sum(payloads),
        largest_frame_bytes=max(4 * n_tokens, scores_bytes, sum(payloads)),
        header_bytes=_ITEM_HEADER_BYTES + _CHARACTER_BYTES * names + _ENTRY_BYTES * n_entries,
    )


class Room:
    """Room that is left in one message."""

    def __init__(self) -> None:
        self._array_bytes, self._header_bytes, self._items = BATCH_BYTES, HEADER_BYTES, MAX_ITEMS

    def take(self, sizes: Sequence[Size]) -> bool:
        """Reserve room for rollouts that leave together. False, and nothing is reserved, if they do not fit."""
        array_bytes = self._array_bytes - sum(size.array_bytes for size in sizes)
        header_bytes = self._header_bytes - sum(size.header_bytes for size in sizes)
        items = self._items - len(sizes)
        frames_fit = all(size.largest_frame_bytes <= MAX_FRAME_BYTES for size in sizes)
        if min(array_bytes, header_bytes, items) < 0 or not frames_fit:
            return False
        self._array_bytes, self._header_bytes, self._items = array_bytes, header_bytes, items
        return True


def fits_alone(sizes: Sequence[Size]) -> bool:
    """Return True if these fit together into an empty message."""
    return Room().take(sizes)


def in_messages(
    parts: Iterable[tuple[PartT, Sequence[Array]]],
) -> Iterator[tuple[tuple[PartT, ...], tuple[Array, ...]]]:
    """Distribute parts, each with its frames, over messages, in order. A single part always fits: it arrived in one
    message."""
    room, chosen, arrays = Room(), list[PartT](), list[Array]()
    for part, frames in parts:
        sizes = [array.nbytes for array in frames]
        size = Size(sum(sizes), max(sizes), len(_encode(part)))
        if not room.take([size]):
            yield tuple(chosen), tuple(arrays)
            room, chosen, arrays = Room(), [], []
            room.take([size])
        chosen.append(part)
        arrays += frames
    if chosen:
        yield tuple(chosen), tuple(arrays)
