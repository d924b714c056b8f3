"""Measures the cost of the protocol over plain pyzmq, and of encryption over the protocol: the same Segment frames,
actor -> buffer, each acknowledged.

    python -m bench.transfer.wire [--seconds 2] [--rounds 3]

Two processes on loopback TCP. "bare" is a DEALER and a ROUTER that pass ready-made frames and look at nothing: no
codec, no checks, no heartbeats, no copy kept for a resend, no second thread. "ours" is protocol.Client and
protocol.Server with all of that; "curve" is ours with the keys of a run. All keep at most WINDOW messages
unacknowledged. Rounds alternate; medians are shown. "checksum" is what the checksums of a segment's frames cost both
ends, of the "cpu us" of ours. "cpu us" is the processor time of both processes per message; the
round trip is one message at a time, until its answer is in the caller's hands.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import zmq

from stillhouse.buffer.acks import acknowledged_together
from stillhouse.buffer.peers import Outgoing
from stillhouse.protocol.client import Client
from stillhouse.protocol.codec import encode
from stillhouse.protocol.keys import load_client_keys, load_server_keys, make_keys
from stillhouse.protocol.messages import (
    Heartbeat,
    HeartbeatReply,
    Hello,
    Segment,
    SegmentAck,
    VersionSpan,
    WeightVersion,
)
from stillhouse.protocol.server import PeerServer
from stillhouse.protocol.server_events import FromPeer
from stillhouse.protocol.sockets import checksum, new_socket

TOKENS = (32, 1_024, 65_536)
WINDOW = 256
RUN, VOCAB = "bench", "00"
VERSION = WeightVersion(0, 0)


class Result(NamedTuple):
    messages_per_s: float
    megabytes_per_s: float
    cpu_us: float
    """CPU time of both processes per message. On a busy machine it compares better than wall time."""
    round_trip_us: float


class Load:
    """Segment messages of one size."""

    def __init__(self, n_tokens: int) -> None:
        self.arrays = (
            np.arange(n_tokens, dtype=np.int32),
            np.zeros(n_tokens, dtype=np.float32),
            np.ones(n_tokens, dtype=np.uint8),
        )
        self.n_tokens = n_tokens
        self.n_bytes = sum(map(len, encode(self.segment(0), self.arrays)))

    def segment(self, index: int) -> Segment:
        return Segment("train-0-0-0", index, 0, self.n_tokens, (VersionSpan(VERSION, 0, self.n_tokens),), False)


# ---------------------------------------------------------------------------------------------- the buffer's side


def serve_ours(ready: Connection, n_tokens: int, reject: bool, keys: Path | None = None) -> None:
    """Acknowledge every message until asked to stop; reject instead where the round trip is measured: only rejections
    reach the caller of the client."""
    server = PeerServer(
        "tcp://127.0.0.1:0",
        run_id=RUN,
        vocab_fingerprint=VOCAB,
        heartbeat_s=1.0,
        peer_timeout_s=30.0,
        keys=None if keys is None else load_server_keys(keys),
    )
    ready.send(server.address)
    while not ready.poll():
        outgoing: list[Outgoing] = []
        for event in server.poll(0.05):
            if not isinstance(event, FromPeer):
                continue
            match event.received.message:
                case Segment(rollout_id=rollout_id, index=index):
                    ack = SegmentAck(rollout_id, index, "rejected" if reject else "accepted")
                    outgoing.append(Outgoing(event.role, event.name, ack))
                case Heartbeat():
                    outgoing.append(Outgoing(event.role, event.name, HeartbeatReply(VERSION)))
                case _:
                    pass
        for out in acknowledged_together(outgoing):  # as the buffer's core does
            server.send(*out)
    server.close(linger_s=0)


def serve_bare(ready: Connection, n_tokens: int, reject: bool) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = new_socket(context, zmq.ROUTER)
    ready.send(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    ack = encode(SegmentAck("train-0-0-0", 0, "accepted"))
    while not ready.poll():
        for _ in range(256 if router.poll(50) else 0):
            try:
                identity = router.recv_multipart(zmq.NOBLOCK, copy=n_tokens < 4096)[0]  # whichever is the faster
            except zmq.Again:
                break
            router.send_multipart([identity, *ack])
    context.destroy(linger=0)


# ----------------------------------------------------------------------------------------------- the actor's side


def our_client(address: str, load: Load, keys: Path | None) -> Client:
    hello = Hello("actor", "actor-bench-0", "i", RUN, VOCAB)
    own = None if keys is None else load_client_keys(keys, "actor")
    return Client(address, hello, keys=own, max_unconfirmed_bytes=WINDOW * load.n_bytes)


def drive_ours(address: str, load: Load, seconds: float, keys: Path | None = None) -> int:
    """Messages acknowledged within about `seconds`."""
    with our_client(address, load, keys) as client:
        client.connect()
        index = 0
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            client.send(load.segment(index), load.arrays)
            index += 1
        if not client.flush(60.0):
            raise RuntimeError(f"not all acknowledged: {client!r}")
        return index


def round_trips_ours(address: str, load: Load, n: int, keys: Path | None = None) -> list[float]:
    with our_client(address, load, keys) as client:
        client.connect()
        times_s: list[float] = []
        for index in range(n):
            start_s = time.perf_counter()
            client.send(load.segment(index), load.arrays)
            if client.recv(10.0) is None:
                raise RuntimeError("no answer")
            times_s.append(time.perf_counter() - start_s)
        return times_s


def drive_bare(address: str, load: Load, seconds: float) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = new_socket(context, zmq.DEALER)
    dealer.connect(address)
    frames = encode(load.segment(0), load.arrays)
    sent = acked = 0
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or acked < sent:
        if sent - acked < WINDOW and time.perf_counter() < end_s:
            dealer.send_multipart(frames, copy=False)
            sent += 1
            if not dealer.poll(0):
                continue
        dealer.recv_multipart()
        acked += 1
    context.destroy(linger=0)
    return sent


def round_trips_bare(address: str, load: Load, n: int) -> list[float]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = new_socket(context, zmq.DEALER)
    dealer.connect(address)
    frames = encode(load.segment(0), load.arrays)
    times_s: list[float] = []
    for _ in range(n):
        start_s = time.perf_counter()
        dealer.send_multipart(frames, copy=False)
        dealer.recv_multipart()
        times_s.append(time.perf_counter() - start_s)
    context.destroy(linger=0)
    return times_s


# ------------------------------------------------------------------------------------------------------- measuring


class Way(NamedTuple):
    serve: Callable[[Connection, int, bool], None]
    drive: Callable[[str, Load, float], int]
    round_trips: Callable[[str, Load, int], list[float]]


BARE = Way(serve_bare, drive_bare, round_trips_bare)
OURS = Way(serve_ours, drive_ours, round_trips_ours)


def encrypted(keys: Path) -> Way:
    """OURS with the keys in this folder."""
    return Way(
        partial(serve_ours, keys=keys),
        partial(drive_ours, keys=keys),
        partial(round_trips_ours, keys=keys),
    )


@contextmanager
def server_process(way: Way, load: Load, *, reject: bool) -> Generator[tuple[str, psutil.Process]]:
    """Run a server process for the duration of the block. Yields its address and the process."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=way.serve, args=(there, load.n_tokens, reject))
    process.start()
    try:
        yield here.recv(), psutil.Process(process.pid)
    finally:
        here.send("stop")
        process.join(10.0)
        process.kill()


