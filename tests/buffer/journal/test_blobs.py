"""Blobs: written once, referred to by images, and deleted when nothing refers to them, whatever interrupts that."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import lmdb
import msgspec
import numpy as np
import pytest

from stillhouse.buffer.blobs import BLOB_BYTES
from stillhouse.buffer.core import Core, Joined, Turn, decode_turn, encode_turn
from stillhouse.buffer.journal.database import StoreCorrupt
from stillhouse.buffer.journal.freezer import Frozen
from stillhouse.buffer.journal.image import make_image
from stillhouse.buffer.journal.imaging import ImageFork, ImageOutcome, read_blobs, read_image, write_image
from stillhouse.buffer.journal.journal import Journal
from stillhouse.buffer.journal.parts import blob_key
from stillhouse.buffer.journal.recovery import JournalError, start
from stillhouse.buffer.journal.store import JournalStore
from stillhouse.buffer.journal.sweep import LOOKED_AT
from stillhouse.buffer.state import BufferState
from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import Received
from stillhouse.protocol.messages import VersionSpan, WeightVersion
from stillhouse.protocol.server_events import FromPeer
from tests.buffer.journal.test_imaging import outcome_of
from tests.buffer.journal.test_journal import BEGINNING, on_disk
from tests.buffer.shadow import new_book, no_blobs, restored
from tests.patience import eventually

LARGE = BLOB_BYTES // 9 + 1
"""Tokens of a segment that is a blob."""


def blob(*contents: bytes) -> bytes:
    return msgspec.msgpack.encode(list(contents))


def numbers_in(store: JournalStore) -> list[int]:
    """By the keys in the database alone."""
    with store._env.begin() as transaction:  # pyright: ignore[reportPrivateUsage]
        keys = [bytes(key) for key, _ in transaction.cursor()]
    return sorted({int.from_bytes(key[1:9], "big") for key in keys if key[:1] == b"v"})


def put_image(store: JournalStore, referred: set[int], body: bytes = b"image") -> None:
    write_image(store.next_image, Frozen(body, tuple(sorted(referred))), flush=False)
    store.adopt(store.position)


def segment_turn(state: BufferState, index: int, n: int, seed: int) -> Turn:
    """A segment of rollout train-0-0-0, of n random tokens."""
    rng = np.random.default_rng(seed)
    start = state._life.rollouts["train-0-0-0"].length  # pyright: ignore[reportPrivateUsage]
    message = m.Segment(
        "train-0-0-0", index, start, start + n, (VersionSpan(WeightVersion(0, 0), start, start + n),), False
    )
    mask = np.ones(n, np.uint8)
    ids = rng.integers(0, 1 << 30, n).astype(np.int32)
    if index == 0:
        ids[0], mask[0] = 1, 0
    arrays = (ids, -rng.random(n).astype(np.float32) * mask, mask)
    return Turn(1.0, (FromPeer("actor", "a", Received(message, arrays)),))


class Recorded:
    """A core and the journal's turns of it."""

    def __init__(self, journal: Journal | None = None) -> None:
        self.core = Core(BEGINNING.core().state)
        self.journal = journal
        self.bodies: list[bytes] = []
        self.blobs: dict[int, list[bytes]] = {}
        for role in ("actor", "learner", "teacher"):
            self.take(Turn(0.0, (Joined(m.Hello(role, role[0], "1", "run-1", "ab" * 32, "default")),)))
        self.say(
            "learner",
            m.TasksOffered((m.Task(0, "train", 1, m.Sampling(), teachers=("default",)),)),
            np.ones(1, np.int32),
        )
        self.say("actor", m.TicketCredit(1, 1, 0))
        self.say("teacher", m.ScoreCredit(1 << 30, 1, 0))

    @property
    def state(self) -> BufferState:
        return self.core.state

    def say(self, role: m.Role, message: m.Message, *arrays: Any) -> list[Any]:
        return self.take(Turn(1.0, (FromPeer(role, role[0], Received(message, arrays)),)))

    def take(self, turn: Turn) -> list[Any]:
        body, blobs = encode_turn(turn, self.state.blobs_total)
        self.bodies.append(body)
        self.blobs |= {number: msgspec.msgpack.decode(content, type=list[bytes]) for number, content in blobs}
        outgoing = self.core.apply(turn)
        if self.journal is not None:
            self.journal.write(body, blobs)
        return outgoing


# ---------------------------------------------------------------------------------------------- turns and images


def test_large_arrays_are_blobs_and_small_ones_stay_in_the_turn() -> None:
    recorded = Recorded()
    for index, n in enumerate((LARGE, 5, LARGE)):
        turn = segment_turn(recorded.state, index, n, seed=index)
        recorded.take(turn)
        read = decode_turn(recorded.bodies[-1], recorded.blobs.__getitem__)
        assert isinstance(read.entries[0], FromPeer) and isinstance(turn.entries[0], FromPeer)
        for got, sent in zip(read.entries[0].received.arrays, turn.entries[0].received.arrays, strict=True):
            np.testing.assert_array_equal(got, sent)
        assert len(recorded.bodies[-1]) < 400
        assert (turn.entries[0].received.arrays[0].tobytes() in recorded.bodies[-1]) == (n == 5)
    assert sorted(recorded.blobs) == [1, 2] and recorded.state.blobs_total == 2


