"""Somebody who does not belong to the run knocks at the buffer's door: other versions, runs, vocabularies, garbage."""

from __future__ import annotations

import time
from random import Random
from typing import Final

import zmq

from stillhouse.protocol.codec import decode, encode
from stillhouse.protocol.messages import PROTOCOL_VERSION, Heartbeat, Hello, Message, Refused
from stillhouse.protocol.sockets import checksum
from tests.patience import PATIENCE_S

ANSWER_S: Final = 1.5
"""The buffer sends at most one refusal a second per connection, so each connection asks once."""
"""Seconds for which a restarting buffer may leave strangers without any answer."""


def knock(address: str, rng: Random) -> list[str]:
    """The codes of the refusals that came back; strangers come again until there was one."""
    deadline_s = time.monotonic() + PATIENCE_S
    codes: list[str] = []
    while not codes and time.monotonic() < deadline_s:
        codes = _knock_once(address, rng)
    return codes


def _knock_once(address: str, rng: Random) -> list[str]:
    """Send one kind of nonsense per connection. Raises AssertionError if the buffer lets one in."""
    codes: list[str] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        for frames in _unwelcome(rng):
            with context.socket(zmq.DEALER) as door:
                door.linger = 0
                door.connect(address)
                door.send_multipart(frames)
                if door.poll(round(ANSWER_S * 1000)):
                    answer = decode(door.recv_multipart()[:-1]).message
                    assert isinstance(answer, Refused), f"a stranger was answered {type(answer).__name__}"
                    codes.append(answer.code)
    finally:
        context.term()
    return codes


def _unwelcome(rng: Random) -> list[list[bytes]]:
    name = f"actor-{rng.randrange(4)}"
    version = Hello("actor", name, "x", "no such run", "ab" * 32, protocol_version=PROTOCOL_VERSION + 1)
    messages: list[Message] = [version, Hello("actor", name, "x", "no such run", "ab" * 32), Heartbeat(None, {}, 0)]
    junk = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randint(1, 4))]
    encoded = [list(map(bytes, encode(message))) for message in messages]
    return [*[[*frames, checksum(frames)] for frames in encoded], junk]
