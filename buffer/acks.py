"""Acknowledges together what a turn accepted of one actor: one message for all its segments, in place of one for each.

Refusals stay messages of their own: each has a reason, and ends a rollout.
"""

from __future__ import annotations

from collections.abc import Iterable

from stillhouse.buffer.peers import Outgoing
from stillhouse.protocol.messages import SegmentAck, SegmentsAck


def acknowledged_together(outgoing: Iterable[Outgoing]) -> list[Outgoing]:
    """The messages of one turn, with one SegmentsAck per actor in the place of its first acknowledgement."""
    messages: list[Outgoing] = []
    places: dict[str, int] = {}
    segments: dict[str, dict[str, list[int]]] = {}
    for out in outgoing:
        ack = out.message
        if not isinstance(ack, SegmentAck) or ack.status == "rejected":
            messages.append(out)
            continue
        if out.name not in places:
            places[out.name] = len(messages)
            messages.append(out)
        segments.setdefault(out.name, {}).setdefault(ack.rollout_id, []).append(ack.index)
    for name, place in places.items():
        messages[place] = messages[place]._replace(message=SegmentsAck(segments[name]))
    return messages