def measure(way: Way, load: Load, seconds: float, n_round_trips: int) -> Result:
    with server_process(way, load, reject=False) as (address, process):
        way.drive(address, load, seconds / 10)  # warm up
        start_s, start_cpu_s = time.perf_counter(), cpu_s(process)
        n = way.drive(address, load, seconds)
        taken_s, taken_cpu_s = time.perf_counter() - start_s, cpu_s(process) - start_cpu_s
    with server_process(way, load, reject=True) as (address, _):
        times_s = way.round_trips(address, load, n_round_trips)
    megabytes = n * load.n_bytes / 1e6
    return Result(n / taken_s, megabytes / taken_s, taken_cpu_s / n * 1e6, statistics.median(times_s) * 1e6)


def checksum_s(load: Load) -> float:
    """Processor time of one end's checksum of a segment; the least of ten."""
    frames = encode(load.segment(0), load.arrays)
    calls = 200
    times_s: list[float] = []
    for _ in range(10):
        start_s = time.process_time()
        for _ in range(calls):
            checksum(frames)
        times_s.append((time.process_time() - start_s) / calls)
    return min(times_s)


def cpu_s(other: psutil.Process) -> float:
    """CPU time of this process and another so far, seconds."""
    times = other.cpu_times()
    return time.process_time() + times.user + times.system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of sending, per measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-trips", type=int, default=500)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_keys(Path(folder) / "keys")
        ways = {"bare": BARE, "ours": OURS, "curve": encrypted(Path(folder) / "keys")}
        compare(ways, arguments.seconds, arguments.rounds, arguments.round_trips)


def compare(ways: dict[str, Way], seconds: float, rounds: int, round_trips: int) -> None:
    print(f"{'tokens':>7} {'way':>14} {'messages/s':>11} {'MB/s':>8} {'cpu us':>7} {'round trip us':>14}")
    for n_tokens in TOKENS:
        load = Load(n_tokens)
        results: dict[str, list[Result]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, way in ways.items():
                results[name].append(measure(way, load, seconds, round_trips))
        medians = {name: Result(*map(statistics.median, zip(*rows, strict=True))) for name, rows in results.items()}
        for name, row in medians.items():
            print(f"{n_tokens:7d} {name:>14} {row[0]:11.0f} {row[1]:8.1f} {row[2]:7.0f} {row[3]:14.0f}")
        for name, base in (("ours", "bare"), ("curve", "ours")):
            ratios = [of / over for of, over in zip(medians[name], medians[base], strict=True)]
            what = f"{name}/{base}"
            print(f"{n_tokens:7d} {what:>14} {ratios[0]:11.2f} {ratios[1]:8.2f} {ratios[2]:7.2f} {ratios[3]:14.2f}")
        both_us = 2e6 * checksum_s(load)
        share = both_us / medians["ours"].cpu_us
        print(f"{n_tokens:7d} {'checksum':>14} {both_us:28.1f}{'':15} at both ends, {share:.1%} of ours")


if __name__ == "__main__":
    main()
