"""The numbers of workers of a run on Ray are changed by several processes at once, and no change is lost."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.config.tree import build
from stillhouse.launch.errors import ConfigError, LaunchError
from stillhouse.launch.ray import wanted
from stillhouse.launch.ray.run import of_the_former, wanted_of
from stillhouse.launch.ray.scale import main as scale
from stillhouse.launch.ray.wanted import Wanted, change_wanted, read_wanted, write_wanted
from stillhouse.launch.topology import beside_the_learner, host_groups
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]
TIMES = 150
SCALES = """
import sys
from pathlib import Path
import json
from stillhouse.launch.ray.scale import main

run, role, times = sys.argv[1], sys.argv[2], int(sys.argv[3])
sys.stdin.readline()
for n in range(1, times + 1):
    assert main([run, f"--{role}={n}"]) == 0
    there = json.loads((Path(run) / "hosts.json").read_text())
    assert there[role] == n, f"the {n} {role} of this command are {there[role]}"
"""


def run_folder(folder: Path, pools: str = "") -> Path:
    """As a launcher that lives (this process) leaves it."""
    record = {"name": "big", "run_id": "r", "host": platform.node(), "launcher_pid": os.getpid(), "state": "running"}
    record |= {"launches": 1, "started": "2026-11-25T12:00:00+0000"}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "config.yaml").write_text(f"cluster: {{actors: {{each: 1}}, teachers: {{each: 1}}}}\n{pools}")
    write_wanted(folder, Wanted(actors=1, teachers=1))
    return folder


def test_two_scale_commands_at_once_lose_neither_change(tmp_path: Path) -> None:
    """Each changes one role, again and again, and looks whether its number is there."""
    folder = run_folder(tmp_path)
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SCALES, str(folder), role, str(TIMES)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for role in ("actors", "teachers")
    ]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    errors = [process.communicate(timeout=PATIENCE_S)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    assert read_wanted(folder) == Wanted(actors=TIMES, teachers=TIMES)


def test_a_lock_that_is_not_given_back_is_named_after_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wanted(tmp_path, Wanted(actors=3))
    monkeypatch.setattr(wanted, "LOCK_S", 0.2)
    with (tmp_path / "hosts.lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LaunchError, match=r"hosts\.lock: another process has held it"):
            write_wanted(tmp_path, Wanted(actors=4))
    assert read_wanted(tmp_path) == Wanted(actors=3)
    assert change_wanted(tmp_path, lambda now: Wanted(actors=now.actors + 1)) == Wanted(actors=4)


def test_numbers_that_are_not_there_cannot_be_changed(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"hosts\.json is not there"):
        change_wanted(tmp_path, lambda now: now)


def test_teachers_are_scaled_by_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path, "teachers: 0\npools: {math: {count: 0}, style: {count: 0}}\n")
    write_wanted(folder, Wanted(actors=1, pools={"math": 2, "style": 1}))
    assert scale([str(folder), "--teachers=3", "--pool=math", "--actors=4"]) == 0
    assert read_wanted(folder) == Wanted(actors=4, pools={"math": 3, "style": 1})
    assert (
        "wanted on Ray from now on: 4 actors and 3 teachers of math and 1 teacher of style" in capsys.readouterr().out
    )
    for words, expected in (([], "got none, expected --pool math or style"), (["--pool=maths"], "got maths")):
        assert scale([str(folder), "--teachers=5", *words]) == 2
        assert f"--pool: {expected}" in capsys.readouterr().err
    assert read_wanted(folder) == Wanted(actors=4, pools={"math": 3, "style": 1})
    assert scale([str(folder), "--actors=2"]) == 0, "actors have no pools"


def test_a_pool_is_refused_in_a_run_without_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_folder(tmp_path)
    assert scale([str(folder), "--teachers=5", "--pool=math"]) == 2
    assert "--pool: got math, expected none: the run has no pools" in capsys.readouterr().err


def test_a_resumed_run_has_the_numbers_of_each_pool_that_it_had_and_not_the_address_of_its_node(tmp_path: Path) -> None:
    pools = {"math": {"count": 2}, "style": {}}
    asked = build(RunConfig, {"teachers": 3, "pools": pools, "cluster": {"teachers": {"each": 1}}})
    assert wanted_of(asked) == Wanted(pools={"math": 2, "style": 1})
    write_wanted(tmp_path, Wanted(pools={"math": 5, "style": 1}))
    replace, beside = msgspec.structs.replace, beside_the_learner(asked)
    buffer, weights = replace(beside.buffer, bind="tcp://10.0.0.7:0"), replace(beside.weights, host="10.0.0.7")
    recorded = replace(beside, buffer=buffer, weights=weights)
    write_config(recorded, tmp_path / "config.yaml")
    resumed = of_the_former(recorded, tmp_path)
    assert (resumed.teachers, resumed.pools["math"].count, resumed.pools["style"].count) == (6, 5, 1)
    assert (resumed.buffer, resumed.weights) == (asked.buffer, asked.weights)
    assert [group.label for group in host_groups(resumed)] == ["run", "teachers-math", "teachers-style"]
    assert of_the_former(asked, tmp_path) == asked, "numbers that are named now count"
    elsewhere = replace(recorded, weights=replace(weights, host="10.0.0.8"))
    with pytest.raises(ConfigError, match=r"weights\.host: got an address of a host"):
        host_groups(of_the_former(elsewhere, tmp_path))
