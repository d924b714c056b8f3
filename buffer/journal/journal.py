"""The journal: every turn is written here before anything that it caused is sent.

`write(turn)` commits a turn, together with all that wait. It never raises for a full or broken disk. The states are:

    normal      Turns are committed.
    trouble     A commit failed. The reserve, a file that only occupies space, is deleted, and turns are still written
                in its space. The owner must accept no new work; small messages (scores, trained batches, credit) go on.
    in memory   The reserve is used up too, or does not help (read-only or broken disk): turns wait in memory. What was
                sent in the meantime is known to the peers only. If the buffer dies now, its successor refuses those
                peers (`peer_ahead`) rather than do anything twice.
    blocked     The limit of waiting bytes is reached: the owner must stop.

Trouble ends when everything is written and the reserve is complete again.

When the log has grown past `log_bytes` and past twice the size of the image, `wants_image` is true, and the owner
starts a new image. A fork writes it (`buffer.journal.imaging`). Turns are committed meanwhile, and when the image is
complete it takes the place of those before it.
"""

# Why it is so: docs/decisions/journal.md

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from stillhouse.buffer.config import Sync
from stillhouse.buffer.journal.database import StoreUnwritable
from stillhouse.buffer.journal.freezer import Frozen
from stillhouse.buffer.journal.imaging import Finished, ImageFork, Outcome, discard
from stillhouse.buffer.journal.store import Blob, Position, Store
from stillhouse.protocol.atomic_file import not_a_link

RETRY_S: Final = 0.5
IMAGE_SHARE: Final = 2
"""The log may grow to this many times the size of the image before a new one is made, which bounds the cost of
images."""

log = logging.getLogger(__name__)


class Journal:
    """The journal of one run, in `folder`. Raises StoreCorrupt and StoreUnwritable only when it is opened."""

    def __init__(self, folder: Path, *, sync: Sync, log_bytes: int, reserve_bytes: int, memory_bytes: int) -> None:
        self._folder = folder
        self._log_bytes = log_bytes
        self._reserve_bytes = reserve_bytes
        self._memory_bytes = memory_bytes
        self._waiting: list[bytes] = []
        self._waiting_blobs: list[Blob] = []
        self._waiting_bytes = 0
        self._next_image_at = log_bytes
        self._trouble = ""
        self._retry_at_s = 0.0
        self._flush = sync == "disk"
        self._fork: ImageFork | None = None
        self._fork_position = Position(0, 0, 0)
        """Where the log was when the image was started."""
        self.store = Store(folder, sync=sync)
        self._reserve = folder / "reserve"
        if not self._keep_reserve():
            self._trouble = f"no room for a reserve of {reserve_bytes >> 20} MiB"

    def __repr__(self) -> str:
        state = f"trouble: {self._trouble}" if self._trouble else "taking"
        return f"Journal({state}, log={self.store.log_bytes >> 10} KiB, waiting={self._waiting_bytes >> 10} KiB)"

    @property
    def trouble(self) -> str:
        """Description of what is wrong with the disk; empty if nothing is."""
        return self._trouble

    @property
    def waiting_bytes(self) -> int:
        """Size of the turns that are in memory only."""
        return self._waiting_bytes

    @property
    def blocked(self) -> bool:
        return self._waiting_bytes > self._memory_bytes

    @property
    def wants_image(self) -> bool:
        return self.store.log_bytes >= self._next_image_at and self.may_start_image

    @property
    def may_start_image(self) -> bool:
        """Return True if everything is written and no image is being made."""
        return not self._trouble and self._fork is None

    def image_read(self, n_bytes: int) -> None:
        """Note the size of the present image."""
        self._next_image_at = max(self._log_bytes, IMAGE_SHARE * n_bytes)

    def write(self, body: bytes, now_s: float, blobs: Sequence[Blob] = ()) -> None:
        """Commit a turn, or keep it in memory if that is impossible now. `now_s`: any clock."""
        waited = bool(self._waiting)
        self._waiting.append(body)
        self._waiting_blobs += blobs
        self._waiting_bytes += len(body) + sum(len(content) for _, content in blobs)
        if not waited or now_s >= self._retry_at_s:
            self._commit(now_s)

    def mend(self, now_s: float) -> None:
        """Periodically retry to write the waiting turns and to restore the reserve."""
        if self._trouble and now_s >= self._retry_at_s:
            self._retry_at_s = now_s + RETRY_S
            if (not self._waiting or self._commit(now_s)) and self._keep_reserve():
                log.warning("the journal can be written again; new work is accepted")
                self._trouble = ""

    def start_image(self, make: Callable[[], Frozen | None]) -> None:
        """Begin an image of the state after all turns so far. `make` as in `ImageFork`: it runs in a fork."""
        try:
            self._fork = ImageFork(self.store.next_image, make, flush=self._flush)
            self._fork_position = self.store.position
        except OSError as error:
            self._no_image(f"no process could be started: {error}")

    def tend_image(self) -> Finished | None:
        """Let an image that has become complete count. Returns what became of it, once."""
        finished = None if self._fork is None else self._fork.finished()
        if self._fork is None or finished is None:
            return None
        path, self._fork = self._fork.path, None
        if finished.outcome is not Outcome.WRITTEN:
            discard(path)
            self._no_image(f"its process ended: {finished.outcome.name}")
            return finished
        try:
            self.store.adopt(self._fork_position)
            self.image_read(finished.n_bytes)
        except StoreUnwritable as error:
            self._no_image(str(error))
        return finished

    def _no_image(self, why: str) -> None:
        log.warning("an image could not be written: %s; the log keeps growing", why)
        self._next_image_at = self.store.log_bytes + self._log_bytes // 4

    def _stop_image(self) -> None:
        if self._fork is not None:
            self._fork.stop()
            self._fork = None

    def close(self) -> None:
        """Close the store. May be called twice."""
        self._stop_image()
        self.store.close()

    def remove(self) -> None:
        """Delete the journal of a finished run."""
        self.close()
        gone = self._folder.with_name(f"{self._folder.name}.gone")  # atomic: a crash leaves a whole journal or none
        shutil.rmtree(gone, ignore_errors=True)
        self._folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _commit(self, now_s: float) -> bool:
        """Commit the waiting turns, in the space of the reserve if necessary. Returns False if that fails too."""
        while True:
            try:
                self.store.append(self._waiting, self._waiting_blobs)
            except StoreUnwritable as error:
                if not self._trouble:
                    log.error("the journal cannot be written: %s; no new work is accepted until it can", error)
                self._trouble = str(error)
                if self._fork is not None:
                    self._stop_image()
                    self._no_image("its room is needed")  # not at once again, or it would take that room again
                self._retry_at_s = now_s + RETRY_S
                if not self._reserve.exists() or not discard(self._reserve):
                    return False
            else:
                self._waiting.clear()
                self._waiting_blobs.clear()
                self._waiting_bytes = 0
                return True

    def _keep_reserve(self) -> bool:
        """Occupy the space that turns will need when the disk is full. Returns False if it is full already."""
        try:
            with open(self._reserve, "ab", opener=not_a_link) as file:
                if os.fstat(file.fileno()).st_size < self._reserve_bytes:
                    os.posix_fallocate(file.fileno(), 0, self._reserve_bytes)
        except OSError as error:
            log.debug("no disk space could be reserved: %s", error)
            discard(self._reserve)
            return False
        return True
