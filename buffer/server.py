"""The buffer's process: starts from nothing or from its predecessor's journal, runs the loop, and reports the outcome.

It has three phases:
    running     until the learner sends RunFinished, or SIGTERM arrives (then the run has failed; a connected learner
                may leave first, within LEARNER_LEAVES_S)
    draining    all peers were sent Shutdown. Late messages are still answered until all peers have said goodbye, for at
                most DRAIN_S (DRAIN_TERMINATED_S after a SIGTERM; a SIGTERM while draining ends it)
    gone        ledger.json is written. If the loop breaks with an error, it is written too, and the peers are notified

A process that dies in the first two phases is started again with the same arguments. It then continues from RUN/journal
at the address where its peers look for it.

Files in the run's folder: `buffer.json` (BufferAddress) once the server listens, `ledger.json` (the final Snapshot) at
the end, both written atomically, and `journal/` until ledger.json is there.

One process serves the whole run (docs/decisions/removed-features.md)."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.journal.image import release_hash
from stillhouse.buffer.journal.recovery import Beginning, Started, start
from stillhouse.buffer.loop import BufferLoop
from stillhouse.protocol.addresses import lasting_ports
from stillhouse.protocol.atomic_file import write_atomic
from stillhouse.protocol.context import ExitCode
from stillhouse.protocol.errors import AddressUnusable
from stillhouse.protocol.keys import KEYS, load_server_keys
from stillhouse.protocol.messages import Ledger, PeerView, Shutdown, Snapshot, WeightVersion
from stillhouse.protocol.server import PeerServer
from stillhouse.protocol.sigterm import SigtermCount

JOURNAL: Final = "journal"
"""Name of the journal's folder in the run's."""
REBIND_S: Final = 10.0
"""Time for which a restored buffer tries to get its former address back."""

log = logging.getLogger(__name__)


class BufferAddress(msgspec.Struct, frozen=True):
    """Content of buffer.json."""

    address: str
    """ZeroMQ endpoint to connect to."""
    pid: int
    run_id: str
    """Run that wrote the file. The file of a former run in the same folder does not count."""
    incarnation: str = ""
    """Process that listens. A launcher waits for the one that it started last."""


def main(
    *,
    config: BufferConfig,
    run_id: str,
    run_dir: Path,
    incarnation: str = "",
    version: WeightVersion = WeightVersion(0, 0),  # noqa: B008 - frozen
    carried: Ledger | None = None,
    vocab_fingerprint: str | None = None,
    vocab_size: int | None = None,
) -> int:
    """Run the buffer until its run is over. Returns an ExitCode: OK after RunFinished(ok=True) with a ledger that
    balances, TERMINATED after SIGTERM, FAILED otherwise. Raises any error of the core, after notifying all peers, and
    `buffer.journal.recovery.JournalError` if there is a journal of this run from which it cannot continue.

    `incarnation`: id of this process, for buffer.json. `version`: the weights that the run (re)starts from; `carried`:
    the ledger of the checkpoint that it restarts from; both are ignored if there is a journal of this run.
    `vocab_fingerprint`: of the run's tokenizer; None: the learner's. `vocab_size`: token ids at or above it are
    rejected; None: only negative ones are."""
    beginning = Beginning(
        release=release_hash(),
        run_id=run_id,
        config=config,
        version=version,
        carried=carried,
        vocab_fingerprint=vocab_fingerprint,
        vocab_size=vocab_size,
    )
    ended = _ended_before(run_dir, run_id)
    if ended is not None:
        return exit_code(ended, terminated=False)
    started = start(run_dir / JOURNAL, beginning, goes_on=_former_address(run_dir, run_id) is not None)
    server = None
    try:
        server = _listen(run_dir, beginning, started)
        with SigtermCount() as sigterms:
            loop = BufferLoop(server, started, sigterms)
            _write_address(run_dir, BufferAddress(server.address, os.getpid(), run_id, incarnation), started)
            log.info("listening at %s", server.address)
            try:
                loop.run()
            except BaseException as error:
                loop.shut_down_peers(Shutdown(False, f"the buffer broke: {type(error).__name__}: {error}"[:500]))
                _write_ledger(run_dir, loop.snapshot(), broken=True)
                raise
            final = loop.snapshot()
            _write_ledger(run_dir, final)
            started.journal.remove()
            return exit_code(final, terminated=loop.terminated)
    finally:
        if server is not None:
            server.close()
        started.journal.close()


def _listen(folder: Path, beginning: Beginning, started: Started) -> PeerServer:
    """Start the server. A restored buffer listens where it did before, or its peers would not find it."""
    config = beginning.config

    def listen(endpoint: str) -> PeerServer:
        return PeerServer(
            endpoint,
            run_id=beginning.run_id,
            vocab_fingerprint=beginning.vocab_fingerprint,
            heartbeat_s=config.heartbeat_s,
            peer_timeout_s=config.peer_timeout_s,
            keys=load_server_keys(folder / KEYS) if config.encrypted else None,
            restored=started.book,
        )

    former = _former_address(folder, beginning.run_id) if started.book is not None else None
    if former is not None:
        return _listen_again(listen, former)
    return _listen_anew(listen, config.bind)


def _listen_anew(listen: Callable[[str], PeerServer], bind: str) -> PeerServer:
    """Listen at `bind`. If the port is free to choose, take one that will still be free after a restart."""
    host, _, port = bind.rpartition(":")
    for chosen in lasting_ports() if port in ("0", "*") else ():
        with contextlib.suppress(AddressUnusable):
            return listen(f"{host}:{chosen}")
    return listen(bind)


def _listen_again(listen: Callable[[str], PeerServer], former: str) -> PeerServer:
    """Listen at the former address. The process before this one may still be exiting."""
    deadline_s = time.monotonic() + REBIND_S
    while True:
        try:
            return listen(former)
        except AddressUnusable as error:
            if time.monotonic() > deadline_s:
                raise AddressUnusable(
                    f"{error}; the peers of this run look for the buffer there: end the process that holds the address"
                ) from error
            time.sleep(0.1)


def _ended_before(folder: Path, run_id: str) -> Snapshot | None:
    """The final snapshot of a process of this run that died after it had written it and removed its journal."""
    ledger = folder / "ledger.json"
    if (folder / JOURNAL).exists() or not ledger.exists() or _former_address(folder, run_id) is None:
        return None
    return msgspec.json.decode(ledger.read_bytes(), type=Snapshot)


def _write_ledger(folder: Path, final: Snapshot, *, broken: bool = False) -> None:
    try:
        write_atomic(folder / "ledger.json", as_json(without_infinities(final)))
    except OSError:
        if not broken:
            raise
        log.exception("ledger.json was not written")  # the error that broke the loop is raised


def _write_address(folder: Path, address: BufferAddress, started: Started) -> None:
    try:
        write_atomic(folder / "buffer.json", as_json(address))
    except OSError as error:
        if started.book is None or _former_address(folder, address.run_id) != address.address:
            raise
        log.warning("buffer.json keeps a former process id: %s", error)  # e.g. a full disk; the address is right


def _former_address(folder: Path, run_id: str) -> str | None:
    file = folder / "buffer.json"
    if not file.exists():
        return None
    former = msgspec.json.decode(file.read_bytes(), type=BufferAddress)
    return former.address if former.run_id == run_id else None


def exit_code(final: Snapshot, *, terminated: bool) -> ExitCode:
    """Exit code of the process, from its final snapshot."""
    if not final.ledger.balanced:
        log.error("the ledger does not balance: %s", final.ledger)
        return ExitCode.FAILED
    log.info("the run is over (%s): %s; ledger balanced", final.phase, final.phase_reason)
    if terminated:
        return ExitCode.TERMINATED
    return ExitCode.OK if final.phase == "finished" else ExitCode.FAILED


def without_infinities(snapshot: Snapshot) -> Snapshot:
    """Remove gauges of peers that are NaN or infinite, which JSON cannot express."""

    def clean(peer: PeerView) -> PeerView:
        return msgspec.structs.replace(peer, stats={k: v for k, v in peer.stats.items() if math.isfinite(v)})

    return msgspec.structs.replace(snapshot, peers=tuple(map(clean, snapshot.peers)))


def as_json(content: msgspec.Struct) -> bytes:
    """Encode as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(content), indent=1)
