"""What an actor and its processes for environments say to each other: MessagePack with its length before it, over a
pair of sockets."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias, cast

import msgspec
import numpy as np

from stillhouse.actors.config import EnvConfig
from stillhouse.actors.episodes import EpisodeEnded, EpisodeEvent, EpisodeStart
from stillhouse.actors.failures import Failure
from stillhouse.actors.running_episode import Ask, EpisodeEnd, GiveUp, Response

_LENGTH: Final = struct.Struct("<I")


class Setup(NamedTuple):
    """The first message to a process."""

    environments: dict[str, EnvConfig]
    student: str
    """Model folder or hub name; its tokenizer is loaded."""
    max_threads: int
    stop_token_ids: tuple[int, ...]
    max_context_tokens: int
    silence_s: float
    """The process ends itself when its main loop stands still for this long, after it wrote where to stderr."""


class Deliver(NamedTuple):
    """See Episodes.deliver."""

    rollout_id: str
    number: int
    response: Response


class Refuse(NamedTuple):
    """See Episodes.refuse."""

    rollout_id: str
    number: int
    reason: str


class Finish(NamedTuple):
    """See Episodes.finish."""

    rollout_id: str


class Stop(NamedTuple):
    """Close all episodes and end."""


Command: TypeAlias = Setup | EpisodeStart | Deliver | Refuse | Finish | Stop


class Ready(NamedTuple):
    """The environments are imported."""

    agents: frozenset[str]


class Gauges(NamedTuple):
    """Said at least once a second."""

    values: dict[str, float]


class GaveUp(NamedTuple):
    """The process ends: its environments cannot be imported, or too many of them do not return."""

    reason: str


class _EndedWell(NamedTuple):
    rollout_id: str
    end: EpisodeEnd


class _EndedBadly(NamedTuple):
    rollout_id: str
    end: Failure


Said: TypeAlias = Ready | Gauges | GaveUp | EpisodeEvent
_KINDS: Final[dict[str, Any]] = {
    kind.__name__: kind
    for kind in (
        *(Setup, EpisodeStart, Deliver, Refuse, Finish, Stop),
        *(Ready, Gauges, GaveUp, Ask, GiveUp, _EndedWell, _EndedBadly),
    )
}


class Link:
    """One end. One thread may send while another receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, message: Command | Said) -> None:
        """Raises OSError when the other end is gone."""
        sent: Any = message
        if isinstance(message, EpisodeEnded):
            kind = _EndedBadly if isinstance(message.end, Failure) else _EndedWell
            sent = kind(message.rollout_id, cast(Any, message.end))
        body = msgspec.msgpack.encode((type(sent).__name__, sent), enc_hook=_encoded)
        self._end.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Command | Said:
        """Raises EOFError when the other end is gone, OSError, and msgspec.MsgspecError for what is no message."""
        (n,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        kind, body = msgspec.msgpack.decode(self._exactly(n), type=tuple[str, msgspec.Raw])
        if kind not in _KINDS:
            raise msgspec.DecodeError(f"got a message {kind[:40]!r}, expected one of {', '.join(_KINDS)}")
        message = msgspec.msgpack.decode(body, type=_KINDS[kind], dec_hook=_decoded)
        return EpisodeEnded(*message) if isinstance(message, _EndedWell | _EndedBadly) else message

    def close(self) -> None:
        self._end.close()

    def _exactly(self, n: int) -> bytes:
        parts: list[bytes] = []
        while n:
            part = self._end.recv(min(n, 1 << 20))
            if not part:
                raise EOFError
            parts.append(part)
            n -= len(part)
        return b"".join(parts)


def _encoded(value: Any) -> Any:
    match value:
        case np.ndarray():
            array = cast("np.ndarray[Any, Any]", value)
            return (array.dtype.str, array.tobytes())
        case np.generic():
            return value.item()
        case Mapping():
            return dict(cast("Mapping[Any, Any]", value))
        case _:
            raise NotImplementedError(f"no message has a {type(value).__name__}")


def _decoded(kind: Any, value: Any) -> Any:
    if (getattr(kind, "__origin__", kind)) is np.ndarray:
        dtype, data = cast("tuple[str, bytes]", value)
        if dtype not in ("<i4", "<f4"):
            raise ValueError(f"got an array of type {dtype!r}, expected int32 or float32")
        return np.frombuffer(data, dtype).copy()
    raise NotImplementedError(f"no message has a {kind}")
