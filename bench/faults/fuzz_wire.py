"""Hostile frames through the decoder and through the buffer's whole intake: nothing may crash, memory must stay flat.

    python -m bench.faults.fuzz_wire --frames 1000000 --seed 0 [--engine atheris|random] [--target decode|intake|both]

Inputs are mutations of one message of every kind: flipped bytes, changed fields, frames cut, added, swapped. `atheris`
(pip install atheris) keeps the inputs that reach new lines of `protocol` and `buffer`, and goes on from them; `random`
needs nothing. `intake` is a Server on a real socket, and behind it a BufferState, as in the buffer's process; a
stranger and a peer of each role send in turn. A crash ends the run with its traceback and the input's file name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, cast

import msgpack
import numpy as np
import psutil
import zmq

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
ENGINE = os.environ.get("STILLHOUSE_FUZZ_ENGINE", "")
atheris: Any = importlib.import_module("atheris") if ENGINE == "atheris" else None  # an extra, and without types
instrumented: contextlib.AbstractContextManager[Any] = (
    contextlib.nullcontext() if atheris is None else atheris.instrument_imports(include=["protocol", "buffer"])
)
with instrumented:
    from stillhouse.buffer.config import BufferConfig
    from stillhouse.buffer.state import BufferState
    from stillhouse.protocol import messages as m
    from stillhouse.protocol.bundle import unbundled
    from stillhouse.protocol.codec import decode, encode
    from stillhouse.protocol.errors import RemoteProtocolError
    from stillhouse.protocol.server import PeerServer
    from stillhouse.protocol.server_events import FromPeer, PeerDown, PeerUp
    from stillhouse.protocol.sockets import new_socket, receive_frames, send_frames

Frames: TypeAlias = list[bytes]
RUN, VOCAB = "fuzz", "ab" * 32
ROLES: tuple[m.Role, ...] = ("actor", "teacher", "learner", "launcher")
ODD_INTEGERS = (-1, 0, 1, 2**31, 2**63 - 1, -(2**63))
ODD_NUMBERS = (*ODD_INTEGERS, 1e308, float("nan"), float("inf"))
ODD_VALUES = (None, True, *ODD_NUMBERS, "", "x" * 5000, b"\xff", [], {})
MAX_INPUT_BYTES = 1 << 16


# ------------------------------------------------------------------------------------------------------ inputs


def pack(frames: Frames) -> bytes:
    """Pack frames into one input of a fuzzer: each frame follows its length."""
    return b"".join(len(frame).to_bytes(2, "little") + frame for frame in frames)


def unpack(data: bytes) -> Frames:
    """Any bytes are some frames."""
    frames: Frames = []
    while data:
        end = 2 + int.from_bytes(data[:2], "little")
        frames.append(data[2:end])
        data = data[end:]
    return frames


def seeds() -> list[Frames]:
    """A message of every kind, and bundles of them."""
    from tests.sim.messages import EXAMPLES

    hellos = [m.Hello(role, f"{role}-0", "first", RUN, VOCAB) for role in ROLES]
    examples = [*EXAMPLES, *((hello, ()) for hello in hellos)]
    encoded = [[bytes(frame) for frame in encode(message, arrays)] for message, arrays in examples]
    return [*encoded, *([cast(bytes, msgpack.packb(encoded[n : n + 4]))] for n in range(0, len(encoded), 4))]


def mutate(frames: Frames, rng: random.Random) -> Frames:
    """A few changes of any kind."""
    frames = frames or [b""]
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        at = rng.randrange(len(frames))
        match rng.randrange(8):
            case 0 | 1 | 2:
                frames[0] = _change_field(frames[0], rng)
            case 3:
                frames[at] = _flip(frames[at], rng)
            case 4:
                frames[at] = frames[at][: rng.randrange(len(frames[at]) + 1)]
            case 5:
                frames.insert(at, rng.randbytes(rng.randrange(64)))
            case 6 if len(frames) > 1:
                del frames[at]
            case _:
                frames[at] += rng.randbytes(4 * rng.randrange(16))
    return frames


def _flip(frame: bytes, rng: random.Random) -> bytes:
    if not frame:
        return rng.randbytes(8)
    at = rng.randrange(len(frame))
    return frame[:at] + bytes([rng.randrange(256)]) + frame[at + 1 :]


def _change_field(header: bytes, rng: random.Random) -> bytes:
    try:
        fields: Any = msgpack.unpackb(header, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException):  # not a header
        return _flip(header, rng)
    at = fields
    while isinstance(at, dict | list) and at:
        keys: list[Any] = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = rng.choice(keys)
        if not isinstance(at[key], dict | list) or rng.random() < 0.2:
            at[key] = _odd(at[key], rng)
            break
        at = at[key]
    try:
        return cast(bytes, msgpack.packb(fields))
    except (OverflowError, ValueError):
        return header


def _odd(value: object, rng: random.Random) -> object:
    """Another value, mostly of the same type, so that it comes past the decoder."""
    if rng.random() < 0.2:
        return rng.choice(ODD_VALUES)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice(
            (value + rng.randrange(-3, 4), *(number for number in ODD_NUMBERS if isinstance(number, int)))
        )
    return (
        rng.choice(ODD_NUMBERS) if isinstance(value, float) else rng.choice(("", "x" * 5000, "train-3-0-0", "default"))
    )


# ----------------------------------------------------------------------------------------------------- targets


class Decoder:
    """`unbundled` may raise nothing, `decode` RemoteProtocolError and nothing else."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}

    def take(self, frames: Frames) -> None:
        for message in unbundled(list(frames)):
            try:
                outcome = type(decode(message).message).__name__
            except RemoteProtocolError as error:
                outcome = error.code
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def close(self) -> None:
        pass


