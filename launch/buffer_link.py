"""The launcher's connection to the buffer: asks for snapshots, hears of the end. Nothing here is waited for."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Final

import msgspec

from buffer.server import BufferAddress
from protocol.client import Client
from protocol.errors import LinkError, ProtocolError
from protocol.keys import ClientKeys
from protocol.messages import Hello, Shutdown, Snapshot, SnapshotWanted

CONNECT_TIMEOUT_S: Final = 30.0
ANEW_S: Final = 0.5
log = logging.getLogger(__name__)


def read_address(file: Path, run_id: str) -> str | None:
    """Where this run's buffer listens, or None while it does not yet."""
    if not file.is_file():
        return None
    told = msgspec.json.decode(file.read_bytes(), type=BufferAddress)
    return told.address if told.run_id == run_id else None


def read_incarnation(file: Path) -> str | None:
    """The buffer's process that listens, or did last."""
    return msgspec.json.decode(file.read_bytes(), type=BufferAddress).incarnation if file.is_file() else None


class BufferLink:
    """The newest snapshot, and how the run ended, as far as the buffer has told."""

    def __init__(
        self,
        address: str,
        run_id: str,
        incarnation: str,
        keys: ClientKeys | None = None,
        *,
        name: str = "launcher",
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        reconnect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        """Connects; raises protocol errors when that fails. `run_id` empty: whichever run this is. `keys` None: not
        encrypted. `reconnect_timeout_s`: after a buffer that does not answer for so long the link is lost."""
        hello = Hello(role="launcher", name=name, incarnation=incarnation, run_id=run_id, vocab_fingerprint="")
        self._client = Client(
            address, hello, keys=keys, connect_timeout_s=connect_timeout_s, reconnect_timeout_s=reconnect_timeout_s
        )
        self.snapshot: Snapshot | None = None
        self.shutdown: Shutdown | None = None
        self.lost: str | None = None
        """Why the link is down for good, once it is."""
        self._asked_s = self._unanswered_since_s = 0.0
        self._answered = True
        try:
            self.run_id = self._client.connect().run_id
        except ProtocolError:
            self._client.close("could not connect")
            raise

    def ask(self, now_s: float, every_s: float) -> None:
        """Ask for a snapshot if the last question is answered and `every_s` ago (or was lost, long ago)."""
        due_s = every_s if self._answered else max(every_s, 5.0)
        if self.lost is None and now_s - self._asked_s >= due_s:
            self._unanswered_since_s = now_s if self._answered else self._unanswered_since_s
            self._asked_s, self._answered = now_s, False
            try:
                self._client.send(SnapshotWanted())
            except ProtocolError as error:
                self._give_up(error)

    def ask_anew(self, now_s: float) -> None:
        """Take what was asked for before, then ask: the next answer is of now."""
        while not self.answered and time.monotonic() - now_s < ANEW_S and self.lost is None:
            self.take()
            time.sleep(0.01)
        self._answered = True
        self.ask(now_s, -math.inf)

    @property
    def answered(self) -> bool:
        """Nothing is asked that was not answered."""
        return self._answered

    def unanswered_s(self, now_s: float) -> float:
        """How long the buffer has owed an answer."""
        return 0.0 if self._answered else now_s - self._unanswered_since_s

    def take(self) -> bool:
        """Read what has come; True if there is a newer snapshot."""
        newer = False
        while self.lost is None:
            try:
                received = self._client.recv(0.0)
            except ProtocolError as error:
                self._give_up(error)
                break
            if received is None:
                break
            match received.message:
                case Snapshot() as snapshot:
                    self.snapshot, self._answered, newer = snapshot, True, True
                case Shutdown() as shutdown:
                    self.shutdown = shutdown
                case other:
                    log.warning("the launcher has no use for %s", type(other).__name__)
        return newer

    def close(self) -> None:
        """Say goodbye; what was read stays. Idempotent."""
        self.lost = self.lost or "closed"
        self._client.close("the launcher is done")

    def _give_up(self, error: ProtocolError) -> None:
        if isinstance(error, LinkError):
            log.info("link to the buffer: %s", error)
        else:
            log.error("link to the buffer: %s", error)
        self.lost = str(error)
