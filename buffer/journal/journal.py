"""The journal: every turn is written here before anything that it caused is sent.

When the log has grown past `log_bytes` and past twice the size of the image, `wants_image` is true, and the owner
starts a new image. A fork writes it (`buffer.journal.imaging`). Turns are committed meanwhile, and when the image is
complete it takes the place of those before it.
"""

# Why it is so: docs/decisions/journal.md

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from stillhouse.buffer.config import Sync
from stillhouse.buffer.journal.database import StoreUnwritable
from stillhouse.buffer.journal.freezer import Frozen
from stillhouse.buffer.journal.imaging import Finished, ImageFork, ImageOutcome, discard
from stillhouse.buffer.journal.store import Blob, JournalStore, Position

IMAGE_SHARE: Final = 2
"""The log may grow to this many times the size of the image before a new one is made, which bounds the cost of
images."""

log = logging.getLogger(__name__)


class Journal:
    """The journal of one run, in `folder`. Raises StoreCorrupt and StoreUnwritable."""

    def __init__(self, folder: Path, *, sync: Sync, log_bytes: int) -> None:
        self._folder = folder
        self._log_bytes = log_bytes
        self._next_image_at = log_bytes
        self._flush = sync == "disk"
        self._fork: ImageFork | None = None
        self._fork_position = Position(0, 0, 0)
        """Where the log was when the image was started."""
        self.store = JournalStore(folder, sync=sync)

    def __repr__(self) -> str:
        return f"Journal(log={self.store.log_bytes >> 10} KiB)"

    @property
    def wants_image(self) -> bool:
        return self.store.log_bytes >= self._next_image_at and self.may_start_image

    @property
    def may_start_image(self) -> bool:
        """Return True if no image is being made."""
        return self._fork is None

    def image_read(self, n_bytes: int) -> None:
        """Note the size of the present image."""
        self._next_image_at = max(self._log_bytes, IMAGE_SHARE * n_bytes)

    def write(self, body: bytes, blobs: Sequence[Blob] = ()) -> None:
        """Commit a turn. Raises StoreUnwritable, e.g. on a full disk; nothing is written then, but an image that was
        being made has given its room to the next try."""
        try:
            self.store.append([body], blobs)
        except StoreUnwritable:
            if self._fork is not None:
                self._stop_image()
                self._no_image("its room is needed")  # not at once again, or it would take that room again
            raise

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
        if finished.outcome is not ImageOutcome.WRITTEN:
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
