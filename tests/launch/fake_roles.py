"""Role mains for supervision tests: real processes that talk to a real protocol server, and misbehave on request.

`behaviour.json` in the run folder says how: worker name -> one word. Each process leaves `seen/<name>.<pid>`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Generator
from pathlib import Path

import msgspec

from stillhouse.buffer.journal.store import JournalStore
from stillhouse.buffer.server import BufferAddress
from stillhouse.engines.provider import API_KEY_VARIABLE
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.workers.main_process import LEAVE_AGAIN_S
from stillhouse.launch.workers.roles import run_buffer
from stillhouse.protocol.client import Client
from stillhouse.protocol.context import ExitCode, RoleContext
from stillhouse.protocol.errors import LinkError
from stillhouse.protocol.messages import (
    Heartbeat,
    HeartbeatReply,
    Hello,
    Ledger,
    LedgerCounts,
    PeerView,
    Role,
    RunFinished,
    Shutdown,
    Snapshot,
    SnapshotWanted,
    WeightVersion,
)
from stillhouse.protocol.server import PeerServer
from stillhouse.protocol.server_events import FromPeer, PeerDown, PeerUp
from stillhouse.sglang_server.servers import answers
from stillhouse.teachers.leaving import on_sigterm
from tests.patience import PATIENCE_S

Context = RoleContext[RunConfig]
DRAIN_S = 1.5


def behaviour(ctx: Context) -> str:
    file = ctx.run_dir / "behaviour.json"
    given: dict[str, str] = json.loads(file.read_text()) if file.is_file() else {}
    return given.get(ctx.name, "work")


def note_pid(ctx: Context) -> int:
    """Leaves a mark; returns how many incarnations came before."""
    seen = ctx.run_dir / "seen"
    seen.mkdir(exist_ok=True)
    before = len(list(seen.glob(f"{ctx.name}.*")))
    (seen / f"{ctx.name}.{os.getpid()}").touch()
    return before


# ---------------------------------------------------------------------------------------------------- buffer


def counts(trained: int, off: int = 0) -> LedgerCounts:
    return LedgerCounts(accepted=trained + off, trained=trained, masked={}, dropped={}, waiting=0, in_flight=0)


class FakeBuffer:
    """Answers snapshots, passes the end on, leaves ledger.json. No rollouts."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._word = behaviour(ctx)
        self._server = PeerServer(
            "tcp://127.0.0.1:0",
            run_id=ctx.run_id,
            vocab_fingerprint=None,
            heartbeat_s=ctx.config.buffer.heartbeat_s,
            peer_timeout_s=ctx.config.buffer.peer_timeout_s,
        )
        self._peers: dict[tuple[Role, str], bool] = {}
        self._heard_s: dict[tuple[Role, str], float] = {}
        self._over: RunFinished | None = None

    def run(self) -> int:
        address = BufferAddress(self._server.address, os.getpid(), self._ctx.run_id, self._ctx.incarnation)
        draft = self._ctx.run_dir / "buffer.json.draft"
        draft.write_bytes(msgspec.json.encode(address))
        draft.rename(self._ctx.run_dir / "buffer.json")
        try:
            while self._over is None or any(self._peers.values()):
                self._turn()
        finally:
            (self._ctx.run_dir / "ledger.json").write_bytes(msgspec.json.encode(self._snapshot()))
            self._server.close()
        return 0

    def _turn(self) -> None:
        for event in self._server.poll(0.05):
            key = (event.role, event.name)
            self._heard_s[key] = time.monotonic()
            match event:
                case PeerUp():
                    self._peers[key] = True
                    if self._over is not None:
                        self._tell_end(*key)
                case PeerDown():
                    self._peers[key] = False
                case FromPeer(role, name, received):
                    if isinstance(received.message, SnapshotWanted):
                        self._server.send(role, name, self._snapshot())
                    elif isinstance(received.message, Heartbeat):
                        self._server.send(role, name, HeartbeatReply(WeightVersion(0, 7)))
                    elif isinstance(received.message, RunFinished):
                        self._over = received.message
                        for peer, alive in self._peers.items():
                            if alive and not (peer[0] == "launcher" and self._word == "tells_launcher_last"):
                                self._tell_end(*peer)
        if self._over is not None and self._word == "tells_launcher_last":
            there = [peer for peer, alive in self._peers.items() if alive]
            if {role for role, _ in there} == {"launcher"}:
                time.sleep(0.3)  # until it has seen that they are gone
                self._tell_end(*there[0])

    def _tell_end(self, role: Role, name: str) -> None:
        assert self._over is not None
        self._server.send(role, name, Shutdown(ok=self._over.ok, reason=self._over.reason))

    def _snapshot(self) -> Snapshot:
        now_s = time.monotonic()
        off = 5 if self._word == "unbalanced" else 0
        return Snapshot(
            time_s=now_s,
            phase="running" if self._over is None else "finished" if self._over.ok else "failed",
            phase_reason="" if self._over is None else self._over.reason,
            version=WeightVersion(0, 7),
            published=WeightVersion(0, 7),
            ledger=Ledger(counts(8), counts(16), counts(100, off), {}, counts(10)),
            queues={},
            staleness_hist={0: 50, 1: 50},
            max_staleness=self._ctx.config.buffer.max_staleness,
            peers=tuple(
                PeerView(role, name, alive, None, now_s - self._heard_s[role, name], {}, 0, 0, 0)
                for (role, name), alive in self._peers.items()
            ),
        )


