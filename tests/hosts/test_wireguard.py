"""A learner with ranks on two hosts over WireGuard: whoever is between the hosts sees its packets, and no others."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.hosts.conftest import hosts_or_skip
from tests.hosts.network import Network, NotPermitted
from tests.hosts.run_at_home import RunAtHome
from tests.hosts.wireguard import PORT, Tunnel

STEPS: Final = 4
SETTINGS: Final = (
    *("--learner.ranks=2", "--learner.hosts=2", "--learner.eval_every=0", f"--steps={STEPS}"),
    *("--weights.allow_plain_network=true", "--actors=0", "--teachers=1"),
)
ETH_P_IP: Final = 0x0800
UDP: Final = 17


@contextmanager
def overheard(network: Network, host: str) -> Generator[Counter[str]]:
    """IPv4 packets that pass the host's card meanwhile, by what they are."""
    seen = Counter[str]()
    with network.entered(host):
        card = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_IP))
    with card:
        card.bind(("eth0", ETH_P_IP))
        card.settimeout(0.2)
        over = threading.Event()

        def listen() -> None:
            while not over.is_set():
                try:
                    seen[kind_of(card.recv(1 << 16))] += 1
                except TimeoutError:
                    continue

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield seen
        finally:
            over.set()
            thread.join()


def kind_of(packet: bytes) -> str:
    header_bytes, protocol = 4 * (packet[0] & 15), packet[9]
    ports = struct.unpack("!HH", packet[header_bytes : header_bytes + 4])
    return "WireGuard" if protocol == UDP and PORT in ports else f"protocol {protocol}"


def test_ranks_over_wireguard_send_nothing_beside_it(tmp_path: Path) -> None:
    with ExitStack() as stack:
        network = stack.enter_context(hosts_or_skip("home", "guest", delay_ms=2.0))
        try:
            tunnel = Tunnel(network, ("home", "guest"), tmp_path, stack)
        except NotPermitted as reason:
            pytest.skip(str(reason))
        seen = stack.enter_context(overheard(network, "home"))
        ours = RunAtHome(network, tmp_path, stack, *SETTINGS, address=tunnel.address("home"))
        run = ours.run
        run.until(lambda: "the learner waits for 1 of 2 hosts" in run.text(), "that the learner waits")
        guest = ours.join("guest", "--learner-ranks=1", "--actors=1")
        ours.expect_good_end(guest)
        for text in (run.text(), guest.text()):
            assert "use a private network only" in text, "a launcher cannot know that the network is private"
        run.expect_clean_audit()
        assert set(seen) == {"WireGuard"} and seen["WireGuard"] > 1000, seen
