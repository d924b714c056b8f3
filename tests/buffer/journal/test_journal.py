"""Store, journal and recovery: what was committed is there, what is damaged is said, a full disk loses nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import lmdb
import msgspec
import pytest

from stillhouse.buffer.config import BufferConfig, Sync
from stillhouse.buffer.core import Joined, Turn, decode_turn, encode_turn
from stillhouse.buffer.journal.database import StoreCorrupt, StoreUnwritable
from stillhouse.buffer.journal.freezer import Frozen
from stillhouse.buffer.journal.imaging import write_image
from stillhouse.buffer.journal.journal import Journal
from stillhouse.buffer.journal.parts import PART_BYTES
from stillhouse.buffer.journal.recovery import Beginning, CoreClock, JournalError, Started, start
from stillhouse.buffer.journal.store import JournalStore
from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import Received
from stillhouse.protocol.messages import WeightVersion
from stillhouse.protocol.server_events import FromPeer
from tests.full_disk import fill, small_disk

BEGINNING = Beginning(
    release="r1",
    run_id="run-1",
    config=BufferConfig(),
    version=WeightVersion(0, 0),
    carried=None,
    vocab_fingerprint=None,
    vocab_size=None,
)
BODIES = [b"one", b"two" * 1000, b"three" * 100_000]


def on_disk(store: JournalStore) -> int:
    """Bytes that the file takes."""
    return store.path.stat().st_blocks * 512


def opened(folder: Path) -> tuple[bytes | None, list[bytes]]:
    store = JournalStore(folder, sync="process")
    try:
        return store.image(), list(store.turns())
    finally:
        store.close()


def put_image(store: JournalStore, body: bytes) -> None:
    write_image(store.next_image, Frozen(body), flush=False)
    store.adopt(store.position)


def filled(folder: Path, bodies: list[bytes] = BODIES) -> None:
    store = JournalStore(folder, sync="process")
    store.begin(b"meta")
    for body in bodies:
        store.append([body])
    store.close()


def joined_turn(now_s: float, name: str = "a") -> bytes:
    return encode_turn(Turn(now_s, (Joined(m.Hello("actor", name, "1", "run-1", "ab" * 32)),)), 0).body


# --------------------------------------------------------------------------------------------------------- store


def test_a_store_that_is_closed_twice_closes_no_file_of_others(tmp_path: Path) -> None:
    store = JournalStore(tmp_path, sync="process")
    store.close()
    others = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]  # one has the number of the lock's descriptor
    store.close()
    for descriptor in others:
        os.close(descriptor)
    JournalStore(tmp_path, sync="process").close()


def test_turns_are_read_back_in_order_and_an_image_takes_their_place(tmp_path: Path) -> None:
    filled(tmp_path)
    assert opened(tmp_path) == (None, BODIES)
    store = JournalStore(tmp_path, sync="disk")
    assert (store.image(), list(store.turns())) == (None, BODIES)
    put_image(store, b"image")
    store.append([b"four", b"five"])
    assert store.log_bytes == 8
    store.close()
    assert opened(tmp_path) == (b"image", [b"four", b"five"])


def test_what_is_larger_than_a_row_is_kept_in_parts(tmp_path: Path) -> None:
    store = JournalStore(tmp_path, sync="process")
    long = os.urandom(PART_BYTES) + b"tail"
    store.append([b"a", long, b"b"])
    put_image(store, long)
    store.append([long])
    store.close()
    assert opened(tmp_path) == (long, [long])


def test_the_file_does_not_grow_with_the_images(tmp_path: Path) -> None:
    """Turns and images of any size follow one another, of which it holds one image and one log at a time."""
    log_bytes, image_bytes, rng = 1 << 20, 600_000, Random(1)
    store = JournalStore(tmp_path, sync="process")
    store.begin(b"meta")
    for _ in range(60):
        while store.log_bytes < log_bytes:
            store.append([bytes(rng.choice((300, 2_000, 9_000, 15_000, 40_000)))])
        put_image(store, bytes(image_bytes // 2 + rng.randrange(image_bytes // 2)))
    file_bytes = on_disk(store)
    store.close()
    assert file_bytes < 3 * (log_bytes + image_bytes), "what is free is used again"


@pytest.mark.parametrize("sync", ["disk", "process"])
def test_a_commit_waits_for_the_disk_where_that_is_asked_for(tmp_path: Path, sync: Sync) -> None:
    """No test can cut the power: what LMDB was told is looked at."""
    config = msgspec.structs.replace(BEGINNING.config, journal_sync=sync)
    started = start(tmp_path / "journal", msgspec.structs.replace(BEGINNING, config=config))
    flags = started.journal.store._env.flags()  # pyright: ignore[reportPrivateUsage]
    assert (flags["sync"], flags["metasync"]) == ((True, True) if sync == "disk" else (False, False))
    started.journal.close()


def test_a_commit_that_a_dying_process_left_half_written_is_dropped(tmp_path: Path) -> None:
    """All pages of the last commit but the root page, which LMDB writes last, are there, or half of them."""
    filled(tmp_path)
    before = (tmp_path / "data.mdb").read_bytes()
    store = JournalStore(tmp_path, sync="process")
    assert list(store.turns()) == BODIES
    store.append([b"four" * 10_000])
    store.close()
    after = (tmp_path / "data.mdb").read_bytes()
    for cut in (len(before), (len(before) + len(after)) // 2, len(after)):
        (tmp_path / "data.mdb").write_bytes(before[:8192] + after[8192:cut])
        assert opened(tmp_path) == (None, BODIES)


def spoil(transaction: lmdb.Transaction) -> None:
    body = bytearray(transaction.get(key(1)) or b"")
    body[100] ^= 1
    transaction.put(key(1), bytes(body))


def lose(transaction: lmdb.Transaction) -> None:
    transaction.delete(key(1))


def cut(transaction: lmdb.Transaction) -> None:
    n_parts = sum(-(-len(body) // PART_BYTES) for body in BODIES)
    last = bytearray(transaction.get(key(n_parts - 1)) or b"")
    assert last[4] == 1
    last[4] = 0
    transaction.put(key(n_parts - 1), bytes(last))


def key(part: int) -> bytes:
    return b"l" + part.to_bytes(8, "big")


@pytest.mark.parametrize("damage", [spoil, lose, cut])
def test_damage_in_the_middle_is_an_error(tmp_path: Path, damage: Callable[[lmdb.Transaction], None]) -> None:
    filled(tmp_path)
    with lmdb.open(str(tmp_path)) as database, database.begin(write=True) as transaction:
        damage(transaction)
    with pytest.raises(StoreCorrupt):
        opened(tmp_path)


def test_a_file_that_is_no_database_or_is_cut_off_is_an_error(tmp_path: Path) -> None:
    filled(tmp_path)
    file = tmp_path / "data.mdb"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(StoreCorrupt):
        opened(tmp_path)
    file.write_bytes(b"no database at all, but long enough to be taken for one" * 1000)
    with pytest.raises(StoreCorrupt):
        opened(tmp_path)


def test_a_journal_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    store = JournalStore(tmp_path, sync="process")
    store.begin(b"meta")
    with pytest.raises(StoreUnwritable, match="locked"):
        JournalStore(tmp_path, sync="process")
    store.close()


# ------------------------------------------------------------------------------------------------------ recovery


def begun(folder: Path, *bodies: bytes) -> None:
    started = start(folder, BEGINNING)
    assert started.book is None
    for body in bodies:
        started.journal.write(body)
    started.journal.close()


def restarted(folder: Path, beginning: Beginning = BEGINNING) -> Started:
    started = start(folder, beginning)
    started.journal.close()
    return started


def test_a_restored_core_has_the_peers_and_the_time_of_the_former_one(tmp_path: Path) -> None:
    begun(tmp_path, joined_turn(5.0), joined_turn(7.5, "b"))
    started = restarted(tmp_path)
    assert started.newest_s == 7.5
    assert started.book is not None and [str(peer) for peer in started.book.sessions] == ["actor a", "actor b"]
    assert [peer.name for peer in started.core.snapshot(8.0).peers] == ["a", "b"]


def test_the_clock_goes_on_where_it_stopped_whatever_the_systems_clock_says() -> None:
    system = iter([10.0, 10.0, 12.5])
    clock = CoreClock(1_000_000.0, lambda: next(system))
    assert (clock(), clock()) == (1_000_000.0, 1_000_002.5)
    assert CoreClock(None, lambda: 3.0)() == 3.0


def test_the_journal_of_another_run_is_removed(tmp_path: Path) -> None:
    begun(tmp_path, joined_turn(5.0))
    other = msgspec.structs.replace(BEGINNING, run_id="run-2")
    (tmp_path / "data.mdb").write_bytes(b"damaged by a loss of power")
    assert restarted(tmp_path, other).book is None
    assert restarted(tmp_path, other).newest_s is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"release": "r2"}, "written by release r1 of the buffer's code, this is r2"),
        ({"config": BufferConfig(max_staleness=7)}, "max_staleness was 4, is 7"),
    ],
)
def test_another_release_or_other_settings_are_refused(tmp_path: Path, change: dict[str, object], told: str) -> None:
    begun(tmp_path, joined_turn(5.0))
    with pytest.raises(JournalError, match=told) as raised:
        start(tmp_path, msgspec.structs.replace(BEGINNING, **change))
    assert "resume the run from its last checkpoint" in str(raised.value)


def test_a_damaged_journal_says_what_to_do(tmp_path: Path) -> None:
    begun(tmp_path, joined_turn(5.0), b"\xc1 no turn")
    with pytest.raises(JournalError, match=r"damaged.*remove .* and resume"):
        start(tmp_path, BEGINNING)


def test_a_turn_that_a_full_disk_does_not_take_is_written_when_there_is_room(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 4 << 20) as disk:
        journal = Journal(disk / "journal", sync="process", log_bytes=1 << 30)
        others = fill(disk)
        written: list[bytes] = []
        with pytest.raises(StoreUnwritable):
            for _ in range(20):  # a page or two may still have been free
                journal.write(body := os.urandom(100_000))
                written.append(body)
        others.unlink()
        journal.write(b"after")
        journal.close()
        assert opened(disk / "journal")[1] == [*written, b"after"]


def test_of_a_heartbeat_the_journal_has_what_decides_something() -> None:
    stats = {"draining": 1.0, **{f"x{i}": 1.0 for i in range(5000)}}
    said = FromPeer("teacher", "teacher-0", Received(m.Heartbeat(WeightVersion(0, 1), stats, 7), ()))
    body = encode_turn(Turn(1.0, (said,)), 0).body
    assert len(body) < 200
    (again,) = decode_turn(body, lambda _: []).entries
    assert isinstance(again, FromPeer)
    assert again.received.message == m.Heartbeat(WeightVersion(0, 1), {"draining": 1.0}, 7)
