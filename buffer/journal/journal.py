"""The journal: turns are written here before anything that they caused is sent.

    write(turn)      commits it, with all that waits. Never raises for a disk that is full or broken:

    taking      all is well
    trouble     A commit failed. The reserve, a file that only takes up space, is given up, and with its space turns are
                still written. The owner must stop taking in new work; what is small (scores, trained batches, credit)
                goes on.
    in memory   The reserve is used up too, or no help (read-only, broken): turns wait in memory. What was sent in the
                meantime is known to the peers only. Should the buffer die now, the next one refuses those peers
                (`peer_ahead`) instead of doing anything twice.
    blocked     As many bytes wait as may: the owner must not go on.

Trouble ends when everything is written and the reserve is whole again.

When the log has grown past `log_bytes`, and past twice the image, `wants_image` is true: the owner puts an image in
place of the log.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Final

from buffer.config import Sync
from buffer.journal.store import Store, StoreUnwritable

RETRY_S: Final = 0.5
IMAGE_SHARE: Final = 2
"""The log may grow to this many times the image before there is a new one: what images cost stays in proportion."""

log = logging.getLogger(__name__)


class Journal:
    """Of one run, in `folder`. Raises StoreCorrupt and StoreUnwritable at the start only."""

    def __init__(self, folder: Path, *, sync: Sync, log_bytes: int, reserve_bytes: int, memory_bytes: int) -> None:
        self._folder = folder
        self._log_bytes = log_bytes
        self._reserve_bytes = reserve_bytes
        self._memory_bytes = memory_bytes
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._image_bytes = 0
        self._next_image_at = log_bytes
        self._trouble = ""
        self._retry_at_s = 0.0
        self.store = Store(folder, sync=sync)
        self._reserve = folder / "reserve"
        if not self._keep_reserve():
            self._trouble = f"no room for a reserve of {reserve_bytes >> 20} MiB"

    def __repr__(self) -> str:
        state = f"trouble: {self._trouble}" if self._trouble else "taking"
        return f"Journal({state}, log={self.store.log_bytes >> 10} KiB, waiting={self._waiting_bytes >> 10} KiB)"

    @property
    def trouble(self) -> str:
        """What is wrong with the disk; empty: nothing."""
        return self._trouble

    @property
    def waiting_bytes(self) -> int:
        """Turns that are in memory only."""
        return self._waiting_bytes

    @property
    def blocked(self) -> bool:
        return self._waiting_bytes > self._memory_bytes

    @property
    def wants_image(self) -> bool:
        return self.store.log_bytes >= self._next_image_at and not self._trouble

    def image_read(self, n_bytes: int) -> None:
        """The journal began with an image of this size."""
        self._image_bytes = n_bytes
        self._next_image_at = max(self._log_bytes, IMAGE_SHARE * n_bytes)

    def write(self, body: bytes, now_s: float) -> None:
        """Commit a turn, if that is possible now. `now_s`: any clock."""
        self._waiting.append(body)
        self._waiting_bytes += len(body)
        if self._waiting_bytes == len(body) or now_s >= self._retry_at_s:
            self._commit(now_s)

    def mend(self, now_s: float) -> None:
        """Try again, when it is time, to write what waits and to get out of trouble."""
        if self._trouble and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + RETRY_S
            if (not self._waiting or self._commit(now_s)) and self._keep_reserve():
                log.warning("the journal can be written again; new work is taken in")
                self._trouble = ""

    def put_image(self, body: bytes) -> None:
        """Of the state after all turns so far."""
        try:
            self.store.put_image(body)
            self.image_read(len(body))
        except StoreUnwritable as error:
            log.warning("no image of %d bytes: %s; the log grows on", len(body), error)
            self._next_image_at = self.store.log_bytes + self._log_bytes // 4

    def close(self) -> None:
        """May be called again."""
        self.store.close()

    def remove(self) -> None:
        """The run is over, and what became of everything is written elsewhere."""
        self.close()
        gone = self._folder.with_name(f"{self._folder.name}.gone")  # at once or not at all, should we die now
        shutil.rmtree(gone, ignore_errors=True)
        self._folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _commit(self, now_s: float) -> bool:
        """With the reserve's space, if need be."""
        while True:
            try:
                self.store.append(self._waiting)
            except StoreUnwritable as error:
                if not self._trouble:
                    log.error("the journal cannot be written: %s; no new work is taken in until it can", error)
                self._trouble = str(error)
                self._retry_at_s = now_s + RETRY_S
                if not self._reserve.exists():
                    return False
                self._reserve.unlink(missing_ok=True)
            else:
                self._waiting.clear()
                self._waiting_bytes = 0
                return True

    def _keep_reserve(self) -> bool:
        """Take up the space that turns will need when there is no other. False: there is none now either."""
        try:
            with self._reserve.open("ab") as file:
                if os.fstat(file.fileno()).st_size < self._reserve_bytes:
                    os.posix_fallocate(file.fileno(), 0, self._reserve_bytes)
        except OSError as error:
            log.debug("no reserve: %s", error)
            self._reserve.unlink(missing_ok=True)
            return False
        return True
