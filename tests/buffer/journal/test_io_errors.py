"""An I/O error at each call by which the journal reads or writes, followed by the death of the process."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest

from stillhouse.buffer.config import Sync
from stillhouse.buffer.journal import store as store_module
from stillhouse.buffer.journal.database import StoreUnwritable
from stillhouse.buffer.journal.freezer import Frozen
from stillhouse.buffer.journal.journal import Journal
from stillhouse.buffer.journal.store import JournalStore
from tests.buffer.journal.test_imaging import outcome_of

TURNS = 5
IMAGES = (2, 4)
"""An image is made after so many turns."""


class Faults:
    """Lets call number `at` fail, and counts."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.calls: list[str] = []

    def call(self, what: str, error: type[Exception] = lmdb.DiskError) -> None:
        self.calls.append(what)
        if len(self.calls) == self.at:
            text = f"{what}: Input/output error"
            raise OSError(errno.EIO, text) if error is OSError else error(text)

    def around(self, function: Callable[..., Any], what: str) -> Callable[..., Any]:
        def called(*args: Any, **settings: Any) -> Any:
            self.call(what, OSError)
            return function(*args, **settings)

        return called


class Transaction:
    """Fails before it is committed, or after."""

    def __init__(self, real: Any, faults: Faults) -> None:
        self._real, self._faults = real, faults

    def __enter__(self) -> Any:
        return self._real.__enter__()

    def __exit__(self, *error: Any) -> None:
        if error[0] is not None:
            self._real.__exit__(*error)
            return
        try:
            self._faults.call("commit")
        except lmdb.Error:
            self._real.abort()
            raise
        self._real.__exit__(None, None, None)
        self._faults.call("after the commit")


class Environment:
    """LMDB's, with faults."""

    def __init__(self, real: Any, faults: Faults) -> None:
        self._real, self._faults = real, faults

    def begin(self, *, write: bool = False, **settings: Any) -> Any:
        self._faults.call("begin")
        transaction = self._real.begin(write=write, **settings)
        return Transaction(transaction, self._faults) if write else transaction

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def content(number: int) -> bytes:
    return msgspec.msgpack.encode([b"blob %d" % number])


def live(folder: Path, faults: Faults, sync: Sync, monkeypatch: pytest.MonkeyPatch) -> int:
    """Write turns with a blob each, and images. Returns how many turns were acknowledged."""
    journal = Journal(folder, sync=sync, log_bytes=1 << 30)
    store, acknowledged = journal.store, 0
    store.begin(b"meta")
    with monkeypatch.context() as patch:
        patch.setattr(store, "_env", Environment(store._env, faults))  # pyright: ignore[reportPrivateUsage]
        patch.setattr(os, "fsync", faults.around(os.fsync, "fsync"))
        patch.setattr(store_module, "read_blobs", faults.around(store_module.read_blobs, "read_blobs"))
        patch.setattr(Path, "unlink", faults.around(Path.unlink, "unlink"))
        for turn in range(1, TURNS + 1):
            for _ in range(2):  # the loop tries again, too
                with contextlib.suppress(StoreUnwritable):
                    journal.write(b"turn %d" % turn, [(turn, content(turn))])
                    acknowledged = turn
                    break
            else:
                break
            if turn in IMAGES and journal.may_start_image:
                # every second blob is needed no more
                journal.start_image(lambda turn=turn: Frozen(b"%d" % turn, tuple(range(1, turn + 1, 2))))
                outcome_of(journal.tend_image)
    journal.close()
    return acknowledged


def check(folder: Path, acknowledged: int) -> None:
    store = JournalStore(folder, sync="process")
    image = store.image()
    turns = list(store.turns())
    first = 0 if image is None else int(image)
    assert first + len(turns) >= acknowledged, "a turn that was acknowledged is gone"
    assert turns == [b"turn %d" % turn for turn in range(first + 1, first + len(turns) + 1)]
    needed = [*range(1, first + 1, 2), *range(first + 1, first + len(turns) + 1)]
    assert [store.blob(number) for number in needed] == [[b"blob %d" % number] for number in needed]
    assert len(list(folder.glob("image-*"))) <= 1
    store.close()


@pytest.mark.parametrize("sync", [pytest.param("process", marks=pytest.mark.slow), "disk"])  # "disk" has all calls
def test_after_an_error_at_any_call_and_a_death_everything_that_was_acknowledged_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: Sync
) -> None:
    none = Faults(0)
    assert live(tmp_path / "none", none, sync, monkeypatch) == TURNS
    assert len(none.calls) > 2 * (TURNS + len(IMAGES))
    assert ("fsync" in none.calls) == (sync == "disk") and "read_blobs" in none.calls
    late = 0
    for at in range(1, len(none.calls) + 4):
        faults, folder = Faults(at), tmp_path / str(at)
        acknowledged = live(folder, faults, sync, monkeypatch)
        late += acknowledged < TURNS
        check(folder, acknowledged)
    assert late <= 3, "one error must not be the end: only the last turn may still wait"
