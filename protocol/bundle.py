"""Several small messages in one frame, on their way to the buffer.

A frame costs about 3 us at each end, whatever it holds, and a short segment has four. So a peer that has several small
messages to send puts them into one frame: a MessagePack array with one array per message, of that message's frames
as byte strings. The header of a message is a map, so the first byte tells the two apart. Nothing else changes: every
message in a bundle is decoded, refused, kept and acknowledged by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import msgspec

from stillhouse.protocol.codec import Frame

SMALL_BYTES: Final = 1 << 14
"""The largest message that is bundled. A larger one gains less by fewer frames than it loses by two more copies."""
BUNDLE_BYTES: Final = 1 << 16
"""The most bytes of messages in a bundle."""
BUNDLE_MESSAGES: Final = 64
"""The most messages in a bundle. The reader refuses more, so that a few bytes cannot make much work."""
_MAX_BYTES: Final = 2 * BUNDLE_BYTES
"""The longest bundle that is read; lengths of frames come on top of their bytes."""
_ARRAYS: Final = frozenset((*range(0x90, 0xA0), 0xDC, 0xDD))
"""First bytes of a MessagePack array."""

_encode = msgspec.msgpack.Encoder().encode
_decoder = msgspec.msgpack.Decoder(Annotated[list[list[bytes]], msgspec.Meta(min_length=1, max_length=BUNDLE_MESSAGES)])


def bundled(messages: Sequence[list[Frame]]) -> list[Frame]:
    """Frames of one multipart for messages that may be sent together (`protocol.outbox`), or for a single one."""
    if len(messages) == 1 and (len(messages[0]) == 1 or sum(map(len, messages[0])) > SMALL_BYTES):
        return messages[0]
    return [_encode(messages)]


def unbundled(frames: list[Frame]) -> Sequence[list[Frame]]:
    """The messages of one multipart. What is not a correct bundle stays as it is: the codec refuses it, as any frame
    that is not a header."""
    if len(frames) != 1 or not 0 < len(frames[0]) <= _MAX_BYTES or frames[0][0] not in _ARRAYS:
        return (frames,)
    try:
        return [list[Frame](message) for message in _decoder.decode(frames[0])]
    except (ValueError, RecursionError):
        return (frames,)
