"""What a run puts into its store beside checkpoints, and how it goes on from that in an empty folder."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import threading
from pathlib import Path

import msgspec
import pytest

from stillhouse.launch.checks.preflight import check
from stillhouse.launch.config.command_line import CommandLine, parse_arguments
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.runfolder import RunFolder
from stillhouse.launch.store_guard import held_store
from stillhouse.launch.stored_run import bring_run, check_store, put_end, put_run
from stillhouse.learner.checkpoints.files import add as give_name
from stillhouse.learner.checkpoints.files import new_draft, write_manifest
from stillhouse.protocol.messages import WeightVersion
from stillhouse.protocol.object_store import Store
from stillhouse.protocol.store_owner import StoreOwner
from tests.patience import eventually
from tests.store_launches import owned, take_from_dead


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def config(url: str) -> RunConfig:
    return check(build(RunConfig, {"store": url})).config


@pytest.fixture
def folder(config: RunConfig, tmp_path: Path) -> RunFolder:
    """A run that was started here, has put what it must, and died."""
    opened = RunFolder.open(tmp_path / "runs" / "big", resume=False)
    write_config(config, opened.config_path)
    opened.keep_keys(("actor-0",), encrypted=True)
    owner = take_from_dead(config.store, "mine")
    owner.keep(opened.path)
    put_run(owner, opened)
    with subprocess.Popen(["true"]) as dead:
        dead.wait()
    owner.update(lambda found: msgspec.structs.replace(found, host=platform.node(), pid=dead.pid))
    opened.close()
    return opened


def line(folder: Path, *arguments: str) -> CommandLine:
    return parse_arguments(["--run-dir", str(folder), *arguments])


def test_the_store_has_configuration_and_record_and_no_key(folder: RunFolder, url: str) -> None:
    store = Store(url)
    assert list(store.sizes()) == ["config.yaml", "owner.json", "run.json"]
    assert store.read("config.yaml") == folder.config_path.read_bytes()
    secrets = [file.read_bytes() for file in (folder.path / "keys").iterdir()]
    assert secrets and not any(key.strip() in store.read(name) for key in secrets for name in store.sizes())


def test_an_empty_folder_gets_them_and_is_a_run_that_can_be_resumed(
    folder: RunFolder, config: RunConfig, url: str, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    found, said = bring_run(line(there, "--resume", "--store", url))
    assert found.resume and "the run big of file://" in said
    assert (there / "config.yaml").read_bytes() == folder.config_path.read_bytes()
    with RunFolder.open(there, resume=True) as resumed:
        assert resumed.record.launches == 2 and resumed.record.name == "big"
        resumed.finish(0)
        (there / "summary.json").write_text("{}")
        put_end(StoreOwner(Store(url), "mine"), resumed)
    assert json.loads(Store(url).read("run.json"))["state"] == "finished"
    assert Store(url).read("launches/2/summary.json") == b"{}"
    assert bring_run(line(there, "--resume", "--store", url))[1] == "", "a run is there now"


def test_resume_or_start_does_what_fits(folder: RunFolder, url: str, tmp_path: Path) -> None:
    """It resumes what is in the folder, else what is in the store, else starts."""
    words = ("--resume-or-start", "--store", url)
    assert bring_run(line(folder.path, *words))[0].resume
    found, said = bring_run(line(tmp_path / "there", *words))
    assert found.resume and "goes on in" in said and (tmp_path / "there" / "config.yaml").is_file()
    found, said = bring_run(line(tmp_path / "new", "--resume-or-start", "--store", f"{url}-2"))
    assert not found.resume and said == "" and not (tmp_path / "new").exists()
    assert not bring_run(line(tmp_path / "new", "--resume-or-start"))[0].resume
    (tmp_path / "there" / "run.json").unlink()
    assert bring_run(line(tmp_path / "there", *words))[0].resume, "what broke off in the middle is brought again"
    assert (tmp_path / "there" / "run.json").is_file()
    with pytest.raises(ConfigError, match="--resume-or-start: which run"):
        bring_run(parse_arguments(["--resume-or-start"]))


def test_a_launch_that_is_displaced_changes_neither_record_nor_results(folder: RunFolder, url: str) -> None:
    before = Store(url).read("run.json")
    take_from_dead(url, "other")
    folder.finish(0)
    put_end(StoreOwner(Store(url), "mine"), folder)
    assert Store(url).read("run.json") == before and not any("launches" in name for name in Store(url).sizes())
    with pytest.raises(ConfigError, match="may write there no more"):
        put_run(StoreOwner(Store(url), "mine"), folder)


def test_a_dead_launch_of_the_same_folder_is_not_waited_for(
    folder: RunFolder, config: RunConfig, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stillhouse.protocol.store_owner.SILENT_S", 1e9)
    with held_store(config, folder.path, resume=True) as guard:
        assert guard is not None and guard.owner.confirm().run == "big"
        guard.owner.keep(folder.path)
    with held_store(config, folder.path, resume=True):
        pass


def test_a_launch_that_lives_is_not_displaced_from_a_copy_of_its_folder(
    folder: RunFolder, config: RunConfig, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has the token, and its lock is free."""
    monkeypatch.setattr("stillhouse.protocol.store_owner.LOOK_S", 0.01)
    copy = tmp_path / "copy"
    with held_store(config, folder.path, resume=True) as guard:
        assert guard is not None
        guard.owner.keep(folder.path)
        shutil.copytree(folder.path, copy)
        for field, value in (("host", "elsewhere"), ("pid", os.getppid())):
            guard.owner.update(lambda owner, field=field, value=value: msgspec.structs.replace(owner, **{field: value}))
            beats = threading.Timer(0.1, guard.owner.beat)
            beats.start()
            with pytest.raises(ConfigError, match="in use by"), held_store(config, copy, resume=True):
                pass
            beats.join()
            guard.owner.update(lambda owner: msgspec.structs.replace(owner, host=platform.node(), pid=os.getpid()))


