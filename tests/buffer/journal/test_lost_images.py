"""Images that never become complete: their fork hangs, dies, or finds no room. The log stays, and others may follow."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stillhouse.buffer.journal import imaging
from stillhouse.buffer.journal.database import StoreCorrupt, StoreUnwritable
from stillhouse.buffer.journal.freezer import Frozen
from stillhouse.buffer.journal.imaging import ImageOutcome
from stillhouse.buffer.journal.journal import Journal
from stillhouse.buffer.journal.store import JournalStore
from tests.buffer.journal.test_imaging import new_journal, outcome_of
from tests.buffer.journal.test_journal import opened
from tests.full_disk import fill, small_disk
from tests.patience import PATIENCE_S, eventually
from tests.sim.chaos.disk import BALLAST


def test_a_fork_that_does_not_end_is_killed_and_another_may_follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is stopped, which no signal but SIGKILL ends."""
    monkeypatch.setattr(imaging, "LIMIT_S", 0.2)
    journal = new_journal(tmp_path)
    journal.write(b"one")
    journal.start_image(stop_myself)
    pid = fork_of(journal)
    assert outcome_of(journal.tend_image).outcome is ImageOutcome.OVERDUE
    assert not psutil.pid_exists(pid), "reaped, too"
    monkeypatch.setattr(imaging, "LIMIT_S", PATIENCE_S)
    journal.start_image(lambda: Frozen(b"image"))
    assert outcome_of(journal.tend_image).outcome is ImageOutcome.WRITTEN
    journal.close()
    assert opened(tmp_path) == (b"image", [])


