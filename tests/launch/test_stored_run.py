"""What a run puts into its store beside checkpoints, and how it goes on from that in an empty folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.checks.preflight import check
from launch.config.command_line import CommandLine, parse_arguments
from launch.config.files import write_config
from launch.config.run import RunConfig
from launch.config.tree import build
from launch.errors import ConfigError
from launch.runfolder import RunFolder, read_record
from launch.stored_run import bring_run, check_store, put_end, put_run
from learner.checkpoints.files import add as give_name
from learner.checkpoints.files import new_draft, write_manifest
from learner.checkpoints.stored import StoredCheckpoints
from protocol.messages import WeightVersion
from protocol.object_store import Store


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture
def config(url: str) -> RunConfig:
    return check(build(RunConfig, {"store": url})).config


@pytest.fixture
def folder(config: RunConfig, tmp_path: Path) -> RunFolder:
    """A run that was started and has put what it must."""
    opened = RunFolder.open(tmp_path / "runs" / "big", resume=False)
    write_config(config, opened.config_path)
    opened.keep_keys(("actor-0",), encrypted=True)
    put_run(config, opened)
    opened.close()
    return opened


def line(folder: Path, *arguments: str) -> CommandLine:
    return parse_arguments(["--run-dir", str(folder), *arguments])


def test_the_store_has_configuration_and_record_and_no_key(folder: RunFolder, url: str) -> None:
    store = Store(url)
    assert list(store.sizes()) == ["config.yaml", "run.json"]
    assert store.read("config.yaml") == folder.config_path.read_bytes()
    secrets = [file.read_bytes() for file in (folder.path / "keys").iterdir()]
    assert secrets and not any(key.strip() in store.read(name) for key in secrets for name in store.sizes())


def test_an_empty_folder_gets_them_and_is_a_run_that_can_be_resumed(
    folder: RunFolder, config: RunConfig, url: str, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    said = bring_run(line(there, "--resume", "--store", url))
    assert "the run big of file://" in said and "did not end in order" not in said, "it was on this host"
    assert (there / "config.yaml").read_bytes() == folder.config_path.read_bytes()
    with RunFolder.open(there, resume=True) as resumed:
        assert resumed.record.launches == 2 and resumed.record.name == "big"
        resumed.finish(0)
        put_end(config, resumed)
    assert json.loads(Store(url).read("run.json"))["state"] == "finished"
    assert bring_run(line(there, "--resume", "--store", url)) == "", "a run is there now"


def test_a_run_that_did_not_end_on_another_host_is_named(folder: RunFolder, url: str, tmp_path: Path) -> None:
    record = json.loads(Store(url).read("run.json")) | {"host": "node7"}
    Store(url).put_bytes("run.json", json.dumps(record).encode())
    assert "did not end in order on node7" in bring_run(line(tmp_path / "there", "--resume", "--store", url))
    record_there = read_record(tmp_path / "there")
    assert record_there is not None and record_there.host == "node7"


def test_the_store_of_a_file_is_found(folder: RunFolder, url: str, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'store = "{url}"')
    assert bring_run(line(tmp_path / "there", "--resume", "--config", str(tmp_path / "run.toml")))


@pytest.mark.parametrize("arguments", [("--store=",), (), ("--resume",)])
def test_nothing_is_brought_that_was_not_asked_for(
    folder: RunFolder, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    assert bring_run(line(tmp_path / "there", *arguments)) == "" and not (tmp_path / "there").exists()


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
    StoredCheckpoints(Store(url)).add(give_name(draft, WeightVersion(0, 7)), keep=1)
    with pytest.raises(ConfigError, match=r"has checkpoints of a run \(1, the newest of step 7\).*--resume"):
        check_store(config, resume=False)
    check_store(config, resume=True)
    check_store(build(RunConfig, {}), resume=False)


def test_a_url_of_another_kind_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match="store: got 'gs://bucket', expected s3://BUCKET/PREFIX"):
        build(RunConfig, {"store": "gs://bucket"})
