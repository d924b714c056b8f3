"""Finding a run to join, from what its folder or an exported one says; and refusing one that cannot be joined."""

from __future__ import annotations

import json
import os
import platform
import stat
from pathlib import Path
from typing import Any

import pytest

from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import LaunchError
from stillhouse.launch.join.command import main as join_main
from stillhouse.launch.join.command import point_to_keys
from stillhouse.launch.join.invite import invite
from stillhouse.launch.join.invite import main as invite_main
from stillhouse.launch.join.target import find_target
from stillhouse.protocol.keys import KEYS, make_keys

OPEN = "tcp://10.77.0.9:5555"


def make_run(folder: Path, *, address: str = OPEN, buffer: dict[str, Any] | None = None, **record: Any) -> Path:
    """As a launcher leaves it while the run goes on."""
    folder.mkdir(parents=True)
    config = build(RunConfig, {"buffer": {"bind": address} | (buffer or {})})
    write_config(config, folder / "config.yaml")
    if config.buffer.encrypted:
        make_keys(folder / KEYS)
    (folder / "buffer.json").write_text(json.dumps({"address": address, "pid": 1, "run_id": "r-1"}))
    fields = {
        "name": "run",
        "run_id": "r-1",
        "state": "running",
        "started": "now",
        "launcher_pid": os.getpid(),
        "host": platform.node(),
    }
    (folder / "run.json").write_text(json.dumps(fields | record))
    return folder


def test_a_run_of_this_machine_says_address_run_and_keys(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    target = find_target(str(run))
    assert (target.address, target.run_id, target.keys) == (OPEN, "r-1", run / KEYS)
    assert target.check_keys(("actor", "teacher")) == []
    assert target.elsewhere  # none of this machine's interfaces has that address
    (run / KEYS / "actor.key_secret").unlink()
    (mistake,) = target.check_keys(("actor", "teacher"))
    assert "actor.key_secret" in mistake and "stillhouse invite" in mistake


def test_a_buffer_on_all_addresses_is_found_on_loopback_and_elsewhere_by_what_it_advertises(
    tmp_path: Path,
) -> None:
    wild = "tcp://0.0.0.0:5555"
    assert find_target(str(make_run(tmp_path / "here", address=wild))).address == "tcp://127.0.0.1:5555"
    far = make_run(tmp_path / "far", address=wild, host="another-host")
    with pytest.raises(LaunchError, match=r"listens on all its addresses .*--buffer\.advertise"):
        find_target(str(far))
    advertised = make_run(tmp_path / "advertised", address=wild, host="another-host", buffer={"advertise": OPEN})
    assert find_target(str(advertised)).address == OPEN


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"state": "finished", "exit_code": 0}, r"is over \(finished, exit code 0\)"),
        ({"launcher_pid": 2**22 + 1}, "died without ending the run"),
        ({"host": "another-host"}, r"runs on another-host and listens on tcp://127\.0\.0\.1:5555.*--buffer\.bind"),
    ],
)
def test_a_run_that_cannot_be_joined_is_refused_with_the_reason(
    tmp_path: Path, record: dict[str, Any], message: str
) -> None:
    run = make_run(tmp_path / "run", address="tcp://127.0.0.1:5555", **record)
    with pytest.raises(LaunchError, match=message):
        find_target(str(run))


def test_the_exit_code_says_whether_starting_a_join_again_can_help(tmp_path: Path) -> None:
    for state, code, expected in (("finished", 0, 0), ("stopped", 130, 75), ("failed", 1, 75)):
        run = make_run(tmp_path / state, state=state, exit_code=code)
        assert join_main([str(run), "--teachers=1"]) == expected
    killed = make_run(tmp_path / "killed", launcher_pid=2**22 + 1)
    assert join_main([str(killed), "--teachers=1"]) == 75
    assert join_main([str(killed), "--no-such-key=1"]) == join_main(["nowhere", "--teachers=1"]) == 2
    assert join_main([str(killed), "--actors=1", "--learner.lr=1"]) == 2


def test_a_join_finds_the_keys_of_a_run_folder_that_is_mounted_under_another_path(tmp_path: Path) -> None:
    run = make_run(tmp_path / "here" / "run")
    folder = run / "joined" / "late"
    folder.mkdir(parents=True)
    point_to_keys(folder / KEYS, run / KEYS)
    (tmp_path / "here").rename(tmp_path / "there")
    there = tmp_path / "there" / "run"
    assert (there / "joined" / "late" / KEYS / "server.key").read_bytes() == (there / KEYS / "server.key").read_bytes()


def test_no_run_at_all(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no run 'nowhere'"):
        find_target("nowhere")
    with pytest.raises(LaunchError, match="holds no run"):
        find_target(str(tmp_path))


def test_an_exported_folder_is_enough_and_closed_to_others(tmp_path: Path) -> None:
    run, folder = make_run(tmp_path / "run"), tmp_path / "out"
    invite(run, folder, ("teacher",))
    target = find_target(str(folder))
    assert (target.name, target.address, target.run_id) == ("run", OPEN, "")
    assert target.settings == find_target(str(run)).settings
    assert target.check_keys(("teacher",)) == [] and target.check_keys(("actor",))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / KEYS, *folder.glob("keys/*"))}
    assert set(modes) == {"out", KEYS, "server.key", "learner.key", "joiner.key_secret", "teacher.key_secret"}
    assert not any(mode & 0o077 for mode in modes.values())


def test_a_run_on_loopback_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", address="tcp://127.0.0.1:5555")
    assert invite_main([str(run), str(tmp_path / "out")]) == 2
    assert "start the run with --buffer.bind" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_exit_code_says_whether_a_run_can_be_exported_later(tmp_path: Path) -> None:
    """A run that is started again is over until its launcher is ready, whatever it ended with before."""
    for state, code in (("finished", 0), ("stopped", 130), ("failed", 1)):
        run = make_run(tmp_path / state, state=state, exit_code=code)
        assert invite_main([str(run), str(tmp_path / "out")]) == 75
    assert invite_main([str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