@pytest.mark.slow
def test_a_launch_of_the_same_folder_that_lives_is_not_displaced(
    folder: RunFolder, config: RunConfig, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stillhouse.launch.store_guard.BEAT_S", 0.05)
    with (
        RunFolder.open(folder.path, resume=True) as opened,
        held_store(config, None, resume=True) as guard,
    ):
        assert guard is not None
        guard.owner.keep(opened.path)
        with pytest.raises(ConfigError, match="in use by"), held_store(config, folder.path, resume=True):
            pass
        assert guard.displaced == "" and guard.owner.confirm()


def test_the_user_hears_of_a_store_that_goes_comes_and_is_taken(
    config: RunConfig, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stillhouse.launch.store_guard.BEAT_S", 0.05)
    with held_store(config, None, resume=False) as guard:
        assert guard is not None
        (tmp_path / "store").rename(tmp_path / "away")
        (tmp_path / "store").write_text("no folder")
        news: list[str] = []
        eventually(lambda: bool(news.extend(guard.news()) or news), "that it is away")
        assert "The run goes on; until the store is back, checkpoints are in the run's folder only" in news[0]
        (tmp_path / "store").unlink()
        (tmp_path / "away").rename(tmp_path / "store")
        eventually(lambda: bool(news.extend(guard.news()) or len(news) > 1), "that it is back")
        assert "answers again, after" in news[1] and len(news) == 2, "each is said once"
        take_from_dead(url, "other")
        eventually(lambda: guard.displaced != "", "that it was taken")
        assert "was taken by big on here" in guard.displaced and "in this run's folder only" in guard.displaced
    assert Store(url).read("owner.json").count(b'"over":false'), "what is another's is not given back"


def test_the_store_of_a_file_is_found(folder: RunFolder, url: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'store = "{url}"')
    assert bring_run(line(tmp_path / "there", "--resume", "--config", str(tmp_path / "run.toml")))[1]


@pytest.mark.parametrize("arguments", [("--store=",), (), ("--resume",)])
def test_nothing_is_brought_that_was_not_asked_for(
    folder: RunFolder, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    assert bring_run(line(tmp_path / "there", *arguments))[1] == "" and not (tmp_path / "there").exists()


def test_a_damaged_record_is_named(folder: RunFolder, url: str, tmp_path: Path) -> None:
    Store(url).put_bytes("run.json", b"{")
    with pytest.raises(ConfigError, match=r"run\.json is not a run record"):
        bring_run(line(tmp_path / "there", "--resume", "--store", url))


def test_a_store_without_a_run_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run, and neither does"):
        bring_run(line(tmp_path / "there", "--resume", "--store", url))
    assert not (tmp_path / "there").exists()


def test_a_new_run_is_refused_where_another_has_checkpoints(config: RunConfig, url: str, tmp_path: Path) -> None:
    check_store(config, resume=False)
    draft = new_draft(tmp_path / "checkpoints", WeightVersion(0, 7))
    for name in ("config.json", "trainer.json", "optimizer.safetensors"):
        (draft / name).write_bytes(b"{}")
    write_manifest(draft, WeightVersion(0, 7))
    stored = owned(url)
    stored.add(give_name(draft, WeightVersion(0, 7)), keep=1)
    take_from_dead(url, "again").begin_epoch(0)
    with pytest.raises(ConfigError, match=r"has checkpoints of a run \(1, the newest is .*step_000007.*--resume"):
        check_store(config, resume=False)
    check_store(config, resume=True)
    check_store(build(RunConfig, {}), resume=False)
    Store(url).delete(["owner.json"])
    with pytest.raises(ConfigError, match=r"has checkpoints, but no owner.json"):
        check_store(config, resume=True)


def test_a_url_of_another_kind_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match="store: got 'gs://bucket', expected s3://BUCKET/PREFIX"):
        build(RunConfig, {"store": "gs://bucket"})
