"""The launcher's connection to the buffer: it asks for snapshots and hears of the end. Only connecting waits."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Final

import msgspec

from stillhouse.buffer.server import BufferAddress
from stillhouse.protocol.client import Client
from stillhouse.protocol.errors import LinkError, ProtocolError
from stillhouse.protocol.keys import ClientKeys
from stillhouse.protocol.messages import Hello, Shutdown, Snapshot, SnapshotWanted

CONNECT_TIMEOUT_S: Final = 30.0
ANEW_S: Final = 0.5
log = logging.getLogger(__name__)


def read_listening(file: Path) -> BufferAddress | None:
    """Address and incarnation of the buffer that listens, or listened last; None if none did yet."""
    return msgspec.json.decode(file.read_bytes(), type=BufferAddress) if file.is_file() else None


def read_address(file: Path, run_id: str) -> str | None:
    """Address of this run's buffer; None while it does not listen yet."""
    found = read_listening(file)
    return found.address if found is not None and found.run_id == run_id else None


class BufferLink:
    """Holds the newest snapshot, and the Shutdown message once it has arrived."""

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
        """Connects; raises ProtocolError. `run_id`: empty for whichever run
        listens there. `keys`: None for an unencrypted link. `reconnect_timeout_s`: the link is lost after the buffer
        has not answered for this long."""
        hello = Hello(role="launcher", name=name, incarnation=incarnation, run_id=run_id, vocab_fingerprint="")
        self._client = Client(
            address, hello, keys=keys, connect_timeout_s=connect_timeout_s, reconnect_timeout_s=reconnect_timeout_s
        )
        self.snapshot: Snapshot | None = None
        self.shutdown: Shutdown | None = None
        self.lost: str | None = None
        """Why the link is down for good; None while it is not."""
        self._asked_s = self._unanswered_since_s = 0.0
        self._answered = True
        try:
            self.run_id = self._client.connect().run_id
        except ProtocolError:
            self._client.close("could not connect")
            raise

    def ask(self, now_s: float, every_s: float) -> None:
        """Ask for a snapshot, unless the last request is younger than `every_s`, or unanswered and younger than 5 s."""
        due_s = every_s if self._answered else max(every_s, 5.0)
        if self.lost is None and now_s - self._asked_s >= due_s:
            self._unanswered_since_s = now_s if self._answered else self._unanswered_since_s
            self._asked_s, self._answered = now_s, False
            try:
                self._client.send(SnapshotWanted())
            except ProtocolError as error:
                self._give_up(error)

    def ask_anew(self, now_s: float) -> None:
        """Wait briefly for the pending answer, then ask again, so that the next snapshot is a fresh one."""
        while not self.answered and time.monotonic() - now_s < ANEW_S and self.lost is None:
            self.take()
            time.sleep(0.01)
        self._answered = True
        self.ask(now_s, -math.inf)

    @property
    def answered(self) -> bool:
        """Whether every request was answered."""
        return self._answered

    def unanswered_s(self, now_s: float) -> float:
        """How long the buffer has owed an answer; 0 if it owes none."""
        return 0.0 if self._answered else now_s - self._unanswered_since_s

    def take(self) -> bool:
        """Read what has arrived; True if there is a newer snapshot."""
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
        """Close the connection; `snapshot` and `shutdown` stay. Idempotent."""
        self.lost = self.lost or "closed"
        self._client.close("the launcher is done")

    def _give_up(self, error: ProtocolError) -> None:
        if isinstance(error, LinkError):
            log.info("link to the buffer: %s", error)
        else:
            log.error("link to the buffer: %s", error)
        self.lost = str(error)