def test_an_image_that_is_complete_just_in_time_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended while the loop did something else, and is looked at after its limit."""
    journal = new_journal(tmp_path)
    journal.start_image(lambda: Frozen(b"image"))
    fork = psutil.Process(fork_of(journal))
    eventually(lambda: fork.status() == psutil.STATUS_ZOMBIE, "the end of the fork")
    monkeypatch.setattr(imaging, "LIMIT_S", 0.0)
    assert outcome_of(journal.tend_image).outcome is ImageOutcome.WRITTEN
    journal.close()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_a_fork_that_is_killed_leaves_the_log_and_no_file(tmp_path: Path, signum: int) -> None:
    journal = new_journal(tmp_path)
    journal.write(b"one")

    def half_write() -> Frozen:
        journal.store.next_image.write_bytes(b"ima")
        return hang()

    journal.start_image(half_write)
    eventually(journal.store.next_image.exists, "half an image")
    os.kill(fork_of(journal), signum)
    assert outcome_of(journal.tend_image).outcome is ImageOutcome.FAILED
    assert not list(tmp_path.glob("image-*"))
    journal.write(b"two")
    journal.close()
    assert opened(tmp_path) == (None, [b"one", b"two"])


@pytest.mark.skipif(sys.platform != "linux", reason="the score is Linux's")
def test_where_memory_runs_out_the_fork_dies_and_not_the_buffer(tmp_path: Path) -> None:
    journal = new_journal(tmp_path)
    journal.start_image(lambda: (tmp_path / "writes").touch() or hang())
    eventually((tmp_path / "writes").exists, "a fork that writes")
    score = Path(f"/proc/{fork_of(journal)}/oom_score_adj")
    assert (
        int(score.read_text(encoding="utf-8"))
        == 1000
        > int(Path("/proc/self/oom_score_adj").read_text(encoding="utf-8"))
    )
    journal.close()


def test_an_image_that_took_the_room_of_the_log_is_not_tried_again_at_once(tmp_path: Path) -> None:
    """Its fork would fill the disk again and again."""
    with small_disk(tmp_path / "disk", 16 << 20) as disk:
        journal = new_journal(disk / "journal", log_bytes=1 << 20)
        journal.write(bytes(1 << 20))
        assert journal.wants_image

        def fill_the_disk() -> Frozen:
            with journal.store.next_image.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(1 << 16)):
                    pass
            (tmp_path / "full").touch()
            return hang()

        journal.start_image(fill_the_disk)
        eventually((tmp_path / "full").exists, "a full disk")
        with pytest.raises(StoreUnwritable):
            journal.write(bytes(1 << 16))
        journal.write(bytes(1 << 16))  # in the room that the image had
        assert not journal.wants_image
        journal.write(bytes(1 << 20))
        assert journal.wants_image, "once the log has grown"
        journal.close()


def test_files_that_cannot_be_removed_are_no_error(tmp_path: Path) -> None:
    """A disk that becomes read-only lets nothing be removed either. `chattr +i` does that to a folder."""
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        folder = disk / "journal"
        journal = Journal(folder, sync="process", log_bytes=0)
        journal.write(b"one")
        journal.start_image(lambda: Frozen(bytes(16 << 20)))
        fork = psutil.Process(fork_of(journal))
        eventually(lambda: fork.status() == psutil.STATUS_ZOMBIE, "a fork that found no room")
        with fixed(folder):
            assert outcome_of(journal.tend_image).outcome is ImageOutcome.DISK
            fill(disk)
            with pytest.raises(StoreUnwritable):
                journal.write(bytes(2 << 20))
        (disk / BALLAST).unlink()
        journal.store.next_image.unlink()  # as the next image that is complete does
        journal.write(bytes(2 << 20))
        journal.close()
        assert opened(folder) == (None, [b"one", bytes(2 << 20)])


@pytest.mark.parametrize("committed", [True, False])
@pytest.mark.parametrize("readable", [True, False])
@pytest.mark.parametrize("dies", ["at once", "after a turn"])
def test_an_error_in_the_commit_that_names_an_image_loses_no_file_that_a_restart_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool, readable: bool, dies: str
) -> None:
    """The system reports an I/O error, whether or not the commit is on the disk, and perhaps nothing can be read."""
    journal = new_journal(tmp_path)
    for body in (b"first", b"second"):
        journal.write(b"turn before " + body)
        if body == b"second":
            fail_once(monkeypatch, journal.store, committed=committed, readable=readable)
        journal.start_image(lambda body=body: Frozen(body))
        outcome_of(journal.tend_image)
    if dies == "after a turn":
        journal.write(b"last")
        assert len(list(tmp_path.glob("image-*"))) == 1, "the other one is removed"
    journal.close()
    image, turns = opened(tmp_path)
    last = [b"last"] if dies == "after a turn" else []
    assert (image, turns) in ((b"first", [b"turn before second", *last]), (b"second", last))
    if committed and readable:
        assert image == b"second"


def fail_once(monkeypatch: pytest.MonkeyPatch, store: JournalStore, *, committed: bool, readable: bool) -> None:
    """The store's next commit raises; so does what is read after it, once."""
    transact, get = store._transact, store._get  # pyright: ignore[reportPrivateUsage]

    def failing_get(key: bytes) -> bytes | None:
        monkeypatch.setattr(store, "_get", get)
        raise StoreCorrupt("Input/output error")

    def failing(write: Callable[[Any], object]) -> None:
        monkeypatch.setattr(store, "_transact", transact)
        if committed:
            transact(write)
        if not readable:
            monkeypatch.setattr(store, "_get", failing_get)
        raise StoreUnwritable("Input/output error")

    monkeypatch.setattr(store, "_transact", failing)


@contextlib.contextmanager
def fixed(folder: Path) -> Generator[None]:
    """Nothing can be made or removed in the folder."""
    if shutil.which("chattr") is None or subprocess.run(["chattr", "+i", folder]).returncode:
        pytest.skip("no chattr here, or no such attribute")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)


def hang() -> Frozen:
    while True:
        time.sleep(1000)


def stop_myself() -> Frozen:
    os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError("it was continued")


def fork_of(journal: Journal) -> int:
    assert journal._fork is not None  # pyright: ignore[reportPrivateUsage]
    return journal._fork._pid  # pyright: ignore[reportPrivateUsage]
