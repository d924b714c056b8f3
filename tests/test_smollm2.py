"""examples/smollm2 without its model: the table of the comparison."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "smollm2"


@pytest.mark.parametrize("linked", [False, True])
def test_git_sees_nothing_of_the_model_whether_it_is_a_folder_or_a_link_to_one(tmp_path: Path, linked: bool) -> None:
    place = tmp_path / "clone" / "examples" / "smollm2"
    place.mkdir(parents=True)
    (tmp_path / "clone" / ".gitignore").write_text((FOLDER.parents[1] / ".gitignore").read_text())
    model = tmp_path / "elsewhere" if linked else place / "model"
    model.mkdir()
    (model / "model.safetensors").touch()
    if linked:
        (place / "model").symlink_to(model)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path / "clone", check=True)
    words = ["git", "status", "--porcelain", "--untracked-files=all"]
    seen = subprocess.run(words, cwd=tmp_path / "clone", check=True, capture_output=True, text=True).stdout
    assert seen == "?? .gitignore\n"


@pytest.fixture
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smollm2_compare", FOLDER / "compare.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_run(compare: ModuleType, folder: Path, name: str, seed: int, kl: tuple[float, float], **changes: Any) -> None:
    """A run as it would be there at its end: two evaluations of 10 and 5 tokens per answer, and a summary."""
    place = folder / name / f"seed-{seed}"
    place.mkdir(parents=True)
    rows = [
        {"kind": "eval", "step": step, "eval/reverse_kl": one, "eval/mean_length_greedy": length,
         "eval/mean_length_sampled": length}
        for step, one, length in ((0, kl[0], 10.0), (compare.STEPS, kl[1], 5.0))
    ]  # fmt: skip
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"kind": "step"}, *rows]))
    told = {"steps": compare.STEPS, "ok": True, "tokens": {"trained": 100 + seed, "balanced": True}} | changes
    (place / "summary.json").write_text(json.dumps(told))


def test_the_table_has_mean_and_range_of_the_runs_that_ended_well(compare: ModuleType, tmp_path: Path) -> None:
    write_run(compare, tmp_path, "opd", 0, (0.2, 0.1))
    write_run(compare, tmp_path, "opd", 1, (0.4, 0.3))
    write_run(compare, tmp_path, "opd", 2, (9.0, 9.0), ok=False, tokens={"trained": 1, "balanced": True})
    write_run(compare, tmp_path, "null", 0, (0.3, 9.0), steps=compare.STEPS - 1)  # was stopped
    assert compare.figures(tmp_path, "null", 0) is None
    write_run(compare, tmp_path, "two_turns", 0, (0.5, 0.25))
    lines = compare.table(tmp_path, ["opd", "null", "off_policy", "two_turns"], [0, 1, 2]).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0].split(",")[0] for row in cells] == [
        *("before training", "on-policy distillation", "before training", "on-policy"),
    ]
    assert cells[0][2:4] == ["0.300 (0.200 to 0.400)", "3.00 (2.00 to 4.00)"]
    assert cells[1][1:4] == ["0, 1", "0.200 (0.100 to 0.300)", "1.00 (0.50 to 1.50)"]
    assert cells[1][4:] == ["5.0 (5.0 to 5.0)", "5.0 (5.0 to 5.0)", "100"]
    assert (cells[2][2], cells[3][2]) == ("0.500", "0.250")


def test_runs_of_one_row_make_the_same_steps_and_differ_in_what_it_says(compare: ModuleType, tmp_path: Path) -> None:
    for name, method in compare.METHODS.items():
        *written, (first, *rest) = compare.commands(compare.place_of(tmp_path, name, 3), method, 3)
        assert first == ("-m" if method.off_policy else "launch/cluster.py")
        assert len(written) == method.off_policy
        for words in (*([written[0]] if written else []), rest):
            assert set(compare.SHAPE) <= set(words) and "--seed=3" in words
        own = [word.split("=")[0] for word in rest if word not in compare.SHAPE]
        assert set(own) - {"replay", "--run-dir", "--seed"} - {w.split("=")[0] for w in method.arguments} <= {
            str(tmp_path.resolve() / name / "seed-3.record")
        }
