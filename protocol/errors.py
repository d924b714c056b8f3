"""Every error that the protocol raises, in one tree whose branches say whose fault it is.

ProtocolError
├── LocalProtocolError          our fault: a bug on this side of the wire
│   ├── EncodeError                 message and arrays do not fit each other, or exceed the size limits
│   ├── NotConnected                the client was used before `connect` or after `close`
│   ├── AddressUnusable             nobody can listen at this address, or somebody does
│   ├── KeysUnusable                the files with this process's keys are missing, broken, or open to others
│   └── MessageRefused              the buffer refused a message that we sent after the handshake
├── RemoteProtocolError         the peer's fault: what it sent cannot be; carries a `Refused` code to answer with
│   ├── DamagedMessage              not what was sent: the link changed it; a new connection brings it again
│   ├── MalformedMessage            not a message of this protocol, or its frames do not fit its header
│   ├── MessageTooLarge             above the size limits
│   └── UnexpectedMessage           a fine message at the wrong moment or from the wrong role
├── HandshakeRefused            the two do not belong together (run, vocabulary, version, name), or no longer (the
│                               buffer's journal is behind what it told us): exit, do not retry
└── LinkError                   nobody's fault: the network, or a process that is gone or too slow
    ├── ConnectTimeout              the buffer never answered the first Hello
    ├── PeerLost                    the buffer fell silent and could not be reached again
    └── SendTimeout                 too much is unacknowledged, and the buffer does not catch up
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from protocol.messages import Refused

RefusalCode: TypeAlias = Literal[
    "protocol_version",
    "run_id",
    "vocab_fingerprint",
    "not_hello_first",
    "damaged",
    "malformed",
    "too_large",
    "role",
    "key",
    "duplicate_name",
    "peer_ahead",
]


class ProtocolError(Exception):
    """Root of the tree."""


class LocalProtocolError(ProtocolError):
    """Our fault."""


class EncodeError(LocalProtocolError):
    """A message that must not be put on the wire: wrong number, dtype or shape of arrays, or too large."""


class NotConnected(LocalProtocolError):
    """The client is not connected yet, or closed already."""


class MessageRefused(LocalProtocolError):
    """The buffer refused a message of ours after the handshake. Sending it again would not help."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(_told(refused))
        self.refused = refused


class AddressUnusable(LocalProtocolError):
    """Nobody can listen there: not an address of this machine, or somebody listens already."""


class KeysUnusable(LocalProtocolError):
    """Names the file and what is wrong with it; never quotes it."""


class RemoteProtocolError(ProtocolError):
    """The peer's fault. `got` and `expected` go into the `Refused` that answers it."""

    code: ClassVar[RefusalCode] = "malformed"

    def __init__(self, message: str, *, got: str, expected: str) -> None:
        super().__init__(f"{message}: got {got}, expected {expected}")
        self.message = message
        self.got = got
        self.expected = expected


class DamagedMessage(RemoteProtocolError):
    """Its checksum does not fit: the link's fault, or that of a peer that computes it otherwise."""

    code: ClassVar[RefusalCode] = "damaged"


class MalformedMessage(RemoteProtocolError):
    """Bytes that are no message of this protocol, or frames that do not fit their header."""


class MessageTooLarge(RemoteProtocolError):
    """Above one of the size limits of `protocol.codec`."""

    code: ClassVar[RefusalCode] = "too_large"


class UnexpectedMessage(RemoteProtocolError):
    """A well-formed message that this peer may not send, or not now."""

    code: ClassVar[RefusalCode] = "role"


class HandshakeRefused(ProtocolError):
    """The buffer will never accept this process: exit non-zero, do not retry."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(_told(refused))
        self.refused = refused


class LinkError(ProtocolError):
    """The link, not a message."""


class ConnectTimeout(LinkError):
    """No Welcome and no refusal within the connect timeout."""


class PeerLost(LinkError):
    """The buffer was silent for too long, and reconnecting failed."""


class SendTimeout(LinkError):
    """No room for another message within the send timeout, because too many bytes wait for acknowledgement."""


def _told(refused: Refused) -> str:
    return f"refused ({refused.code}): {refused.message}; got {refused.got or 'nothing'}, expected {refused.expected}"