def test_an_image_refers_to_blobs_and_what_it_restores_goes_on_in_the_same_way() -> None:
    recorded = Recorded()
    for index, n in enumerate((LARGE, 3, 4 * LARGE, 2)):
        recorded.take(segment_turn(recorded.state, index, n, seed=index))
    work = recorded.state._scoring._leases  # pyright: ignore[reportPrivateUsage]
    leases = tuple(work)[1:]
    lengths = [work[lease].job.segment.end - work[lease].job.segment.start for lease in leases]
    recorded.say("teacher", m.Scores(leases), *(np.linspace(-1, 0, n, dtype=np.float32) for n in lengths))
    image = make_image(recorded.core, new_book(), 1.0)
    assert image.blobs == (1, 2, 3), "two segments, and the scores of the larger one"
    for arrays in recorded.blobs.values():
        assert not any(array in image.body for array in arrays)
    again = restored(recorded.core, 1.0, recorded.blobs.__getitem__)
    tokens, expected = (
        state._life.rollouts["train-0-0-0"].tokens  # pyright: ignore[reportPrivateUsage]
        for state in (again.state, recorded.state)
    )
    end = expected.length
    for name in ("ids", "logprobs", "teacher_logprobs"):
        assert getattr(tokens, name)(end).tobytes() == getattr(expected, name)(end).tobytes()
    assert tokens.open_mask(0, end).tobytes() == expected.open_mask(0, end).tobytes()


def test_a_segment_that_waits_for_one_before_it_keeps_its_blob() -> None:
    recorded = Recorded()
    first = segment_turn(recorded.state, 0, LARGE, seed=0)
    recorded.core.apply(first)
    second = segment_turn(recorded.state, 1, LARGE, seed=1)
    late = Recorded()
    late.take(second)
    assert make_image(late.core, new_book(), 1.0).blobs == (1,)
    late.core = restored(late.core, 1.0, late.blobs.__getitem__)
    late.take(first)
    assert make_image(late.core, new_book(), 1.0).blobs == (1, 2)
    late.core = restored(late.core, 1.0, late.blobs.__getitem__)
    got, expected = (
        one.state._life.rollouts["train-0-0-0"].tokens.ids(2 * LARGE)  # pyright: ignore[reportPrivateUsage]
        for one in (late.core, _after(recorded.core, second))
    )
    np.testing.assert_array_equal(got, expected)


def _after(core: Core, turn: Turn) -> Core:
    core.apply(turn)
    return core


def test_what_an_image_writes_does_not_grow_with_the_tokens_that_are_held(tmp_path: Path) -> None:
    """Each further image of a rollout that grows takes some bytes for each new segment, not its tokens again."""
    recorded = Recorded()
    sizes: list[int] = []
    for index in range(60):
        recorded.take(segment_turn(recorded.state, index, 2_000, seed=index))
        sizes.append(len(make_image(recorded.core, new_book(), 1.0).body))
    image = make_image(recorded.core, new_book(), 1.0)
    held = recorded.state._life.rollouts["train-0-0-0"].length  # pyright: ignore[reportPrivateUsage]
    assert held == 120_000
    without_messages = len(msgspec.msgpack.decode(image.body)[1])
    assert without_messages < 0.5 * held, f"{without_messages} bytes for {held} tokens, which have 9 bytes each"


@pytest.mark.parametrize("then", ["grows", "ends"])
def test_the_image_that_a_fork_writes_has_the_tokens_of_its_moment(tmp_path: Path, then: str) -> None:
    """Columns are shared with the fork. It reads them late, when the rollout has been scored and has grown or ended."""
    recorded = Recorded()
    for index, n in enumerate((20_000, 5, 30_000)):
        recorded.take(segment_turn(recorded.state, index, n, seed=index))
    leases = tuple(recorded.state._scoring._leases)  # pyright: ignore[reportPrivateUsage]
    recorded.say("teacher", m.Scores(leases[1:2]), np.linspace(-1, 0, 5, dtype=np.float32))
    expected, gate = make_image(recorded.core, new_book(), 1.0), tmp_path / "gate"

    def make() -> Frozen:
        eventually(gate.exists, "the gate")
        return make_image(recorded.core, new_book(), 1.0)

    fork = ImageFork(tmp_path / "image", make, flush=False)
    recorded.say("teacher", m.Scores(leases[:1]), np.linspace(-2, 0, 20_000, dtype=np.float32))
    for index in (3, 4) if then == "grows" else ():
        recorded.take(segment_turn(recorded.state, index, 30_000, seed=index))
    if then == "ends":
        recorded.say("actor", m.RolloutFailed("train-0-0-0", "engine_error"))
        assert recorded.core.snapshot(1.0).ledger.tokens.dropped
    gate.touch()
    assert outcome_of(fork.finished).outcome is ImageOutcome.WRITTEN
    assert read_image(tmp_path / "image") == expected.body
    assert tuple(read_blobs(tmp_path / "image") or ()) == expected.blobs == (1, 2)


