"""Every error that the protocol raises, in one tree whose branches tell whose fault it is.

ProtocolError
├── LocalProtocolError          our fault: a bug on this side of the wire
│   ├── EncodeError                 message and arrays do not fit each other, or exceed the size limits
│   ├── NotConnected                the client was used before `connect` or after `close`
│   ├── AddressUnusable             not an address of this machine, or already in use
│   ├── KeysUnusable                the files with this process's keys are missing, broken, or open to others
│   └── MessageRefused              the buffer refused a message that we sent after the handshake
├── RemoteProtocolError         the peer's fault: it sent something wrong; carries the `Refused` code for the answer
│   ├── DamagedMessage              the link changed the message; a new connection brings it again
│   ├── MalformedMessage            not a message of this protocol, or its frames do not fit its header
│   ├── MessageTooLarge             above the size limits
│   └── UnexpectedMessage           a valid message at the wrong moment or from the wrong role
├── HandshakeRefused            the two do not belong together (run, vocabulary, version, name), or no longer do (the
│                               buffer's journal lacks messages that we received): exit, do not retry
└── LinkError                   no side's fault: the network, or a process that is gone or too slow
    ├── ConnectTimeout              the buffer never answered the first Hello
    ├── PeerLost                    the buffer fell silent and could not be reached again
    └── SendTimeout                 too much is unacknowledged, and the buffer does not catch up
"""

from __future__ import annotations

from typing import ClassVar

from stillhouse.protocol.messages import RefusalCode, Refused


class ProtocolError(Exception):
    """Root of the tree."""


class LocalProtocolError(ProtocolError):
    """Our fault."""


class EncodeError(LocalProtocolError):
    """A message that must not be sent: wrong number, dtype or shape of arrays, or too large."""


class NotConnected(LocalProtocolError):
    """The client is not connected yet, or closed already."""


class MessageRefused(LocalProtocolError):
    """The buffer refused a message of ours after the handshake. Sending it again would not help."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(_refusal_text(refused))
        self.refused = refused


class AddressUnusable(LocalProtocolError):
    """Not an address of this machine, or another process already listens there."""


class KeysUnusable(LocalProtocolError):
    """Key files are unusable. The message names the file and the problem, and never quotes its contents."""


class RemoteProtocolError(ProtocolError):
    """The peer's fault. `got` and `expected` go into the `Refused` that answers it."""

    code: ClassVar[RefusalCode] = "malformed"

    def __init__(self, message: str, *, got: str, expected: str) -> None:
        super().__init__(f"{message}: got {got}, expected {expected}")
        self.message = message
        self.got = got
        self.expected = expected


class DamagedMessage(RemoteProtocolError):
    """The checksum is wrong: the link's fault, or that of a peer that computes it differently."""

    code: ClassVar[RefusalCode] = "damaged"


class MalformedMessage(RemoteProtocolError):
    """Bytes that are not a message of this protocol, or frames that do not fit their header."""


class MessageTooLarge(RemoteProtocolError):
    """Above one of the size limits of `protocol.codec`."""

    code: ClassVar[RefusalCode] = "too_large"


class UnexpectedMessage(RemoteProtocolError):
    """A well-formed message that this peer may not send at all, or not now."""

    code: ClassVar[RefusalCode] = "role"


class HandshakeRefused(ProtocolError):
    """The buffer will never accept this process: exit non-zero, do not retry."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(_refusal_text(refused))
        self.refused = refused


class LinkError(ProtocolError):
    """The link failed."""


class ConnectTimeout(LinkError):
    """No Welcome and no refusal within the connect timeout."""


class PeerLost(LinkError):
    """The buffer was silent for too long, and reconnecting failed."""


class SendTimeout(LinkError):
    """The send timeout passed without room for the message: too many bytes wait for acknowledgement."""


def _refusal_text(refused: Refused) -> str:
    return f"refused ({refused.code}): {refused.message}; got {refused.got or 'nothing'}, expected {refused.expected}"
