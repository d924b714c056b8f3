"""The buffer's process: the loop between the wire (protocol.server) and the core (buffer.state), and nothing else.

    poll the server -> events -> state.peer_joined / peer_lost / handle -> messages -> server.send
    every tick_s    -> state.tick -> messages -> server.send

Three phases, each of them tested:
    running     until the learner says RunFinished, or SIGTERM comes (then the run has failed)
    draining    everybody was told Shutdown; late messages are still answered, until all have said goodbye, for at most
                DRAIN_S (DRAIN_TERMINATED_S after a SIGTERM; a SIGTERM while draining ends it)
    gone        ledger.json is written. It is written when the loop breaks by an error, too, and the peers are told.

Files in the run folder, both written atomically: `buffer.json` (BufferAddress) once the server listens; `ledger.json`
(the final Snapshot) at the end.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Self

import msgspec

from buffer.config import BufferConfig
from buffer.state import BufferState, Outgoing
from protocol.context import ExitCode
from protocol.messages import Batch, Ledger, PeerView, RunFinished, Shutdown, Snapshot, WeightVersion
from protocol.server import Event, FromPeer, PeerDown, PeerUp, Server

DRAIN_S: Final = 30.0
"""After the end: workers may have a checkpoint to finish or an engine to stop before they say goodbye."""
DRAIN_TERMINATED_S: Final = 5.0
"""The same after SIGTERM: whoever sent it waits, and kills in the end."""
STATUS_EVERY_S: Final = 30.0
"""Seconds between two lines of log on how things stand."""

log = logging.getLogger(__name__)


class BufferAddress(msgspec.Struct, frozen=True):
    """buffer.json"""

    address: str
    """ZeroMQ endpoint to connect to."""
    pid: int
    run_id: str
    """The file of a former run in the same folder is not to be believed."""


def main(
    *,
    config: BufferConfig,
    run_id: str,
    run_dir: Path,
    bind: str | None = None,
    version: WeightVersion = WeightVersion(0, 0),  # noqa: B008 - frozen
    carried: Ledger | None = None,
    vocab_fingerprint: str | None = None,
    vocab_size: int | None = None,
) -> int:
    """Run the buffer until its run is over. Returns an ExitCode: OK after RunFinished(ok=True) with a ledger that
    balances, TERMINATED after SIGTERM, FAILED otherwise. Raises what breaks the core, after saying so to all peers.

    `bind`: in place of config.bind. `version`: the weights the run (re)starts from; `carried`: the ledger of the
    checkpoint it restarts from. `vocab_fingerprint`: of the run's tokenizer; None = of the first peer that has one.
    `vocab_size`: token ids from it on are rejected; None = only negative ones are.
    """
    state = BufferState(config, version=version, carried=carried, vocab_size=vocab_size)
    server = Server(
        bind or config.bind,
        run_id=run_id,
        vocab_fingerprint=vocab_fingerprint,
        heartbeat_s=config.heartbeat_s,
        peer_timeout_s=config.peer_timeout_s,
    )
    try:
        with SigtermCount() as sigterms:
            loop = BufferLoop(server, state, sigterms, tick_s=config.tick_s)
            write_atomically(run_dir / "buffer.json", BufferAddress(server.address, os.getpid(), run_id))
            log.info("listening at %s", server.address)
            try:
                loop.run()
            except BaseException as error:
                loop.tell_all(Shutdown(False, f"the buffer broke: {type(error).__name__}: {error}"[:500]))
                raise
            finally:
                final = loop.snapshot()
                write_atomically(run_dir / "ledger.json", without_infinities(final))
            return exit_code(final, terminated=loop.terminated)
    finally:
        server.close()


class SigtermCount:
    """While entered, SIGTERMs are counted instead of obeyed. Does nothing outside the main thread, where signals
    cannot be handled."""

    def __init__(self) -> None:
        self.count = 0
        self._former: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._former is not None:
            signal.signal(signal.SIGTERM, self._former)

    def _note(self, _signum: int, _frame: FrameType | None) -> None:
        self.count += 1


class BufferLoop:
    """One thread; the only caller of both the server and the core."""

    def __init__(self, server: Server, state: BufferState, sigterms: SigtermCount, *, tick_s: float) -> None:
        self._server = server
        self._state = state
        self._sigterms = sigterms
        self._tick_s = tick_s
        self._next_tick_s = 0.0
        self._next_status_s = time.monotonic() + STATUS_EVERY_S
        self._over = False
        self.terminated = False
        """SIGTERM came before the learner had finished the run."""

    def __repr__(self) -> str:
        return f"BufferLoop({self._server!r}, {self._state!r})"

    def run(self) -> None:
        """Both phases."""
        while not self._over:
            self._turn()
            if self._sigterms.count and not self._over:
                self._over = self.terminated = True
                self._send(self._state.give_up("SIGTERM"))
        self._drain()

    def snapshot(self) -> Snapshot:
        """The core's, with what the server refused added to `rejected`."""
        return self._with_refusals(self._state.snapshot(time.monotonic()))

    def tell_all(self, shutdown: Shutdown) -> None:
        """Past the core, which may be broken."""
        for role, name in self._server.peers:
            self._server.send(role, name, shutdown)

    def _drain(self) -> None:
        expected_sigterms = 1 if self.terminated else 0
        deadline_s = time.monotonic() + (DRAIN_TERMINATED_S if self.terminated else DRAIN_S)
        while self._server.peers and time.monotonic() < deadline_s and self._sigterms.count <= expected_sigterms:
            self._turn()
        if self._server.peers:
            log.warning("leaving although still connected: %s", ", ".join(map(str, self._server.peers)))

    def _turn(self) -> None:
        """One poll and, when it is time, one tick."""
        self._server.set_published(self._state.published, self._state.weights)
        for event in self._server.poll(max(0.0, self._next_tick_s - time.monotonic())):
            self._send(self._outcome(event))
        now_s = time.monotonic()
        if now_s >= self._next_tick_s:
            self._next_tick_s = now_s + self._tick_s
            self._send(self._state.tick(now_s))
        if now_s >= self._next_status_s:
            self._next_status_s = now_s + STATUS_EVERY_S
            log.info("%r", self)

    def _outcome(self, event: Event) -> Sequence[Outgoing]:
        now_s = time.monotonic()
        match event:
            case PeerUp(role, name, incarnation, pool):
                return self._state.peer_joined(now_s, role, name, incarnation, pool)
            case PeerDown(role, name):
                return self._state.peer_lost(now_s, role, name)
            case FromPeer(role, name, received):
                if isinstance(received.message, RunFinished):
                    self._over = True
                return self._state.handle(now_s, role, name, received.message, received.arrays)

    def _send(self, messages: Sequence[Outgoing]) -> None:
        for role, name, message, arrays in messages:
            if isinstance(message, Snapshot):
                message = self._with_refusals(message)
            elif isinstance(message, Batch):
                message = msgspec.structs.replace(message, snapshot=self._with_refusals(message.snapshot))
            self._server.send(role, name, message, arrays)

    def _with_refusals(self, snapshot: Snapshot) -> Snapshot:
        refused = self._server.refused
        if not refused:
            return snapshot
        rejected = dict(snapshot.ledger.rejected)
        for code, n in refused.items():
            rejected[code] = rejected.get(code, 0) + n
        return msgspec.structs.replace(snapshot, ledger=msgspec.structs.replace(snapshot.ledger, rejected=rejected))


def exit_code(final: Snapshot, *, terminated: bool) -> ExitCode:
    """How the process ends, after what its last snapshot says."""
    if not final.ledger.balanced:
        log.error("the ledger does not balance: %s", final.ledger)
        return ExitCode.FAILED
    log.info("the run is over (%s): %s; ledger balanced", final.phase, final.phase_reason)
    if terminated:
        return ExitCode.TERMINATED
    return ExitCode.OK if final.phase == "finished" else ExitCode.FAILED


def without_infinities(snapshot: Snapshot) -> Snapshot:
    """JSON has no form for NaN and infinities: gauges of peers that are neither number are left out of the file."""

    def clean(peer: PeerView) -> PeerView:
        return msgspec.structs.replace(peer, stats={k: v for k, v in peer.stats.items() if math.isfinite(v)})

    return msgspec.structs.replace(snapshot, peers=tuple(map(clean, snapshot.peers)))


def write_atomically(path: Path, content: msgspec.Struct) -> None:
    """As JSON; readers see the former file or the whole new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(content), indent=1))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
