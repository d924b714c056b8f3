"""Checkpoints of several ranks: each writes its rows, any number of them goes on from the file, and one that fails or
dies costs no checkpoint but the one that was being written."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.learner.ranks.checkpointed import CASES
from tests.learner.ranks.processes import run_ranks

TOLERANCE = 1e-9


def results_of(n_ranks: int, *arguments: str, dead: Collection[int] = (), replicas: int = 1) -> list[Any]:
    """What each rank prints. Each must end well, but for the `dead`, which print nothing."""
    ended = run_ranks(n_ranks, "tests.learner.ranks.checkpointed", *arguments, replicas=replicas)
    for rank, one in enumerate(ended):
        assert (rank in dead) == (one.returncode != 0), one.stderr[-3000:]
    return [None if rank in dead else json.loads(one.stdout.splitlines()[-1]) for rank, one in enumerate(ended)]


def layout(file: Path) -> dict[str, tuple[str, list[int]]]:
    with safe_open(file, framework="pt") as opened:
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
        return {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}


def is_whole(checkpoint: Path) -> bool:
    """By the manifest, without the code that wrote it."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    there = {path.name for path in checkpoint.iterdir()} - {"manifest.json"}
    return there == files.keys() and all(
        hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == entry["sha256"] for name, entry in files.items()
    )


@pytest.mark.parametrize(
    "meshes",
    [
        pytest.param([(1, 1), (2, 2), (4, 1)], marks=pytest.mark.slow),
        pytest.param([(2, 1), (4, 2)], marks=pytest.mark.slow),
    ],
    ids=lambda meshes: "{} ranks {} replicas".format(*meshes[-1]),
)
def test_any_number_of_ranks_goes_on_from_a_checkpoint_of_any_other(
    tmp_path: Path, meshes: list[tuple[int, int]]
) -> None:
    """Each mesh: ranks, replicas. Each goes on from what another one wrote; what was written has the same sums, so that
    each could go on from any."""
    sums: dict[str, dict[str, float]] = {}
    layouts: dict[str, Any] = {}
    folders = [tmp_path / f"{ranks}-{replicas}" for ranks, replicas in meshes]
    for folder, (ranks, replicas) in zip(folders, meshes, strict=True):
        assert results_of(ranks, "write", str(folder), replicas=replicas)[0] == dict.fromkeys(CASES, "step_000002")
        for case in CASES:
            checkpoint = folder / case / "step_000002"
            assert is_whole(checkpoint)
            found = {file.name: layout(file) for file in checkpoint.glob("*.safetensors")}
            assert layouts.setdefault(case, found) == found, "the files do not tell how many ranks there were"
    for of_another, (ranks, replicas) in zip([*folders[1:], folders[0]], meshes, strict=True):
        for of_rank in results_of(ranks, "read", str(of_another), replicas=replicas):
            assert of_rank.keys() == CASES.keys()
            for case, seen in of_rank.items():
                assert seen["wrong"] == [] and seen["steps"] == 3
                first = sums.setdefault(case, seen["sums"])
                assert first.keys() == seen["sums"].keys()
                for name, value in first.items():
                    assert math.isclose(value, seen["sums"][name], rel_tol=TOLERANCE, abs_tol=1e-30), (case, name)


def test_a_rank_that_cannot_write_or_dies_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    found, _ = results_of(2, "fail", str(tmp_path / "checkpoints"), dead=[1])
    whole, full, again, dead = found["outcomes"]
    assert (whole, again) == ("step_000001", "step_000003"), "a full disk that is emptied again is no reason to stop"
    assert full.startswith("OSError: [Errno 28] rank 1: ") and "No space left" in full
    assert dead == "RuntimeError: rank 1 has ended without a word"
    assert found["left"] == ["step_000001", "step_000003"] and found["latest"].endswith("step_000003")
    assert all(is_whole(tmp_path / "checkpoints" / name) for name in found["left"])
