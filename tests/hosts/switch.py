"""An Ethernet switch in user space, with delay and loss: what `tc netem` behind a bridge does, without either.

    python -m tests.hosts.switch --ports v0 v1 v2 --delay-ms 5 --loss 0.01 --seed 0

Runs in a network namespace that holds one end of each host's link. Why not tc: netem is a module that not every kernel
has, and its losses cannot be seeded. Frames go to the port behind which their destination was last seen, or to all;
each is lost with the given probability, or arrives delay_ms later, a quarter more or less (so frames overtake one
another, as with netem's jitter). Only IPv4 and ARP pass.
"""

from __future__ import annotations

import argparse
import heapq
import selectors
import socket
import sys
import time
from collections.abc import Sequence
from random import Random
from typing import Final

ETH_P_ALL: Final = 3
PACKET_OUTGOING: Final = 4
PASSED: Final = (b"\x08\x00", b"\x08\x06")
BROADCAST: Final = b"\xff" * 6
BATCH: Final = 64
RECEIVE_BYTES: Final = 1 << 16
BUFFER_BYTES: Final = 8 << 20
JITTER: Final = 0.25


class Switch:
    """One thread, forever."""

    def __init__(self, ports: Sequence[str], *, delay_s: float, loss: float, seed: int) -> None:
        self._sockets = [_port(name) for name in ports]
        self._delay_s, self._loss, self._rng = delay_s, loss, Random(seed)
        self._selector = selectors.DefaultSelector()
        for number, port in enumerate(self._sockets):
            self._selector.register(port, selectors.EVENT_READ, number)
        self._behind: dict[bytes, int] = {}
        self._late: list[tuple[float, int, int, bytes]] = []
        """(due, number of the frame, port, frame)"""
        self._frames = 0

    def run(self) -> None:
        while True:
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
            for key, _ in self._selector.select(wait_s):
                self._read(key.data)
            self._deliver()

    def _read(self, number: int) -> None:
        for _ in range(BATCH):
            try:
                frame, address = self._sockets[number].recvfrom(RECEIVE_BYTES)
            except BlockingIOError:
                return
            except OSError:  # the link is down; it is told once, and the socket lives on
                return
            if address[2] != PACKET_OUTGOING and frame[12:14] in PASSED:
                self._behind[frame[6:12]] = number
                self._forward(number, frame)

    def _forward(self, source: int, frame: bytes) -> None:
        known = self._behind.get(frame[:6])
        everyone = frame[:6] == BROADCAST or known is None
        for port in range(len(self._sockets)) if everyone else (known,):
            if port is not None and port != source and self._rng.random() >= self._loss:
                delay_s = self._delay_s * self._rng.uniform(1 - JITTER, 1 + JITTER)
                self._frames += 1
                heapq.heappush(self._late, (time.monotonic() + delay_s, self._frames, port, frame))

    def _deliver(self) -> None:
        now_s = time.monotonic()
        while self._late and self._late[0][0] <= now_s:
            _, _, port, frame = heapq.heappop(self._late)
            try:
                self._sockets[port].send(frame)
            except OSError:  # down, or no room: what is lost there TCP sends again
                continue


def _port(name: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port.setblocking(False)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    port.bind((name, 0))
    return port


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ports", nargs="+", required=True)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    switch = Switch(args.ports, delay_s=args.delay_ms / 1000, loss=args.loss, seed=args.seed)
    print("ready", flush=True)
    try:
        switch.run()
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
