"""Tokens/s of rollouts through an actor on an SGLang server, against the same requests sent to that server bare.

    python -m bench.servers.sglang_rollouts [--rollouts 256] [--concurrent 64] [--rounds 4] [--stream-tokens 16]

    actor        a whole actor process: tickets in over ZeroMQ, environment, segments out; this process is its buffer
    streaming    a client that sends the same requests and reads the chunks
    whole        the same without streaming

One server, one client at work at a time, a process each, rounds in turn, the first one thrown away. Two ratios of the
actor to a bare client: of tokens/s by the clock, and of tokens per CPU second of server and client together, which
other load on the machine hardly touches. Medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast, get_args

import msgspec
import numpy as np
import psutil

from bench.servers.sglang_clients import Client, Kind, Round
from stillhouse.builtin import STUDENT_DIR
from stillhouse.engines.sglang.config import SGLangConfig
from stillhouse.models.tokenizer_file import FileTokenizer
from stillhouse.protocol import messages as m
from stillhouse.protocol.server import FromPeer, Server
from stillhouse.sglang_server.servers import Servers

ACTOR: tuple[m.Role, str] = ("actor", "actor-0")
READY_S, ROUND_S = 60.0, 300.0
WARM_ROUNDS = 1


class Figures(NamedTuple):
    tokens: int
    wall_s: float
    server_cpu_s: float
    client_cpu_s: float

    @property
    def per_s(self) -> float:
        return self.tokens / self.wall_s

    @property
    def per_cpu_s(self) -> float:
        return self.tokens / (self.server_cpu_s + self.client_cpu_s)


class BareClient:
    """Streaming or not, in a process."""

    def __init__(self, client: Client) -> None:
        self.process = start(client)
        assert self._line() == "ready"

    def round(self) -> tuple[int, float]:
        cast(IO[bytes], self.process.stdin).write(b"go\n")
        cast(IO[bytes], self.process.stdin).flush()
        done = msgspec.json.decode(self._line(), type=Round)
        return done.tokens, done.wall_s

    def close(self) -> None:
        cast(IO[bytes], self.process.stdin).close()
        self.process.wait(READY_S)

    def _line(self) -> str:
        return cast(IO[bytes], self.process.stdout).readline().decode().strip()


class Actor:
    """An actor process, and the buffer that it thinks it talks to, which is a thread here."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._prompts = [np.array(prompt, np.int32) for prompt in client.prompts]
        self._n_rounds = 0
        self._waiting: list[m.Ticket] = []
        self._free = self._tokens = self._ended = 0
        self._failure = ""
        self._changed = threading.Condition()
        self._closing = False
        self._server = Server(
            "tcp://127.0.0.1:0", run_id="bench", vocab_fingerprint=None, heartbeat_s=1.0, peer_timeout_s=ROUND_S
        )
        client.buffer_address = self._server.address
        self.process = start(client)
        self._thread = threading.Thread(target=self._serve, name="buffer")
        self._thread.start()
        self._await(lambda: self._free > 0, READY_S)

    def round(self) -> tuple[int, float]:
        n, began_s = len(self._prompts), time.perf_counter()
        with self._changed:
            first = self._n_rounds * n
            self._tokens = self._ended = 0
            self._waiting = [self._ticket(first + i) for i in range(n)]
        self._n_rounds += 1
        self._await(lambda: self._ended == n, ROUND_S)
        return self._tokens, time.perf_counter() - began_s

    def close(self) -> None:
        self._closing = True
        self._thread.join()
        self.process.wait(READY_S)
        cast(IO[bytes], self.process.stdin).close()

    def _await(self, reached: Callable[[], bool], timeout_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: reached() or self._failure, timeout_s)
            if not reached():
                raise SystemExit(f"the actor did not do its part: {self._failure or f'waited {timeout_s:.0f} s'}")

    def _ticket(self, i: int) -> m.Ticket:
        sampling = m.Sampling(max_new_tokens=self._client.max_new_tokens, seed=i)
        return m.Ticket(f"train-{i}-0-0", i, 0, "train", sampling, "single_turn", "", "7", m.WeightVersion(0, 0))

    def _serve(self) -> None:
        while not self._closing:
            events = self._server.poll(0.005)
            with self._changed:
                for event in events:
                    if isinstance(event, FromPeer):
                        self._take(event)
                self._hand_out()
                self._changed.notify_all()
        self._server.send(*ACTOR, m.Shutdown(True, "done"))
        while self.process.poll() is None:
            self._server.poll(0.05)
        self._server.close(linger_s=0.1)

    def _hand_out(self) -> None:
        n = min(self._free, len(self._waiting))
        if n:
            tickets, self._waiting[:n] = tuple(self._waiting[:n]), []
            self._free -= n
            prompts = [self._prompts[ticket.task_id % len(self._prompts)] for ticket in tickets]
            self._server.send(*ACTOR, m.Tickets(tickets), prompts)

    def _take(self, event: FromPeer) -> None:
        message = event.received.message
        match message:
            case m.TicketCredit() if not self._n_rounds:
                self._free = message.n
            case m.Segment():
                self._server.send(*ACTOR, m.SegmentAck(message.rollout_id, message.index, "accepted"))
                self._tokens += int(event.received.arrays[2].sum())
                self._ended += message.final
                self._free += message.final
            case m.RolloutFailed():
                self._failure = f"{message.reason}: {message.detail}"
            case m.Heartbeat():
                self._server.send(*ACTOR, m.HeartbeatReply(m.WeightVersion(0, 0)))
            case _:
                pass


