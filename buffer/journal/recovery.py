"""Start of a buffer process: from nothing, or from the journal that its predecessor left."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from stillhouse.buffer.config import BufferConfig
from stillhouse.buffer.core import Core, decode_turn, replay
from stillhouse.buffer.journal.database import StoreCorrupt, StoreUnwritable
from stillhouse.buffer.journal.freezer import ThawError
from stillhouse.buffer.journal.image import restore_image
from stillhouse.buffer.journal.journal import Journal
from stillhouse.buffer.state import BufferState
from stillhouse.protocol.errors import RemoteProtocolError
from stillhouse.protocol.handshake import Doorkeeper
from stillhouse.protocol.messages import Ledger, WeightVersion
from stillhouse.protocol.session import SessionBook

log = logging.getLogger(__name__)


class JournalError(Exception):
    """The buffer cannot continue from the journal that is there. The message says what to do."""


class Beginning(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the first state of a run is made of, and which a process that continues it must match."""

    release: str
    run_id: str
    config: BufferConfig
    version: WeightVersion
    carried: Ledger | None
    vocab_fingerprint: str | None
    vocab_size: int | None

    def core(self) -> Core:
        return Core(BufferState(self.config, version=self.version, carried=self.carried, vocab_size=self.vocab_size))

    def book(self) -> SessionBook:
        return SessionBook(Doorkeeper(run_id=self.run_id, vocab_fingerprint=self.vocab_fingerprint))


class Started(NamedTuple):
    """Starting point of the buffer's loop."""

    core: Core
    book: SessionBook | None
    """Sessions of the process before this one; None if there was none."""
    newest_s: float | None
    """Reading of the core's clock at which it stopped."""
    journal: Journal


def start(folder: Path, beginning: Beginning, *, goes_on: bool = False) -> Started:
    """Restore this run's journal from `folder`, or start a new one. The journal of another run is removed: the run was
    resumed from a checkpoint since then. `goes_on`: a buffer of this run existed before, so that starting anew would
    forget what was acknowledged to peers, and would use the same ids again. Raises JournalError."""
    config = beginning.config
    try:
        _forget_other_run(folder, beginning.run_id)
        journal = Journal(folder, sync=config.journal_sync, log_bytes=config.journal_log_mb << 20)
        try:
            found = journal.store.meta()
            if found is not None:
                return _restored(journal, _beginning(found, folder), beginning, folder)
            if goes_on:
                raise JournalError(
                    f"the journal is gone: a buffer of this run has died, and {folder} contains nothing of it; "
                    "resume the run from its last checkpoint"
                )
            journal.store.begin(msgspec.msgpack.encode(beginning))
            return Started(beginning.core(), None, None, journal)
        except BaseException:
            journal.close()
            raise
    except StoreCorrupt as error:
        raise JournalError(f"the journal is damaged: {error}; {_remedy(folder)}") from error
    except StoreUnwritable as error:
        raise JournalError(
            f"the journal cannot be opened: {error}; expected a writable folder {folder} that no other buffer has open"
        ) from error


class CoreClock:
    """A clock, in seconds, that never goes back: it continues where the process before stopped, as if no time had
    passed."""

    def __init__(self, newest_s: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ahead_s = 0.0 if newest_s is None else newest_s - clock()

    def __call__(self) -> float:
        return self._clock() + self._ahead_s


def _forget_other_run(folder: Path, run_id: str) -> None:
    """Remove another run's journal without opening it: a power failure may have damaged it, and it is not needed."""
    owner = folder / "run_id"
    try:
        if owner.exists() and owner.read_text(encoding="utf-8") != run_id:
            log.warning(
                "removing the journal of the run %s: this is the run %s", owner.read_text(encoding="utf-8"), run_id
            )
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # weight plans, which contain keys, pass through it
        if not owner.exists():
            with owner.open("x", encoding="utf-8") as file:
                file.write(run_id)
    except OSError as error:
        raise StoreUnwritable(str(error)) from error


def _beginning(body: bytes, folder: Path) -> Beginning:
    try:
        return msgspec.msgpack.decode(body, type=Beginning)
    except msgspec.DecodeError as error:
        raise JournalError(f"the journal was written by another release: {error}; {_remedy(folder)}") from error


def _expect_same(former: Beginning, beginning: Beginning, folder: Path) -> None:
    if former.release != beginning.release:
        raise JournalError(
            f"the journal was written by release {former.release} of the buffer's code, this is "
            f"{beginning.release}, which may read the same turns differently; continue with that release, or: "
            f"{_remedy(folder)}"
        )
    was, now = msgspec.structs.asdict(former.config), msgspec.structs.asdict(beginning.config)
    differ = [f"{key} was {was[key]}, is {now[key]}" for key in was if was[key] != now[key]]
    if differ:
        raise JournalError(
            f"buffer settings of this run have changed: {'; '.join(differ)}; start it with the former ones, or: "
            f"{_remedy(folder)}"
        )


def _remedy(folder: Path) -> str:
    return f"remove {folder} and resume the run from its last checkpoint (what was not trained by then is repeated)"


def _restored(journal: Journal, former: Beginning, beginning: Beginning, folder: Path) -> Started:
    _expect_same(former, beginning, folder)
    began_s = time.monotonic()
    book = beginning.book()
    core, newest_s = former.core(), None
    try:
        image = journal.store.image()
        if image is not None:
            core, newest_s = restore_image(image, book, journal.store.blob)
            journal.image_read(len(image))
        turns = (decode_turn(body, journal.store.blob) for body in journal.store.turns())
        newest_s = replay(core, book, turns) or newest_s
    except (ThawError, msgspec.DecodeError, RemoteProtocolError) as error:
        raise StoreCorrupt(f"{journal.store.path}: {type(error).__name__}: {error}") from error
    log.info(
        "restored in %.2f s from an image of %d KiB and %d KiB of turns; %d peers are expected back",
        time.monotonic() - began_s,
        (0 if image is None else len(image)) >> 10,
        journal.store.log_bytes >> 10,
        len(book.sessions),
    )
    return Started(core, book, newest_s, journal)
