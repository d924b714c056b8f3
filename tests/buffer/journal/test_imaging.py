"""Images that a fork writes while turns go on: what counts after a death at any moment, and what the fork keeps."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from stillhouse.buffer.core import Core
from stillhouse.buffer.journal.database import StoreCorrupt
from stillhouse.buffer.journal.freezer import Frozen
from stillhouse.buffer.journal.image import make_checked_image
from stillhouse.buffer.journal.imaging import Finished, ImageOutcome, write_image
from stillhouse.buffer.journal.journal import Journal
from stillhouse.buffer.journal.store import SWEPT_PARTS, JournalStore
from tests.buffer.driver import Driver
from tests.buffer.journal.test_journal import opened
from tests.buffer.shadow import new_book
from tests.full_disk import small_disk
from tests.patience import PATIENCE_S, eventually


def new_journal(folder: Path, log_bytes: int = 1 << 30) -> Journal:
    return Journal(folder, sync="process", log_bytes=log_bytes)


def outcome_of(poll: Callable[[], Finished | None]) -> Finished:
    found: list[Finished] = []

    def is_over() -> bool:
        found.extend(one for one in (poll(),) if one is not None)
        return bool(found)

    eventually(is_over, "the outcome of the fork")
    return found[0]


def test_an_image_has_the_state_of_the_fork_and_the_log_what_came_after(tmp_path: Path) -> None:
    state = ["before"]
    gate = tmp_path / "gate"

    def make() -> Frozen:
        while not gate.exists():
            time.sleep(0.005)
        return Frozen("".join(state).encode())

    journal = new_journal(tmp_path)
    for turn in (b"one", b"two"):
        journal.write(turn)
    journal.start_image(make)
    state[0] = "after"
    journal.write(b"three")
    assert journal.tend_image() is None and not journal.may_start_image
    gate.touch()
    finished = outcome_of(journal.tend_image)
    assert (finished.outcome, finished.n_bytes) == (ImageOutcome.WRITTEN, len(b"before"))
    assert journal.store.log_bytes == len(b"three") and journal.may_start_image
    journal.write(b"four")
    journal.close()
    assert opened(tmp_path) == (b"before", [b"three", b"four"])


def test_an_image_that_no_commit_names_does_not_count(tmp_path: Path) -> None:
    """The buffer dies when the file is complete, or half written."""
    journal = new_journal(tmp_path)
    journal.write(b"one")
    journal.start_image(lambda: Frozen(b"first"))
    outcome_of(journal.tend_image)
    journal.write(b"two")
    write_image(journal.store.next_image, Frozen(b"second"), flush=False)
    orphan = journal.store.next_image
    journal.close()
    for cut in (None, 3):
        if cut is not None:
            orphan.write_bytes(b"sec")
        assert orphan.exists() and opened(tmp_path) == (b"first", [b"two"])
        assert not orphan.exists()


def test_a_death_before_old_turns_are_deleted_changes_nothing_and_they_are_deleted_later(tmp_path: Path) -> None:
    store = JournalStore(tmp_path, sync="process")
    store.begin(b"meta")
    n = 3 * SWEPT_PARTS
    for i in range(n):
        store.append([b"%d" % i])
    write_image(store.next_image, Frozen(b"image"), flush=True)
    store.adopt(store.position)
    store.close()
    assert opened(tmp_path) == (b"image", [])
    store = JournalStore(tmp_path, sync="process")
    assert (store.image(), list(store.turns())) == (b"image", [])
    for i in range(4):
        assert store._first() == i * (SWEPT_PARTS + 1) if i < 3 else n  # pyright: ignore[reportPrivateUsage]
        store.append([b"new %d" % i])
    assert store._first() == n  # pyright: ignore[reportPrivateUsage]
    store.close()
    assert opened(tmp_path) == (b"image", [b"new %d" % i for i in range(4)])


@pytest.mark.parametrize("damage", ["a bit", "the end", "all"])
def test_a_damaged_image_is_an_error(tmp_path: Path, damage: str) -> None:
    store = JournalStore(tmp_path, sync="process")
    store.begin(b"meta")
    write_image(store.next_image, Frozen(bytes(10_000)), flush=False)
    file = store.next_image
    store.adopt(store.position)
    store.close()
    content = bytearray(file.read_bytes())
    content[5_000] ^= 1
    if damage == "all":
        file.unlink()
    else:
        file.write_bytes(content if damage == "a bit" else file.read_bytes()[:-1])
    with pytest.raises(StoreCorrupt, match="image-1"):
        opened(tmp_path)


def test_a_segment_that_was_lost_without_a_report_is_found_by_the_recount(tmp_path: Path) -> None:
    driver = Driver()
    driver.offer(0)
    driver.write("train-0-0-0", 3)
    assert driver.ledger.balanced
    driver.state._life.rollouts["train-0-0-0"].segments.clear()  # pyright: ignore[reportPrivateUsage]
    journal = new_journal(tmp_path)
    journal.start_image(lambda: make_checked_image(Core(driver.state), new_book(), 0.0))
    assert outcome_of(journal.tend_image).outcome is ImageOutcome.MISCOUNTED
    assert journal.store.image() is None
    journal.close()


def test_an_image_that_cannot_be_made_leaves_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fail() -> Frozen:
        raise RuntimeError("a bug")

    journal = new_journal(tmp_path)
    journal.write(b"one")
    journal.start_image(fail)
    assert outcome_of(journal.tend_image).outcome is ImageOutcome.FAILED
    assert "RuntimeError: a bug" in capfd.readouterr().err
    assert journal.may_start_image
    journal.close()
    assert opened(tmp_path) == (None, [b"one"])


def test_an_image_that_a_full_disk_does_not_take_is_removed(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        journal = new_journal(disk / "journal", log_bytes=0)
        journal.write(b"one")
        assert journal.wants_image
        journal.start_image(lambda: Frozen(bytes(8 << 20)))
        assert outcome_of(journal.tend_image).outcome is ImageOutcome.DISK
        assert not journal.wants_image or journal.store.log_bytes, "the log must grow first"
        assert not list((disk / "journal").glob("image-*"))
        journal.write(b"two")
        journal.close()
        assert opened(disk / "journal") == (None, [b"one", b"two"])


def test_the_fork_holds_nothing_of_the_buffer_and_dies_with_it(tmp_path: Path) -> None:
    """The buffer is killed while its fork writes: a successor can open the journal at once, and the fork is gone."""
    code = (
        "import os, signal, sys, time; from pathlib import Path; from stillhouse.buffer.journal.journal import Journal;"
        "journal = Journal(Path(sys.argv[1]), sync='process', log_bytes=1);"
        "journal.start_image(lambda: (Path(sys.argv[1], 'writes').mkdir(), time.sleep(1000)));"
        "print(journal._fork._pid, flush=True); sys.stdin.read(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    fork = psutil.Process(int(process.stdout.readline()))
    eventually((tmp_path / "writes").exists, "a fork that writes")
    assert fork.open_files() == [], "the lock would be held as long as the fork lives"
    process.stdin.close()
    process.wait(PATIENCE_S)
    process.stdout.close()
    JournalStore(tmp_path, sync="process").close()
    fork.wait(PATIENCE_S)