def read_damaged_journal(folder: Path) -> None:
    """With a page of zeros where a leaf should be: LMDB aborts the process."""
    store = JournalStore(folder, sync="process")
    store.begin(b"meta")
    for _ in range(40):
        store.append([b"x" * 300, b"y" * 700])
    store.close()
    with (folder / "data.mdb").open("r+b") as file:
        file.seek(9 * 4096)
        file.write(bytes(4096))
    print(len(list(JournalStore(folder, sync="process").turns())))


def buffer(ctx: Context) -> int:
    note_pid(ctx)
    word, _, number = behaviour(ctx).partition(" ")
    if word == "real":  # with a journal, so that another process of it goes on where this one died
        return run_buffer(ctx)
    if word == "damaged_journal":
        read_damaged_journal(ctx.run_dir / "journal")
    if word == "never_listens":
        time.sleep(300)
    if word == "computes":
        until_s = time.monotonic() + float(number)
        while time.monotonic() < until_s:
            pass
    return FakeBuffer(ctx).run()


# --------------------------------------------------------------------------------------------------- workers


@contextlib.contextmanager
def connected(ctx: Context) -> Generator[Client]:
    role = ctx.role
    assert role != "buffer"
    hello = Hello(
        role=role,
        name=ctx.name,
        incarnation=ctx.incarnation,
        run_id=ctx.run_id,
        vocab_fingerprint="0" * 64,
        pool="default" if role == "teacher" else "",
    )
    with Client(ctx.buffer_address, hello, connect_timeout_s=PATIENCE_S) as client:
        client.connect()
        yield client


def until_shutdown(client: Client) -> int:
    while True:
        received = client.recv(0.1)
        if received is not None and isinstance(received.message, Shutdown):
            return 0 if received.message.ok else 1


def worker(ctx: Context) -> int:
    """An actor or a teacher."""
    before = note_pid(ctx)
    word = behaviour(ctx)
    print(f"{ctx.name} does: {word}")
    if word == "crash" or (word == "crash_once" and before == 0):
        raise RuntimeError("the bottom fell out")
    if word == "useless":
        return 4
    if ctx.server_url:
        host, _, port = ctx.server_url.removeprefix("http://").partition(":")
        print(f"server {ctx.server_url} answers: {answers(host, int(port), os.environ[API_KEY_VARIABLE])}")
    if word == "loses_server_once" and before == 0:
        return ExitCode.SERVER_LOST
    if word == "mute":
        time.sleep(300)
    if word in ("slow_again", "mute_again") and before == 1:
        time.sleep(4 if word == "slow_again" else 300)
    if word == "litter":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", str(ctx.run_dir)])
    with connected(ctx) as client:
        if word == "stop_once" and before == 0:
            time.sleep(2)  # it has been heard for longer than the launcher's last look is old
            os.kill(os.getpid(), signal.SIGSTOP)
        if word == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(300)
        if word == "misses_the_end":
            time.sleep(300)
        if word == "drains":
            drain()
            return ExitCode.TERMINATED
        if word in ("loses_sigterm", "swallows_sigterm"):
            lose_the_first_exit(ctx, in_callback=word == "loses_sigterm")
        with contextlib.suppress(LinkError):
            return until_shutdown(client)
    return 1


def tell(ctx: Context) -> int:
    """Prints what it was given."""
    import torch

    given = f"resume={ctx.resume} actors={ctx.config.actors} in {ctx.run_dir}"
    threads = f"threads {torch.get_num_threads()}, told {ctx.config.launch.threads_per_worker}"
    print(f"{ctx.name} {ctx.incarnation} {ctx.run_id} {ctx.buffer_address} {given} {threads}")
    return 0


def drain() -> None:
    """On SIGTERM: a while longer than the grace of the test that asks for this."""
    asked = threading.Event()
    with on_sigterm(asked.set, 300.0):
        asked.wait(300.0)
        time.sleep(DRAIN_S)


class Held:
    """Something a weak reference can point at."""


def lose_the_first_exit(ctx: Context, *, in_callback: bool) -> None:
    """The SystemExit of SIGTERM comes where it is lost; the next one is followed by a slow cleanup."""

    def hold(_: object = None) -> None:
        (ctx.run_dir / f"{ctx.name}.holds").touch()
        time.sleep(300)

    try:
        if in_callback:
            held = Held()
            reference = weakref.ref(held, hold)
            del held
            assert reference() is None
        else:
            try:
                hold()
            except BaseException:
                print("swallowed")
        while True:
            time.sleep(0.01)
    finally:
        with contextlib.suppress(OSError):
            time.sleep(4 * LEAVE_AGAIN_S)
            raise OSError("cleaning up goes through exceptions of its own")
        (ctx.run_dir / f"{ctx.name}.cleaned_up").touch()


def learner(ctx: Context) -> int:
    """Ends the run when the file `finish` appears: what it holds says how."""
    note_pid(ctx)
    word = behaviour(ctx)
    with connected(ctx) as client:
        if word == "crash":
            raise RuntimeError("loss is NaN")
        if word == "leaves":
            return 0
        word = wait_for(ctx.run_dir / "finish")
        client.send(RunFinished(ok=word == "ok", reason=word))
        return until_shutdown(client)


def wait_for(file: Path) -> str:
    while not file.is_file():
        time.sleep(0.02)
    return file.read_text(encoding="utf-8")