# --------------------------------------------------------------------------------------------------------- store


def test_a_sweep_takes_bounded_steps_and_begins_again_after_a_death(tmp_path: Path) -> None:
    n = 10 * LOOKED_AT
    store = JournalStore(tmp_path, sync="process")
    store.begin(b"meta")
    store.append([b"turn"], [(i, blob(b"x")) for i in range(1, n + 1)])
    put_image(store, kept := set(range(7, n, 100)))
    left = []
    for _ in range(4):
        store.append([b"turn"])
        left.append(len(numbers_in(store)))
    assert all(before - LOOKED_AT <= after < before for before, after in zip([n, *left], left, strict=False))
    store.close()
    store = JournalStore(tmp_path, sync="process")
    assert store.image() == b"image" and len(list(store.turns())) == 4
    while len(numbers_in(store)) > len(kept):
        store.append([b"turn"])
        assert store.position.next_part < 30, "the sweep does not come to its end"
    assert numbers_in(store) == sorted(kept)
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_any_course_of_turns_images_and_deaths_keeps_what_is_needed_and_only_that(tmp_path: Path, seed: int) -> None:
    """Beside a model: the blobs that an image referred to, and all that came after it."""
    rng = Random(seed)
    store = JournalStore(tmp_path, sync="process")
    store.begin(b"meta")
    needed: set[int] = set()
    total = most = 0
    for _ in range(300):
        new = [(total + i, blob(bytes(rng.choice((10, 700, 5_000, 50_000))))) for i in range(1, rng.randrange(1, 12))]
        store.append([b"turn"], new)
        total += len(new)
        needed |= {number for number, _ in new}
        if rng.random() < 0.1:
            needed = {number for number in needed if rng.random() < 0.3}
            put_image(store, needed)
        if rng.random() < 0.05:
            store.close()
            store = JournalStore(tmp_path, sync="process")
            store.image()
            assert list(store.turns()) is not None
            for number in sorted(needed):
                store.blob(number)
        there = set(numbers_in(store))
        assert needed <= there
        most = max(most, len(there - needed))
    assert most < 300, f"{most} of {total} blobs were dead and there"
    for _ in range(40):
        store.append([b"turn"])
    put_image(store, needed)
    for _ in range(40):
        store.append([b"turn"])
    assert set(numbers_in(store)) == needed
    store.close()


def test_the_file_does_not_grow_with_what_has_passed_through_it(tmp_path: Path) -> None:
    """A hundred thousand tokens are held at a time, of millions."""
    store, held = JournalStore(tmp_path, sync="process"), list[int]()
    store.begin(b"meta")
    sizes: list[int] = []
    for number in range(1, 1_501):
        store.append([b"turn"], [(number, blob(bytes(8_000)))])
        held = [*held[-100:], number]
        if number % 50 == 0:
            put_image(store, set(held))
            sizes.append(on_disk(store))
    assert max(sizes[5:]) <= 1.2 * max(sizes[:5])
    store.close()


@pytest.mark.parametrize("damage", ["lost", "a bit"])
def test_a_blob_that_is_lost_or_damaged_is_an_error_that_says_what_to_do(tmp_path: Path, damage: str) -> None:
    started = start(tmp_path, BEGINNING)
    recorded = Recorded(started.journal)
    recorded.take(segment_turn(recorded.state, 0, LARGE, seed=0))
    started.journal.close()
    again = start(tmp_path, BEGINNING)
    again.journal.close()
    assert again.core.snapshot(1.0).ledger.segments.accepted == 1
    with lmdb.open(str(tmp_path)) as database, database.begin(write=True) as transaction:
        content = bytearray(transaction.get(blob_key(1)) or b"")
        content[50] ^= 1
        transaction.delete(blob_key(1))
        if damage == "a bit":
            transaction.put(blob_key(1), bytes(content))
    with pytest.raises(JournalError, match=r"blob 1.*resume the run from its last checkpoint"):
        start(tmp_path, BEGINNING)


def test_a_damaged_list_of_blobs_is_an_error(tmp_path: Path) -> None:
    store = JournalStore(tmp_path, sync="process")
    store.begin(b"meta")
    put_image(store, {1, 2, 3})
    store.close()
    file = tmp_path / "image-1"
    assert list(read_blobs(file) or ()) == [1, 2, 3]
    content = bytearray(file.read_bytes())
    content[len(b"image") + 3] ^= 1
    file.write_bytes(content)
    store = JournalStore(tmp_path, sync="process")
    with pytest.raises(StoreCorrupt, match="list of blobs"):
        store.image()
    store.close()
    with pytest.raises(AssertionError, match="there is no blob"):
        no_blobs(1)
