"""Checkpoints in a bucket: whole or ignored, wherever the writing broke off; what comes back is what was written."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from learner.checkpoints.files import NoneUsable, go_on_from, new_draft, verify, write_manifest
from learner.checkpoints.files import add as give_name
from learner.checkpoints.stored import StoredCheckpoints, go_on_from_store
from protocol.messages import WeightVersion
from protocol.object_store import Store, StoreError
from tests.s3_server import BUCKET, Gate, Server, environment_of, objects, overwrite, s3_server

FILES: Final = ("config.json", "model.safetensors", "optimizer.safetensors", "trainer.json", "deep/tokenizer.json")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with s3_server() as made:
        yield made


@pytest.fixture
def url(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of an empty prefix."""
    use(server.url, monkeypatch)
    return f"s3://{BUCKET}/{tmp_path.name}"


def use(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment_of(endpoint).items():
        monkeypatch.setenv(name, value)


def checkpoint(root: Path, step: int, epoch: int = 0) -> Path:
    """Complete, of random bytes."""
    version, rng = WeightVersion(epoch, step), random.Random(step)
    draft = new_draft(root, version)
    for name in FILES:
        (draft / name).parent.mkdir(exist_ok=True)
        (draft / name).write_bytes(rng.randbytes(50_000 if "safe" in name else 100))
    write_manifest(draft, version)
    return give_name(draft, version)


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def whole_ones(server: Server, prefix: str) -> dict[int, dict[str, bytes]]:
    """Step -> files of each prefix whose manifest is true: by boto3, hashlib and json."""
    found: dict[str, dict[str, bytes]] = {}
    for key, data in objects(server).items():
        if key.startswith(f"{prefix}/checkpoints/"):
            name, _, file = key.removeprefix(f"{prefix}/checkpoints/").partition("/")
            found.setdefault(name, {})[file] = data
    whole: dict[int, dict[str, bytes]] = {}
    for name, files in found.items():
        try:
            listed = json.loads(files["manifest.json"])["files"]
        except (KeyError, ValueError):  # moto keeps what came of a request that was cut
            continue
        if all(hashlib.sha256(files.get(f, b"")).hexdigest() == entry["sha256"] for f, entry in listed.items()):
            whole[int(name.split("_")[1])] = files
    return whole


def test_a_checkpoint_comes_back_into_an_empty_folder_byte_for_byte(server: Server, url: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "here", 40)
    StoredCheckpoints(Store(url)).add(folder, keep=3)
    assert whole_ones(server, tmp_path.name) == {40: content(folder)}
    found = go_on_from_store(tmp_path / "there", url)
    assert found.path is not None and found.path == tmp_path / "there" / "step_000040"
    assert found.version == WeightVersion(0, 40)
    assert content(found.path) == content(folder) and verify(found.path)


def test_the_newest_of_folder_and_store_is_chosen(url: str, tmp_path: Path) -> None:
    stored, here, there = StoredCheckpoints(Store(url)), tmp_path / "here", tmp_path / "there"
    assert go_on_from_store(there, url).path is None
    stored.add(checkpoint(here, 10), keep=3)
    stored.add(checkpoint(here, 4, epoch=1), keep=3)
    assert go_on_from_store(there, url).version == WeightVersion(1, 4), "a later branch is newer"
    newer = checkpoint(there, 6, epoch=1)
    assert go_on_from_store(there, url).path == newer
    assert stored.fetch_version(there, WeightVersion(0, 10)).name == "step_000010"
    assert stored.fetch_version(there, WeightVersion(1, 6)) == newer, "it is here, and not in the store"


def test_old_ones_are_deleted(server: Server, url: str, tmp_path: Path) -> None:
    stored = StoredCheckpoints(Store(url))
    for step in (2, 4, 6, 8):
        stored.add(checkpoint(tmp_path / "here", step), keep=2)
    assert set(whole_ones(server, tmp_path.name)) == {6, 8}
    assert len(objects_below(server, tmp_path.name)) == 2 * (len(FILES) + 1), "nothing else is left"


def objects_below(server: Server, prefix: str) -> list[str]:
    return [name for name in objects(server) if name.startswith(f"{prefix}/")]


def test_wherever_the_writing_breaks_off_the_one_before_is_taken(
    server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server goes away after so many bytes; in between, and in the deleting of the oldest at the end."""
    here, prefix = tmp_path / "here", tmp_path.name
    before, new = checkpoint(here, 10), checkpoint(here, 20)
    StoredCheckpoints(Store(url)).add(before, keep=1)
    outcomes: set[int] = set()
    for cut in (3_000, 9_000, 30_000, 55_000, 63_000, 90_000, 112_000, 113_500, 115_000, 117_000, 119_000, 122_000):
        with Gate(server) as gate:
            gate.shut_after_bytes = cut
            use(gate.url, monkeypatch)
            try:
                StoredCheckpoints(Store(url)).add(new, keep=1)
            except StoreError as error:
                assert url in str(error), "says where"
        use(server.url, monkeypatch)
        whole = whole_ones(server, prefix)
        found = go_on_from_store(tmp_path / f"cut-{cut}", url)
        assert found.version is not None and found.version.step == max(whole), (cut, found)
        assert found.path is not None and content(found.path) == content(here / f"step_0000{found.version.step}")
        outcomes.add(found.version.step)
        if outcomes == {10, 20}:
            break
    assert outcomes == {10, 20}, "the cuts lie on both sides of the last object"
    with Gate(server) as gate:
        gate.shut_after_bytes = 63_000
        use(gate.url, monkeypatch)
        with pytest.raises(StoreError):
            StoredCheckpoints(Store(url)).add(checkpoint(here, 30), keep=1)
    use(server.url, monkeypatch)
    assert any("step_000030" in name for name in objects_below(server, prefix)), "something of it is left"
    StoredCheckpoints(Store(url)).add(checkpoint(here, 40), keep=1)
    assert set(whole_ones(server, prefix)) == {40}
    assert len(objects_below(server, prefix)) == len(FILES) + 1, "what broke off was removed"


def test_a_server_that_is_killed_in_the_middle_costs_that_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "here", 40)
    with s3_server() as server, Gate(server) as gate:
        use(gate.url, monkeypatch)
        gate.shut_after_bytes, gate.when_shut = 60_000, server.kill
        with pytest.raises(StoreError, match=r"step_000040_epoch_0.* could not be written"):
            StoredCheckpoints(Store(f"s3://{BUCKET}/x")).add(folder, keep=1)
        with pytest.raises(StoreError, match="no answer from"):
            go_on_from_store(tmp_path / "there", f"s3://{BUCKET}/x")
    assert go_on_from(tmp_path / "here").path == folder, "the one in the folder is untouched"
    with s3_server() as server:
        use(server.url, monkeypatch)
        StoredCheckpoints(Store(f"s3://{BUCKET}/x")).add(folder, keep=1)
        assert whole_ones(server, "x") == {40: content(folder)}


@pytest.mark.parametrize("file", FILES)
def test_a_damaged_one_is_left_out_and_named(server: Server, url: str, tmp_path: Path, file: str) -> None:
    stored, here = StoredCheckpoints(Store(url)), tmp_path / "here"
    for step in (10, 20):
        stored.add(checkpoint(here, step), keep=3)
    key = f"{tmp_path.name}/checkpoints/step_000020_epoch_0/{file}"
    data = bytearray(objects(server)[key])
    data[50] ^= 1
    overwrite(server, key, bytes(data))
    found = go_on_from_store(tmp_path / "there", url)
    assert found.version == WeightVersion(0, 10)
    assert [skipped.in_store for skipped in found.damaged] == [True] and "checksum" in found.damaged[0].reason
    overwrite(server, key, None)
    assert [one.version.step for one in stored.complete()] == [10], "without one of its objects it counts as nothing"


def test_starting_anew_is_refused_where_all_are_damaged(server: Server, url: str, tmp_path: Path) -> None:
    StoredCheckpoints(Store(url)).add(checkpoint(tmp_path / "here", 10), keep=3)
    overwrite(server, f"{tmp_path.name}/checkpoints/step_000010_epoch_0/trainer.json", b"x" * 100)
    with pytest.raises(NoneUsable, match="step_000010_epoch_0"):
        go_on_from_store(tmp_path / "there", url)
