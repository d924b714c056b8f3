"""One launch at a time writes into a store: on a server with the S3 API and on a folder, with beats, silence and
returns from the dead."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from stillhouse.protocol.object_store import Store, StoreError
from stillhouse.protocol.store_owner import OWNER, Displaced, StoreOwner, StoreTaken, read_held, read_owner, take
from tests.patience import PATIENCE_S
from tests.s3_server import BUCKET, Gate, Server, environment_of, overwrite, s3_server
from tests.store_launches import claim, owner_in, take_from_dead


@pytest.fixture(autouse=True)
def nothing_leaks() -> None:
    """Not checked here: fsspec keeps one loop, and s3fs its connections, for as long as the process lives."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as made:
        yield made


@pytest.fixture(params=["s3", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("stillhouse.protocol.store_owner.SILENT_S", 0.6)
    monkeypatch.setattr("stillhouse.protocol.store_owner.LOOK_S", 0.05)
    if request.param == "file":
        return f"file://{tmp_path}/store"
    server: Server = request.getfixturevalue("server")
    for name, value in environment_of(server.url).items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{tmp_path.name}"


def test_of_two_that_read_the_same_state_one_writes(url: str) -> None:
    one, other = Store(url), Store(url)
    assert one.read_tagged("x") == other.read_tagged("x") == (b"", "")
    assert one.put_if("x", b"1", "") and not other.put_if("x", b"2", "")
    (text, tag), (_, same) = one.read_tagged("x"), other.read_tagged("x")
    assert text == b"1" and tag == same != ""
    assert other.put_if("x", b"3", same) and not one.put_if("x", b"4", tag) and not one.put_if("x", b"5", "")
    assert one.read("x") == b"3"
    one.delete(["x"])
    assert not other.put_if("x", b"6", other.read_tagged("y")[1] or tag), "what is gone has no tag"


def test_processes_that_change_a_file_at_once_lose_no_change(tmp_path: Path) -> None:
    """Each raises a number 40 times; the sum is exact."""
    url = f"file://{tmp_path}/store"
    take(Store(url), claim("mine"), new=True)
    code = (
        "import sys; from stillhouse.protocol.object_store import Store\n"
        "from stillhouse.protocol.store_owner import StoreOwner\n"
        "owner = StoreOwner(Store(sys.argv[1]), 'mine')\n"
        "for _ in range(40): owner.beat()"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, url]) for _ in range(3)]
    assert [process.wait(PATIENCE_S) for process in running] == [0, 0, 0]
    found = read_owner(Store(url))
    assert found is not None and found.beat == 120


def test_a_store_in_use_is_refused_and_named(url: str) -> None:
    first, over = take(Store(url), claim("first"), new=True), threading.Event()

    def beat() -> None:
        while not over.wait(0.05):
            first.beat()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(StoreTaken, match=r"in use by big on here \(pid 1, since 2026.*lives: stop it first"):
            take(Store(url), claim("second"), new=False)
    finally:
        over.set()
        thread.join()
    assert first.confirm().token == "first"


def test_a_silent_launch_is_displaced_and_can_write_no_more(url: str) -> None:
    first = take(Store(url), claim("first"), new=True)
    assert first.begin_epoch(0) == 0
    first.update(lambda owner: msgspec.structs.replace(owner, checkpoints=("checkpoints/a",)))
    told: list[str] = []
    began_s = time.monotonic()
    second = take(Store(url), claim("second"), new=False, waits=lambda owner: told.append(owner.token))
    assert time.monotonic() - began_s > 0.6 and told == ["first"], "not at once, and it was said"
    for attempt in (first.beat, first.end, lambda: first.begin_epoch(5), first.confirm):
        with pytest.raises(Displaced, match=r"was taken by big on here .* may write there no more"):
            attempt()
    assert second.confirm().checkpoints == ("checkpoints/a",), "what counted before still counts"
    assert second.begin_epoch(0) == 1, "above all epochs of others"
    assert second.begin_epoch(0) == 2 and second.begin_epoch(7) == 7


def test_one_that_ended_in_order_or_is_known_to_be_dead_is_not_waited_for(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stillhouse.protocol.store_owner.SILENT_S", 1e9)
    take(Store(url), claim("first"), new=True).end()
    take(Store(url), claim("second"), new=False)
    third = take(Store(url), claim("third"), new=False, dead=lambda found: found.token == "second")
    assert third.confirm().token == "third" and not third.confirm().over


def test_a_new_run_is_refused_where_a_learner_has_begun(url: str) -> None:
    first = take(Store(url), claim("first"), new=True)
    first.end()
    again = take(Store(url), claim("again"), new=True)
    again.begin_epoch(0)
    again.end()
    with pytest.raises(StoreTaken, match=r"has a run, last big on here.*--resume, or name another prefix"):
        take(Store(url), claim("new"), new=True)


def test_an_owner_that_was_deleted_or_damaged_is_not_written_over(url: str) -> None:
    first = take(Store(url), claim("first"), new=True)
    first.store.put_bytes(OWNER, b"{}")
    with pytest.raises(StoreError, match=r"owner\.json cannot be read"):
        first.beat()
    with pytest.raises(StoreError, match=r"owner.json cannot be read.*put it back from a copy"):
        take(Store(url), claim("second"), new=False)
    first.store.delete([OWNER])
    with pytest.raises(Displaced, match=r"somebody who has deleted its owner\.json"):
        first.beat()


def test_a_token_is_kept_in_the_runs_folder(url: str, tmp_path: Path) -> None:
    owner = take(Store(url), claim("first"), new=True)
    with pytest.raises(StoreError, match="this launch does not hold"):
        StoreOwner.of_folder(tmp_path, url)
    owner.keep(tmp_path)
    StoreOwner.of_folder(tmp_path, url).beat()
    held = read_held(tmp_path)
    assert held is not None and held.token == "first" and owner.confirm().beat == 1
    with pytest.raises(StoreError, match="this launch does not hold"):
        StoreOwner.of_folder(tmp_path, "file:///elsewhere")


def test_a_server_without_conditional_writes_is_refused(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Gate(server) as gate:
        for name, value in environment_of(gate.url).items():
            monkeypatch.setenv(name, value)
        gate.hides = (b"If-None-Match:", b"If-Match:")
        with pytest.raises(StoreError, match="this server ignores conditional writes"):
            take(Store(f"s3://{BUCKET}/{tmp_path.name}"), claim("first"), new=True)


def test_a_reply_that_is_lost_does_not_lose_the_store(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write arrives, the connection breaks before the answer, and the request is made again: it is refused then,
    and the launch sees that it has the store all the same."""
    prefix = tmp_path.name
    with Gate(server) as gate:
        for name, value in environment_of(gate.url).items():
            monkeypatch.setenv(name, value)
        gate.loses_answers_to = [b"PUT /"]
        owner = take(Store(f"s3://{BUCKET}/{prefix}"), claim("first"), new=True)
        assert not gate.loses_answers_to, "one was lost"
        gate.loses_answers_to = [b"PUT /"]
        assert owner.begin_epoch(3) >= 3
    assert owner_in(server, prefix)["token"] == "first"


def test_an_owner_put_back_by_hand_counts(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(server.url).items():
        monkeypatch.setenv(name, value)
    url = f"s3://{BUCKET}/{tmp_path.name}"
    first = take_from_dead(url, "first")
    copy = first.store.read(OWNER)
    take_from_dead(url, "second")
    overwrite(server, f"{tmp_path.name}/{OWNER}", copy)
    first.beat()
