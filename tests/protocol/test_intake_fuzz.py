"""Hostile frames: whatever arrives, the decoder and the server refuse it by a reason, and go on."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import decode, encode
from stillhouse.protocol.errors import RemoteProtocolError
from stillhouse.protocol.server import PeerServer
from stillhouse.protocol.server_events import Event, FromPeer
from stillhouse.protocol.sockets import new_socket, receive_frames, send_frames
from tests.patience import PATIENCE_S, Limit

ROOT = Path(__file__).parents[2]
RUN, VOCAB = "run-1", "ab" * 32

numbers = st.integers(-3, 8) | st.integers(-(2**63), 2**63 - 1)
words = st.text(max_size=20)
runs = st.just(RUN)
versions = st.builds(m.WeightVersion, numbers, numbers)
spans = st.lists(st.builds(m.VersionSpan, versions, numbers, numbers), max_size=3).map(tuple)
messages = st.one_of(
    st.builds(
        m.Hello, st.sampled_from(("actor", "learner")), words, words, st.just(RUN), st.just(VOCAB), words, numbers
    ),
    st.builds(m.Segment, words, numbers, numbers, numbers, spans, st.booleans(), words, st.floats(), numbers),
    st.builds(m.Scores, st.lists(numbers, max_size=4).map(tuple)),
    st.builds(m.TicketCredit, numbers, numbers, numbers),
    st.builds(m.Heartbeat, versions, st.dictionaries(words, st.floats(), max_size=3), numbers),
    st.builds(m.Goodbye, words),
    st.builds(m.BatchWanted, versions),
)
incarnations = itertools.count()
arrays = st.lists(st.binary(max_size=40), max_size=4)
multiparts = arrays | st.tuples(messages.map(msgspec.msgpack.encode), arrays).map(lambda parts: [parts[0], *parts[1]])


@settings(max_examples=100)
@given(multiparts)
def test_the_decoder_refuses_by_a_reason_or_gives_the_frames_it_got(parts: list[bytes]) -> None:
    try:
        received = decode(parts)
    except RemoteProtocolError as error:
        assert error.code in ("malformed", "too_large")
        assert len(str(error)) < 1000
    else:
        assert [bytes(frame) for frame in encode(received.message, received.arrays)[1:]] == parts[1:]


@pytest.mark.parametrize(
    "version", [(-1, 0), (0, -1), (m.MAX_EPOCH + 1, 0), (2**31, 7), (0, m.MAX_STEP + 1)], ids=lambda value: str(value)
)
def test_versions_that_would_be_counted_up_to_are_refused(version: tuple[int, int]) -> None:
    with pytest.raises(RemoteProtocolError):
        decode([msgspec.msgpack.encode(m.BatchWanted(m.WeightVersion(*version)))])


@pytest.fixture(scope="module")
def server() -> Iterator[PeerServer]:
    server = PeerServer(
        "tcp://127.0.0.1:0", run_id=RUN, vocab_fingerprint=VOCAB, heartbeat_s=60.0, peer_timeout_s=600.0
    )
    yield server
    server.close(linger_s=0)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(multiparts.filter(bool), min_size=1, max_size=5))
def test_whatever_one_peer_sends_another_is_served(server: PeerServer, sent: list[list[bytes]]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    hostile, good = new_socket(context, zmq.DEALER), new_socket(context, zmq.DEALER)
    for peer in (hostile, good):
        peer.connect(server.address)
    for parts in sent:
        send_frames(hostile, list(parts))
    send_frames(good, encode(m.Hello("teacher", "teacher-0", f"i{next(incarnations)}", RUN, VOCAB)))
    send_frames(good, encode(m.ScoreCredit(1, 1, 0)))
    try:
        assert serve_until(server, lambda event: isinstance(event, FromPeer) and event.name == "teacher-0")
        server.send("teacher", "teacher-0", m.Shutdown(True, "seen"))
        heard: list[m.Message] = []
        while m.Shutdown(True, "seen") not in heard:
            assert good.poll(int(PATIENCE_S * 1000)), "the good peer was not served"
            heard.append(decode(receive_frames(good) or []).message)
    finally:
        context.destroy(linger=0)


def serve_until(server: PeerServer, true: Callable[[Event], bool]) -> bool:
    limit = Limit()
    while not limit.passed:
        if any(map(true, server.poll(0.02))):
            return True
    return False


@pytest.mark.parametrize(("target", "frames"), [("decode", 8_000), ("intake", 2_000)])
def test_the_fuzzer_finds_nothing_in_a_short_run(target: str, frames: int) -> None:
    command = [
        sys.executable,
        "bench/faults/fuzz_wire.py",
        f"--frames={frames}",
        "--seed=7",
        "--engine=random",
        f"--target={target}",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 crashes" in done.stdout
    assert target == "decode" or "ledger balanced: True" in done.stdout
