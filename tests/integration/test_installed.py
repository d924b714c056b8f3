"""The wheel in an environment of its own, used from a folder that has packages of the same names as our folders."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

import pytest

from tests.patience import RUN_PATIENCE_S

ROOT: Final = Path(__file__).parents[2]
OWN: Final = ("models", "buffer", "launch", "protocol", "actors", "engines", "weights", "replay", "tracing")
MODELS: Final = "WHOSE = 'the user'\n"
MY_GAME: Final = """\
from models import WHOSE
from stillhouse.actors.envs.single_turn import SingleTurn


class MyGame(SingleTurn):
    def __init__(self, tokenizer, **options):
        assert WHOSE == "the user"
        super().__init__(tokenizer, **options)
"""
NOTEBOOK: Final = """\
from stillhouse import Run
from models import WHOSE

run = Run({"steps": 1, "actors": 1, "buffer": {"batch_rollouts": 8}, "learner": {"eval_every": 0}}, run_dir="noted")
run.start().wait()
assert WHOSE == "the user"
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment with the wheel. What the wheel needs is seen by path, so that nothing is downloaded;
    the editable installation there is not, as only a .pth file makes it."""
    place = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(place), str(ROOT)], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "venv")], check=True)
    python = place / "venv" / "bin" / "python"
    (wheel,) = place.glob("*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(place / "venv")}))
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return python


@pytest.fixture
def beside_own_packages(tmp_path: Path) -> Path:
    for name in OWN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(MODELS, encoding="utf-8")
    (tmp_path / "my_game.py").write_text(MY_GAME, encoding="utf-8")
    return tmp_path


def test_a_wheel_runs_beside_packages_of_the_same_names_as_our_folders(
    installed: Path, beside_own_packages: Path
) -> None:
    """The demo with an environment that imports the user's own `models`, then replay, write and a notebook's Run."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def typed(program: str, *words: str) -> None:
        done = subprocess.run(
            [installed.parent / program, *words], cwd=beside_own_packages, env=environment, capture_output=True,
            text=True, timeout=RUN_PATIENCE_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    typed("python", "-c", "import stillhouse; assert 'site-packages' in stillhouse.__file__, stillhouse.__file__")
    typed(
        *("stillhouse", "--config", "examples/demo.toml", "--steps=3", "--run-dir=demo", "--learner.eval_every=0"),
        *("--learner.tasks.env=my_game:MyGame", "--buffer.batch_rollouts=16"),
    )
    summary = json.loads((beside_own_packages / "demo" / "summary.json").read_text(encoding="utf-8"))
    assert summary["ok"] and summary["steps"] == 3 and summary["tokens"]["balanced"], summary
    typed("stillhouse", "replay", "demo/batches.record", "--run-dir=again", "--learner.eval_every=0")
    typed("stillhouse", "write", "teacher.record", "--steps=1", "--actors=1", "--run-dir=written")
    typed("stillhouse", "--config", "examples/recipes/lora.toml", "--check")
    typed("python", "-c", NOTEBOOK)
