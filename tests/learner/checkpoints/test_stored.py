"""Checkpoints in a bucket: whole or ignored, wherever the writing broke off; what comes back is what was written."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from stillhouse.learner.checkpoints.files import NoneUsable, go_on_from, new_draft, verify, write_manifest
from stillhouse.learner.checkpoints.files import add as give_name
from stillhouse.learner.checkpoints.stored import OwnedCheckpoints, go_on_from_store
from stillhouse.protocol.messages import WeightVersion
from stillhouse.protocol.object_store import Store, StoreError
from stillhouse.protocol.store_owner import Displaced, Owner, StoreOwner
from stillhouse.tools.export.command import main as export
from tests.s3_server import BUCKET, Gate, Server, environment_of, object_named, object_names, overwrite, s3_server
from tests.store_launches import owned, owner_in, take_from_dead, whole_folders

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
    """Step -> files of each checkpoint that owner.json names, and whose manifest is true."""
    named = [name.partition("/")[2] for name in owner_in(server, prefix)["checkpoints"]]
    whole = whole_folders(server, prefix, "checkpoints")
    return {int(name.split("_")[1]): whole[name] for name in named if name in whole}


def test_a_checkpoint_comes_back_into_an_empty_folder_byte_for_byte(server: Server, url: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "here", 40)
    owned(url).add(folder, keep=3)
    assert whole_ones(server, tmp_path.name) == {40: content(folder)}
    found = go_on_from_store(tmp_path / "there", url)
    assert found.path is not None and found.path == tmp_path / "there" / "step_000040"
    assert found.version == WeightVersion(0, 40)
    assert content(found.path) == content(folder) and verify(found.path)


def test_the_newest_of_folder_and_store_is_chosen(url: str, tmp_path: Path) -> None:
    stored, here, there = owned(url), tmp_path / "here", tmp_path / "there"
    assert go_on_from_store(there, url).path is None
    stored.add(checkpoint(here, 10), keep=3)
    stored.add(checkpoint(here, 4, epoch=1), keep=3)
    assert go_on_from_store(there, url).version == WeightVersion(1, 4), "a later branch is newer"
    newer = checkpoint(there, 6, epoch=1)
    assert go_on_from_store(there, url).path == newer
    assert stored.fetch_version(there, WeightVersion(0, 10)).name == "step_000010"
    assert stored.fetch_version(there, WeightVersion(1, 6)) == newer, "it is here, and not in the store"


def test_the_newest_is_exported_by_who_has_nothing_but_the_store(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run deletes the one that is being copied, and has a newer one."""
    stored, here, out = owned(url), tmp_path / "here", tmp_path / "there" / "student"
    assert export([url, "--to", str(out)]) == 2 and "has no complete checkpoint" in capsys.readouterr().err
    stored.add(checkpoint(here, 10), keep=1)
    get = Store.get

    def get_after_the_next(store: Store, name: str, file: Path) -> None:
        if name.endswith("optimizer.safetensors"):
            monkeypatch.setattr(Store, "get", get)
            stored.add(checkpoint(here, 20), keep=1)
        get(store, name, file)

    monkeypatch.setattr(Store, "get", get_after_the_next)
    assert export([url, "--to", str(out)]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out == f"student  {out}\n"
    of_the_student = ("config.json", "model.safetensors", "deep/tokenizer.json")
    newest, exported = content(here / "step_000020"), content(out)
    assert exported.pop("README.md") and exported == {name: newest[name] for name in of_the_student}
    assert [path.name for path in out.parent.iterdir()] == ["student"], "nothing else is left"


def test_old_ones_are_deleted(server: Server, url: str, tmp_path: Path) -> None:
    stored = owned(url)
    for step in (2, 4, 6, 8):
        stored.add(checkpoint(tmp_path / "here", step), keep=2)
    assert set(whole_ones(server, tmp_path.name)) == {6, 8}
    assert len(objects_below(server, tmp_path.name)) == 2 * (len(FILES) + 1) + 1, "nothing else is left"


def objects_below(server: Server, prefix: str) -> list[str]:
    return object_names(server, f"{prefix}/")


@pytest.mark.slow
def test_wherever_the_writing_breaks_off_the_one_before_is_taken(
    server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server goes away after so many bytes; in between, and in the deleting of the oldest at the end."""
    here, prefix = tmp_path / "here", tmp_path.name
    before, new = checkpoint(here, 10), checkpoint(here, 20)
    owned(url).add(before, keep=1)
    outcomes: set[int] = set()
    for cut in (
        3_000,
        9_000,
        30_000,
        55_000,
        63_000,
        90_000,
        112_000,
        113_500,
        115_000,
        117_000,
        119_000,
        122_000,
        125_000,
    ):
        with Gate(server) as gate:
            gate.shut_after_bytes = cut
            use(gate.url, monkeypatch)
            try:
                OwnedCheckpoints(StoreOwner(Store(url), "mine")).add(new, keep=1)
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
            OwnedCheckpoints(StoreOwner(Store(url), "mine")).add(checkpoint(here, 30), keep=1)
    use(server.url, monkeypatch)
    assert any("step_000030" in name for name in objects_below(server, prefix)), "something of it is left"
    owned(url).add(checkpoint(here, 40), keep=1)
    assert set(whole_ones(server, prefix)) == {40}
    assert len(objects_below(server, prefix)) == len(FILES) + 1 + 1, "what broke off was removed"


def test_a_server_that_is_killed_in_the_middle_costs_that_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint(tmp_path / "here", 40)
    with s3_server() as server, Gate(server) as gate:
        use(gate.url, monkeypatch)
        stored = owned(f"s3://{BUCKET}/x")
        gate.shut_after_bytes, gate.when_shut = 60_000, server.kill
        with pytest.raises(StoreError, match=r"step_000040_epoch_0.* could not be written"):
            stored.add(folder, keep=1)
        with pytest.raises(StoreError, match="no answer from"):
            go_on_from_store(tmp_path / "there", f"s3://{BUCKET}/x")
    assert go_on_from(tmp_path / "here").path == folder, "the one in the folder is untouched"
    with s3_server() as server:
        use(server.url, monkeypatch)
        owned(f"s3://{BUCKET}/x").add(folder, keep=1)
        assert whole_ones(server, "x") == {40: content(folder)}


@pytest.mark.parametrize("file", FILES[2::2])
def test_a_damaged_one_is_left_out_and_named(server: Server, url: str, tmp_path: Path, file: str) -> None:
    stored, here = owned(url), tmp_path / "here"
    for step in (10, 20):
        stored.add(checkpoint(here, step), keep=3)
    key = f"{tmp_path.name}/checkpoints/step_000020_epoch_0/{file}"
    data = bytearray(object_named(server, key))
    data[50] ^= 1
    overwrite(server, key, bytes(data))
    found = go_on_from_store(tmp_path / "there", url)
    assert found.version == WeightVersion(0, 10)
    assert [skipped.in_store for skipped in found.damaged] == [True] and "checksum" in found.damaged[0].reason
    overwrite(server, key, None)
    assert [one.version.step for one in stored.complete()] == [10], "without one of its objects it counts as nothing"


def test_starting_anew_is_refused_where_all_are_damaged(server: Server, url: str, tmp_path: Path) -> None:
    owned(url).add(checkpoint(tmp_path / "here", 10), keep=3)
    overwrite(server, f"{tmp_path.name}/checkpoints/step_000010_epoch_0/trainer.json", b"x" * 100)
    with pytest.raises(NoneUsable, match="step_000010_epoch_0"):
        go_on_from_store(tmp_path / "there", url)


def test_a_checkpoint_of_a_displaced_learner_counts_as_nothing(
    server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was displaced while it wrote the files; its successor removes them with its own first checkpoint."""
    here, prefix = tmp_path / "here", tmp_path.name
    first = owned(url, "first")
    first.add(checkpoint(here, 10), keep=3)

    update = StoreOwner.update

    def taken_meanwhile(owner: StoreOwner, change: Callable[[Owner], Owner]) -> Owner:
        monkeypatch.setattr(StoreOwner, "update", update)
        take_from_dead(url, "second")
        return owner.update(change)

    monkeypatch.setattr(StoreOwner, "update", taken_meanwhile)
    with pytest.raises(Displaced, match="may write there no more"):
        first.add(checkpoint(here, 20), keep=3)
    assert any("step_000020" in name for name in objects_below(server, prefix)), "all of its files are there"
    assert set(whole_ones(server, prefix)) == {10}
    assert go_on_from_store(tmp_path / "there", url).version == WeightVersion(0, 10)
    second = OwnedCheckpoints(StoreOwner(Store(url), "second"))
    second.add(checkpoint(here, 12, epoch=1), keep=3)
    assert set(whole_ones(server, prefix)) == {10, 12}
    assert not any("step_000020" in name for name in objects_below(server, prefix))


def test_a_displaced_learner_removes_nothing_of_its_successor(
    server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has looked who owns the store, stands still, and then removes what it takes for broken off."""
    here, prefix = tmp_path / "here", tmp_path.name
    first = owned(url, "first")
    first.add(checkpoint(here, 10), keep=3)
    confirm = StoreOwner.confirm

    def confirmed_long_ago(owner: StoreOwner) -> Owner:
        found = confirm(owner)
        monkeypatch.setattr(StoreOwner, "confirm", confirm)
        second = take_from_dead(url, "second")
        folder = checkpoint(here, 12, epoch=1)
        for file in (*FILES, "manifest.json"):
            second.store.put(folder / file, f"checkpoints/step_000012_epoch_1/{file}")
        second.store.put_bytes("rows/.tmp-step_000014_epoch_1-7-abcd/1/model.safetensors", b"rows")
        return found

    monkeypatch.setattr(StoreOwner, "confirm", confirmed_long_ago)
    before = set(objects_below(server, prefix))
    with pytest.raises(Displaced):
        first.add(checkpoint(here, 20), keep=1)
    after = set(objects_below(server, prefix))
    assert before <= after, "its own checkpoint of step 10 as well: it is the successor's now"
    assert sum("step_000012_epoch_1" in name for name in after) == len(FILES) + 1
    assert any(name.startswith(f"{prefix}/rows/") for name in after)


def test_what_a_run_leaves_replaces_what_was_left_before(server: Server, url: str, tmp_path: Path) -> None:
    stored, out = owned(url), tmp_path / "export"
    for step, text in ((4, b"four"), (8, b"eight")):
        for file in ("merged/model.safetensors", "adapter/adapter_model.safetensors"):
            (out / file).parent.mkdir(parents=True, exist_ok=True)
            (out / file).write_bytes(text)
        stored.add_export(out, WeightVersion(0, step))
    left = whole_folders(server, tmp_path.name, "export")
    assert list(left) == ["step_000008_epoch_0"]
    assert left["step_000008_epoch_0"]["adapter/adapter_model.safetensors"] == b"eight"