def new_state() -> BufferState:
    return BufferState(BufferConfig(), version=m.WeightVersion(0, 0), vocab_size=1000)


class Intake:
    """Server and BufferState, as `buffer.server` has them."""

    def __init__(self) -> None:
        self._state = new_state()
        self._rejected: dict[str, int] = {}
        self._server = PeerServer(
            "tcp://127.0.0.1:0", run_id=RUN, vocab_fingerprint=VOCAB, heartbeat_s=60.0, peer_timeout_s=600.0
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._peers: list[tuple[m.Role | None, zmq.Socket[bytes]]] = []
        self._connect()
        self._turn = 0
        self._incarnation = 0
        self.balanced = True

    @property
    def outcomes(self) -> dict[str, int]:
        self._add_rejected()
        return {**self._server.refused, **self._rejected, "overtaken": self._server.overtaken}

    def take(self, frames: Frames) -> None:
        self._turn += 1
        role, peer = self._peers[self._turn % len(self._peers)]
        if role is not None and (role, f"{role}-0") not in self._server.peers:
            self._greet(role, peer)  # the last one said Goodbye, or something worse
        if frames:
            send_frames(peer, list(frames))
        self._serve()
        for _, listener in self._peers:
            while receive_frames(listener) is not None:
                pass
        if self._turn % 1000 == 0:
            self._renew()  # the learner's RunFinished has ended that one, or its books have grown full

    def _serve(self) -> None:
        for event in self._server.poll(0.005):
            now_s = time.monotonic()
            match event:
                case PeerUp(role, name, incarnation, pool):
                    outgoing = self._state.peer_joined(now_s, role, name, incarnation, pool)
                case PeerDown(role, name):
                    outgoing = self._state.peer_lost(now_s, role, name)
                case FromPeer(role, name, received):
                    outgoing = self._state.handle(now_s, role, name, received.message, received.arrays)
            for role, name, message, arrays in outgoing:
                self._server.send(role, name, message, arrays)
        for role, name, message, arrays in self._state.tick(time.monotonic()):
            self._server.send(role, name, message, arrays)

    def _connect(self) -> None:
        for role in (None, *ROLES):
            peer = new_socket(self._context, zmq.DEALER)
            peer.connect(self._server.address)
            self._peers.append((role, peer))

    def _greet(self, role: m.Role, peer: zmq.Socket[bytes]) -> None:
        self._incarnation += 1
        send_frames(peer, encode(m.Hello(role, f"{role}-0", f"i{self._incarnation}", RUN, VOCAB)))

    def _renew(self) -> None:
        self._add_rejected()
        self._state = new_state()
        for role, name in self._server.peers:
            self._state.peer_joined(time.monotonic(), role, name, "again", "")
        for _, peer in self._peers:  # one may have said another's Hello: then that one's connection counts no longer
            peer.close(linger=0)
        self._peers.clear()
        self._connect()
        for role, peer in self._peers:
            if role is not None:
                self._greet(role, peer)

    def _add_rejected(self) -> None:
        ledger = self._state.snapshot(time.monotonic()).ledger
        self.balanced &= ledger.balanced
        for reason, n in ledger.rejected.items():
            self._rejected[f"buffer:{reason}"] = self._rejected.get(f"buffer:{reason}", 0) + n

    def close(self) -> None:
        self._server.close(linger_s=0)
        self._context.destroy(linger=0)


# ----------------------------------------------------------------------------------------------------- running


class Run:
    """Counts frames, watches memory, reports."""

    def __init__(self, target: Decoder | Intake, name: str, n_frames: int) -> None:
        self._target, self._name, self._n_frames = target, name, n_frames
        self._frames = self._inputs = 0
        self._started_s = time.monotonic()
        self._memory: list[tuple[int, int]] = []
        self._process = psutil.Process()

    def take(self, frames: Frames) -> bool:
        """False: enough."""
        self._target.take(frames)
        self._inputs += 1
        self._frames += len(frames)
        if self._inputs % 500 == 0:
            self._memory.append((self._frames, self._process.memory_info().rss))
        return self._frames < self._n_frames

    def report(self) -> str:
        half = self._memory[len(self._memory) // 2 :]  # caches and pools have filled by then
        frames, rss = np.array(half, dtype=np.float64).T if len(half) > 2 else (np.arange(3.0), np.zeros(3))
        slope_mb = float(np.polyfit(frames, rss, 1)[0])  # bytes per frame = MB per million frames
        taken_s = time.monotonic() - self._started_s
        outcomes = sorted(self._target.outcomes.items(), key=lambda item: -item[1])
        balanced = f"; ledger balanced: {self._target.balanced}" if isinstance(self._target, Intake) else ""
        return (
            f"{self._name}: {self._frames:,} frames in {self._inputs:,} inputs, {taken_s:.0f} s, 0 crashes; resident "
            f"{rss[-1] / 1e6:.0f} MB, slope {slope_mb:+.2f} MB per million frames over the second half{balanced}\n"
            f"    {', '.join(f'{what} {n:,}' for what, n in outcomes[:16])}"
        )


def run_random(run: Run, seed: int) -> None:
    rng = random.Random(seed)
    corpus = seeds()
    while run.take(mutate(list(rng.choice(corpus)), rng)):
        pass


def run_atheris(run: Run, seed: int) -> None:
    """Ends the process: libFuzzer does not come back."""

    def test_one(data: bytes) -> None:
        if not run.take(unpack(data)):
            print(run.report(), flush=True)
            os._exit(0)

    def custom_mutator(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return atheris.Mutate(data, max_size)
        return pack(mutate(unpack(data), rng))[:max_size]

    with tempfile.TemporaryDirectory() as folder:
        for n, frames in enumerate(seeds()):
            (Path(folder) / f"seed-{n}").write_bytes(pack(frames))
        options = [f"-seed={seed + 1}", f"-max_len={MAX_INPUT_BYTES}", "-len_control=0", "-verbosity=0"]
        arguments = [sys.argv[0], folder, f"-artifact_prefix={tempfile.gettempdir()}/stillhouse-", *options]
        atheris.Setup(arguments, test_one, custom_mutator=custom_mutator)
        atheris.Fuzz()


TARGETS: dict[str, Callable[[], Decoder | Intake]] = {"decode": Decoder, "intake": Intake}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=1_000_000, help="through each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=("auto", "atheris", "random"), default="auto")
    parser.add_argument("--target", choices=("both", *TARGETS), default="both")
    arguments = parser.parse_args()
    if ENGINE:  # the process for one target
        run = Run(TARGETS[arguments.target](), f"{arguments.target} ({ENGINE})", arguments.frames)
        if ENGINE == "atheris":
            run_atheris(run, arguments.seed)
        run_random(run, arguments.seed)
        print(run.report(), flush=True)
        return 0
    engine = arguments.engine
    if engine == "auto":
        engine = "atheris" if importlib.util.find_spec("atheris") else "random"
    failed = 0
    for target in TARGETS if arguments.target == "both" else (arguments.target,):
        options = (f"--frames={arguments.frames}", f"--seed={arguments.seed}", f"--target={target}")
        environment = {**os.environ, "STILLHOUSE_FUZZ_ENGINE": engine}
        done = subprocess.run([sys.executable, __file__, *options], env=environment, check=False)
        failed += done.returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