class CpuClock:
    """CPU seconds of processes, their children included."""

    def __init__(self, pid: int) -> None:
        parent = psutil.Process(pid)
        self._processes = [parent, *parent.children(recursive=True)]

    def read_s(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return sum(t.user + t.system for t in times)


def start(client: Client) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench.servers.sglang_clients", msgspec.json.encode(client).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).resolve().parents[2],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--concurrent", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=200)
    parser.add_argument("--stream-tokens", type=int, default=SGLangConfig().stream_tokens)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--server-args", default="", help="further arguments of the server, with commas between")
    args = parser.parse_args()
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 256, random.integers(8, 40)).tolist() for _ in range(args.rollouts)]
    with tempfile.TemporaryDirectory() as folder, Servers(Path(folder)) as servers:
        server = servers.start("student", STUDENT_DIR, [arg for arg in args.server_args.split(",") if arg])
        servers.wait_ready([server], READY_S)
        clients = [
            (BareClient if kind != "actor" else Actor)(
                Client(
                    kind=kind,
                    url=server.url,
                    student=str(STUDENT_DIR),
                    concurrent=args.concurrent,
                    max_new_tokens=args.max_new_tokens,
                    stream_tokens=args.stream_tokens,
                    prompts=prompts,
                    stops=FileTokenizer(STUDENT_DIR).stop_token_ids,
                    run_dir=folder,
                )
            )
            for kind in get_args(Kind)
        ]
        rounds = [measure(clients, server.pid, turn) for turn in range(WARM_ROUNDS + args.rounds)]
        for client in clients:
            client.close()
    show(rounds[WARM_ROUNDS:])


def measure(clients: Sequence[BareClient | Actor], server_pid: int, turn: int) -> dict[Kind, Figures]:
    """One round of each, another one first each time."""
    found: dict[Kind, Figures] = {}
    kinds: tuple[Kind, ...] = get_args(Kind)
    for i in range(len(clients)):
        which = (i + turn) % len(clients)
        server, client = CpuClock(server_pid), CpuClock(clients[which].process.pid)
        before = server.read_s(), client.read_s()
        tokens, wall_s = clients[which].round()
        figures = Figures(tokens, wall_s, server.read_s() - before[0], client.read_s() - before[1])
        print(f"round {turn}: {kinds[which]:>9} {figures.per_s:7,.0f} tokens/s", file=sys.stderr, flush=True)
        found[kinds[which]] = figures
    return found


def show(rounds: Sequence[dict[Kind, Figures]]) -> None:
    print(f"{'client':>10} {'tokens/s':>9} {'per CPU s':>10} {'server ms/token':>16} {'client ms/token':>16}")
    for kind in rounds[0]:
        figures = [found[kind] for found in rounds]
        server, client = (
            statistics.median(1e3 * (f.server_cpu_s, f.client_cpu_s)[i] / f.tokens for f in figures) for i in (0, 1)
        )
        per_s, per_cpu_s = (statistics.median(getattr(f, name) for f in figures) for name in ("per_s", "per_cpu_s"))
        print(f"{kind:>10} {per_s:>9,.0f} {per_cpu_s:>10,.0f} {server:>16.3f} {client:>16.3f}")
    for kind in ("streaming", "whole"):
        clock = sorted(found["actor"].per_s / found[kind].per_s for found in rounds)
        cpu = sorted(found["actor"].per_cpu_s / found[kind].per_cpu_s for found in rounds)
        print(
            f"actor / {kind}: tokens/s {statistics.median(clock):.2f} ({clock[0]:.2f} to {clock[-1]:.2f}), "
            f"per CPU second {statistics.median(cpu):.2f} ({cpu[0]:.2f} to {cpu[-1]:.2f})"
        )


if __name__ == "__main__":
    main()
