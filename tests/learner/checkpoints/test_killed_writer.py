"""Whenever the process that puts a checkpoint into a store is killed, a reader that knows nothing of its code (json and
hashlib alone) finds every checkpoint that owner.json names whole."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.learner.checkpoints.test_stored import FILES, checkpoint
from tests.patience import PATIENCE_S
from tests.store_launches import owned

OLD, NEW = "checkpoints/step_000010_epoch_0", "checkpoints/step_000020_epoch_0"


def named_and_whole(store: Path) -> list[str]:
    """The names in owner.json, each of whose files has the size and the sha256 that its manifest says."""
    names: list[str] = json.loads((store / "owner.json").read_text())["checkpoints"]
    for name in names:
        manifest = json.loads((store / name / "manifest.json").read_text())
        for file, entry in manifest["files"].items():
            content = (store / name / file).read_bytes()
            assert len(content) == entry["bytes"], f"{store.name}: {name}/{file}"
            assert hashlib.sha256(content).hexdigest() == entry["sha256"], f"{store.name}: {name}/{file}"
        assert len(manifest["files"]) == len(FILES)
    return names


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all the killed writers left."""
    folder = tmp_path_factory.mktemp("killed")
    owned(f"file://{folder}/store").add(checkpoint(folder / "here", 10), keep=1)
    checkpoint(folder / "here", 20)
    program = [sys.executable, "-m", "tests.learner.checkpoints.killed_writer", str(folder)]
    subprocess.run(program, check=True, timeout=PATIENCE_S, cwd=Path(__file__).parents[3], env=dict(os.environ))
    return folder


def test_killed_before_any_change_of_the_store_it_leaves_no_half_of_a_checkpoint_with_a_name(killed: Path) -> None:
    assert named_and_whole(killed / "store") == [OLD] and named_and_whole(killed / "done") == [NEW]
    assert not [path for path in (killed / "done" / NEW).glob("rows-*/*") if path.is_file()]
    left = sorted(killed.glob("store-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    names = [named_and_whole(store) for store in left]
    n_old = names.count([OLD])
    assert names == [[OLD]] * n_old + [[NEW]] * (len(names) - n_old), "first the one, then the other"
    assert n_old > len(FILES) and len(names) - n_old >= len(FILES), "kills while files come, and while old ones go"
    assert (left[n_old - 1] / NEW / "manifest.json").is_file(), "all was there, but for the name"


def test_killed_in_the_middle_of_a_file_it_leaves_the_one_before(killed: Path) -> None:
    cuts = sorted(killed.glob("cut-*"))
    assert [named_and_whole(store) for store in cuts] == [[OLD]] * len(cuts) and cuts
    sizes = [{path.stat().st_size for path in store.rglob("*.safetensors")} for store in cuts]
    assert any(25_000 in of_one for of_one in sizes), "half of a file is there"


def test_who_comes_next_removes_what_was_left(killed: Path) -> None:
    for n, store in enumerate([*killed.glob("store-*"), *killed.glob("cut-*")]):
        epoch = 1
        owned(f"file://{store}", f"next-{n}").add(checkpoint(killed / f"next-{n}", 30, epoch), keep=1)
        assert named_and_whole(store) == ["checkpoints/step_000030_epoch_1"]
        files = [path for path in (store / "checkpoints").rglob("*") if path.is_file()]
        assert len(files) == len(FILES) + 1, f"{store.name}: nothing else is left"
