"""The proxy does what it is told, to a real client and a real server; and both take it as they promise to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from stillhouse.protocol.client import Client
from stillhouse.protocol.messages import Hello, Segment, SegmentAck, TicketCredit
from stillhouse.protocol.server import PeerServer
from stillhouse.protocol.server_events import Event, FromPeer, PeerDown, PeerUp
from tests.patience import PATIENCE_S, SLOWNESS
from tests.sim.chaos.commands import Break, Direction, Look, Meddle, Proxy, Weather, running_proxy
from tests.sim.chaos.meddling import MEDDLINGS, Meddling

RUN = "run-1"


class World:
    """A server, a proxy in front of it, and clients that are served as long as somebody waits."""

    def __init__(self, stack: ExitStack) -> None:
        self.server = PeerServer(
            "tcp://127.0.0.1:0", run_id=RUN, vocab_fingerprint=None, heartbeat_s=0.2, peer_timeout_s=2.0 * SLOWNESS
        )
        stack.callback(self.server.close)
        port = int(self.server.address.rpartition(":")[2])
        self.proxy: Proxy = stack.enter_context(running_proxy(port))
        self.events: list[Event] = []
        self._stack = stack

    def client(self, name: str) -> Client:
        hello = Hello(role="actor", name=name, incarnation=f"{name}-a", run_id=RUN, vocab_fingerprint="ab")
        client = Client(self.proxy.address, hello, connect_timeout_s=PATIENCE_S, resend_s=0.5)
        self._stack.callback(client.close, "the test is over")
        pool = self._stack.enter_context(ThreadPoolExecutor(1))
        connected = pool.submit(client.connect)  # it waits for the server, which this thread serves
        self.until(connected.done)
        connected.result()
        return client

    def until(self, condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, self.events[-5:]
            for event in self.server.poll(0.02):
                self.events.append(event)
                match event:
                    case FromPeer(role, name, received) if isinstance(received.message, Segment):
                        segment = received.message
                        ack = SegmentAck(segment.rollout_id, segment.index, "accepted", None)
                        self.server.send(role, name, ack)
                    case _:
                        pass

    def segments(self, name: str) -> list[int]:
        """Indices of the segments that came from this actor, repeats included."""
        return [
            event.received.message.index
            for event in self.events
            if isinstance(event, FromPeer) and event.name == name and isinstance(event.received.message, Segment)
        ]


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack)


def send_segment(client: Client, index: int) -> None:
    segment = Segment(
        rollout_id="train-0-0-0",
        index=index,
        start=4 * index,
        end=4 * index + 4,
        spans=(),
        final=False,
    )
    mask = np.zeros(4, np.uint8)
    client.send(segment, (np.arange(4, dtype=np.int32), np.zeros(4, np.float32), mask))


def test_names_come_from_the_hello_and_a_cut_link_comes_back(world: World) -> None:
    client = world.client("actor-0")
    assert world.proxy.look().connections == {"actor-0": 1}
    for index in range(2):
        world.proxy.tell(Break("actor-0", reset=index == 1))
        send_segment(client, index)
        world.until(lambda: client.unacked == 0)
    assert set(world.segments("actor-0")) == {0, 1}
    assert not any(isinstance(event, PeerDown) for event in world.events), "the session was kept"
    assert world.proxy.look().mechanisms["NULL"] >= 2


def test_a_black_hole_is_a_lost_peer_and_heals_by_itself(world: World) -> None:
    client, other = world.client("actor-0"), world.client("actor-1")
    world.proxy.tell(Weather(seconds=3.0 * SLOWNESS, name="actor-0", blackhole=True))
    world.until(lambda: any(isinstance(event, PeerDown) for event in world.events))
    send_segment(other, 0)
    world.until(lambda: world.segments("actor-1") == [0])
    send_segment(client, 1)
    world.until(lambda: client.unacked == 0)
    ups = [event.name for event in world.events if isinstance(event, PeerUp)]
    assert ups.count("actor-0") == 2 and ups.count("actor-1") == 1


def test_delays_and_narrow_links_only_take_longer(world: World) -> None:
    client = world.client("actor-0")
    world.proxy.tell(Weather(seconds=1.0, delay_s=0.1))
    for index in range(4):
        send_segment(client, index)
    world.until(lambda: client.unacked == 0)
    world.proxy.tell(Weather(seconds=1.0, bytes_per_s=2000.0))
    for index in range(4, 8):
        send_segment(client, index)
    world.until(lambda: client.unacked == 0)
    assert sorted(set(world.segments("actor-0"))) == list(range(8))


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize("kind", ["corrupt", "truncate", "garbage"])
def test_what_a_link_changes_is_found_and_comes_again(world: World, kind: Meddling, direction: Direction) -> None:
    """Not a segment lost or out of order, not a bit of one changed, and the client lives on."""
    client = world.client("actor-0")
    world.proxy.tell(Meddle(kind, "actor-0", direction, count=3, seed=2))
    for index in range(12):
        send_segment(client, index)
    world.until(lambda: client.unacked == 0 and world.proxy.look().meddled.get(kind, 0) == 3)
    send_segment(client, 12)  # raises what has become of the link
    world.until(lambda: client.unacked == 0)
    first_seen = list(dict.fromkeys(world.segments("actor-0")))
    assert first_seen == list(range(13))
    assert not any(isinstance(event, PeerDown) for event in world.events), "the session was kept"
    if direction == "up":
        assert 1 <= world.server.refused["damaged"] <= 3  # those behind the first of a connection are not read


@pytest.mark.parametrize("kind", MEDDLINGS)
def test_the_server_survives_whatever_comes_in_place_of_a_message(world: World, kind: Meddling) -> None:
    client, other = world.client("actor-0"), world.client("actor-1")
    world.proxy.tell(Meddle(kind, "actor-0", "up", count=3, seed=1))
    for seq in range(5):
        client.send(TicketCredit(1, seq, 0))
    world.until(lambda: world.proxy.tell(Look()).meddled.get(kind, 0) >= 1)
    send_segment(other, 0)
    world.until(lambda: world.segments("actor-1") == [0] and other.unacked == 0)
    assert not world.proxy.look().errors
