"""Holds a run's store for one launch: takes it, shows beats from a thread, and gives it back (protocol.store_owner)."""

from __future__ import annotations

import logging
import os
import platform
import queue
import secrets
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.runfolder import is_locked
from stillhouse.protocol.object_store import Store, StoreError
from stillhouse.protocol.store_owner import BEAT_S, SILENT_S, Displaced, Owner, StoreOwner, read_held, take

log = logging.getLogger(__name__)


class StoreGuard:
    """The store is this launch's until `close`, or until another launch has taken it."""

    def __init__(self, owner: StoreOwner) -> None:
        self.owner = owner
        self.displaced = ""
        """Why the run must end; empty as long as it may go on."""
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="store", daemon=True)
        self._thread.start()

    def news(self) -> Iterator[str]:
        """Lines for the user, each once."""
        while not self._news.empty():
            yield self._news.get()

    def close(self) -> None:
        """The next launch need not wait. A store that cannot be reached is given back by silence."""
        self._over.set()
        self._thread.join(SILENT_S)
        if self.displaced:
            return
        try:
            self.owner.end()
        except StoreError as error:
            log.warning("the store is not given back: %s; the next launch waits for %.0f s", error, SILENT_S)

    def _beat(self) -> None:
        url, failed, since_s = self.owner.store.url, 0, 0.0
        while not self._over.wait(BEAT_S):
            try:
                self.owner.beat()
            except Displaced as error:
                self.displaced = f"{error}. What was trained since then is in this run's folder only"
                return
            except StoreError as error:
                failed += 1
                since_s = since_s if failed > 1 else time.monotonic()
                log.warning("no beat in the store (%d failed in a row): %s", failed, error)
                if failed == 1:
                    self._news.put(
                        f"store: {error}. The run goes on; until the store is back, checkpoints are in the run's "
                        f"folder only, and after {SILENT_S:.0f} s another launch may take the store"
                    )
            else:
                if failed:
                    self._news.put(f"store: {url} answers again, after {time.monotonic() - since_s:.0f} s")
                failed = 0


@contextmanager
def held_store(config: RunConfig, folder: Path | None, *, resume: bool) -> Generator[StoreGuard | None]:
    """Hold the configuration's store; None without one. `folder`: the run's, if it is known already. A dead launch from
    there, on this host, is not waited for. Raises ConfigError if another launch has the store, or it is of no use."""
    if not config.store:
        yield None
        return
    guard = StoreGuard(_take(config.store, folder, resume=resume))
    try:
        yield guard
    finally:
        guard.close()


def _take(url: str, folder: Path | None, *, resume: bool) -> StoreOwner:
    def waits(found: Owner) -> None:
        print(
            f"stillhouse: {url} is held by {found}, which did not end in order; waiting up to {SILENT_S:.0f} s for a "
            "sign of life",
            file=sys.stderr,
        )

    claim = Owner(
        token=secrets.token_hex(16),
        run=folder.name if folder is not None else url.rstrip("/").rpartition("/")[2],
        host=platform.node(),
        pid=os.getpid(),
        since=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )
    held = read_held(folder) if resume and folder is not None and not is_locked(folder) else None

    def dead(found: Owner) -> bool:
        """It ran here from this folder. From a copy of its folder, it may still live in the other one."""
        if held is None or found.token != held.token or found.host != claim.host:
            return False
        return found.pid == claim.pid or not psutil.pid_exists(found.pid)

    try:
        return take(Store(url), claim, new=not resume, dead=dead, waits=waits)
    except StoreError as error:
        raise ConfigError(f"store: {error}") from error
