"""Images and turns: what is restored is the same state, and goes on in the same way."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from stillhouse.buffer.core import Core, Joined, Left, Turn, decode_turn, encode_turn
from stillhouse.buffer.journal import image
from stillhouse.buffer.journal.freezer import FreezeError, Freezer, Frozen, ThawError
from stillhouse.buffer.journal.image import make_image, release_hash, restore_image
from stillhouse.protocol import messages as m
from stillhouse.protocol.codec import Received
from stillhouse.protocol.messages import WeightVersion
from stillhouse.protocol.server_events import FromPeer
from tests.buffer.driver import Driver
from tests.buffer.shadow import ShadowedState, new_book, no_blobs
from tests.patience import PATIENCE_S
from tests.sim.buffer import sim as buffer_sim

WITHOUT_EFFECT = {"addresses", "atomic_file", "errors", "server", "settings"}
"""Modules of which the state uses no more than classes: errors and `FromPeer`; how files are opened; and what the
configuration uses, which the journal compares by itself."""


@pytest.mark.parametrize("seed", [6, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (9, 10))])
def test_a_state_that_lives_from_turns_and_images_sends_the_same_bytes_in_any_course_of_events(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.sim.buffer.world.BufferState", ShadowedState)
    monkeypatch.setattr("stillhouse.buffer.blobs.BLOB_BYTES", 16)
    monkeypatch.setattr(ShadowedState, "most_blobs", 0)
    totals = buffer_sim.run(4_000, seed, check_every=400)
    for happened in ("tokens_trained", "learner_restarts", "tokens_evaluated", "hedges_won", "breaker_probes"):
        assert totals[happened] > 0, f"the simulation never got to {happened}"
    assert ShadowedState.most_blobs > 5, "hardly anything was a blob"


def test_an_image_is_the_same_bytes_whatever_the_hash_seed() -> None:
    code = (
        "import hashlib; from random import Random; from stillhouse.buffer.core import Core;"
        "from tests.sim.buffer import sim as buffer_sim;"
        "from tests.sim.buffer.actions import ACTIONS; from stillhouse.buffer.journal.image import make_image;"
        "from tests.buffer.shadow import new_book; rng = Random(5); world = buffer_sim.random_world(rng, 1000);"
        "[rng.choice(ACTIONS)[0](world, rng) for _ in range(1500)];"
        "print(hashlib.sha256(make_image(Core(world.state), new_book(), 1.0).body).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[3])},
            capture_output=True,
            check=True,
            timeout=PATIENCE_S,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1 and digests != {b""}


def test_another_class_of_a_field_is_refused() -> None:
    image = make_image(Core(Driver().state), new_book(), 0.0).body
    newest_s, core, book = msgspec.msgpack.decode(image)
    spoilt = msgspec.msgpack.encode([newest_s, core.replace(b"TaskBook", b"TaskBock"), book])
    with pytest.raises(ThawError, match="TaskBock"):
        restore_image(spoilt, new_book(), no_blobs)


def test_the_release_is_the_same_for_all_processes() -> None:
    code = "from stillhouse.buffer.journal.image import release_hash; print(release_hash())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.strip()
    assert told == release_hash()


def imported_by(file: Path) -> set[str]:
    """Modules of `protocol` that a source file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            head, _, rest = node.module.removeprefix("stillhouse.").partition(".")
            if head == "protocol":
                found.update([rest.partition(".")[0]] if rest else [name.name for name in node.names])
    return found


def test_another_release_of_anything_that_the_state_uses_is_another_release() -> None:
    """By the imports of the sources: what the state calls, and what that calls."""
    package = Path(image.__file__).parents[1]
    files = [file for file in package.rglob("*.py") if file.name not in ("loop.py", "server.py")]
    used: set[str] = set()
    new = set[str]().union(*map(imported_by, files)) - WITHOUT_EFFECT
    while new:
        used |= new
        protocol = package.parent / "protocol"
        modules = [file for name in new for file in (protocol / f"{name}.py", *(protocol / name).glob("*.py"))]
        new = set[str]().union(*(imported_by(file) for file in modules if file.exists())) - used - WITHOUT_EFFECT
    assert used >= {"messages", "codec", "branches"}
    assert used - {"messages", "payloads"} <= set(image._PROTOCOL), "not in the hash"  # pyright: ignore[reportPrivateUsage]


# ------------------------------------------------------------------------------------------------------- freezer


class Node:
    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)

    def method(self) -> str:
        return "called"


def freezer() -> Freezer:
    return Freezer({Node: None}, (WeightVersion,))


def thawed(frozen: Frozen) -> Any:
    assert frozen.blobs == ()
    return freezer().thaw(frozen.body, no_blobs)


def test_identity_order_and_kinds_of_containers_are_kept() -> None:
    leaf = Node(a=None)
    leaf.__dict__["a"] = np.arange(3, dtype=np.int16)
    root = Node(a=[leaf, leaf, OrderedDict(b=1), deque([1.5]), {3, 1}, {"x": (leaf, b"\0")}, WeightVersion(1, 2)])
    got = thawed(freezer().freeze(root)).a
    assert got[0] is got[1] is got[5]["x"][0]
    np.testing.assert_array_equal(got[0].a, [0, 1, 2])
    assert got[0].a.dtype == np.int16
    assert got[2:5] == [OrderedDict(b=1), deque([1.5]), {3, 1}] and type(got[2]) is OrderedDict
    assert got[5]["x"][1] == b"\0" and got[6] == WeightVersion(1, 2)


def test_a_method_belongs_to_the_restored_object() -> None:
    root = Node(a=None)
    root.__dict__["a"] = root.method
    got = thawed(freezer().freeze(root))
    assert got.a() == "called" and got.a.__self__ is got


def test_what_is_not_listed_or_has_two_owners_is_an_error() -> None:
    with pytest.raises(FreezeError, match="object is not listed"):
        freezer().freeze(Node(a=object()))
    shared = [1]
    with pytest.raises(FreezeError, match="two owners"):
        freezer().freeze(Node(a=[shared, shared]))


def test_a_turn_is_read_as_it_was_written() -> None:
    hello = m.Hello("actor", "a", "1", "run", "ab")
    scores = Received(m.Scores((1,)), (np.array([0.5], np.float32),))
    turn = Turn(2.0, (Joined(hello), Left("teacher", "t"), FromPeer("teacher", "t", scores)), 2.5, {"role": 3})
    got = decode_turn(encode_turn(turn, 0).body, no_blobs)
    assert (got.now_s, got.tick_s, got.refused, got.entries[:2]) == (2.0, 2.5, {"role": 3}, turn.entries[:2])
    said = got.entries[2]
    assert isinstance(said, FromPeer) and said.received.message == scores.message
    np.testing.assert_array_equal(said.received.arrays[0], [0.5])
