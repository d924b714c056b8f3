"""An engine that nothing of Stillhouse knows, installed as a package, writes for a whole run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Launched

OURS = Path(__file__).with_name("scripted_engine.py")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The engine's module and its dist-info, as pip would lay them down."""
    site = tmp_path / "site"
    info = site / "scripted_engine-1.0.dist-info"
    info.mkdir(parents=True)
    shutil.copy(OURS, site / "a_scripted_engine.py")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stillhouse.engines]\nscripted = a_scripted_engine:PROVIDER\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH")))))
    return site


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "options", "echoes"),
    [("scripted", ("--actor.scripted.echoes=5",), 5), ("a_scripted_engine:PROVIDER", (), 3)],
)
def test_a_run_with_a_third_engine_ends_in_order(
    launch: Callable[..., Launched], name: str, options: tuple[str, ...], echoes: int
) -> None:
    """An option that is set by its key reaches the engine in the actors' processes."""
    run = launch(
        *("--actors=2", "--teachers=1", "--steps=4", "--learner.eval_every=0", f"--actor.engine={name}", *options)
    )
    assert run.wait() == 0, run.text()
    summary = run.summary()
    assert summary["ok"] and summary["steps"] == 4 and summary["tokens"]["balanced"]
    rows = run.steps()
    assert all(row["rollouts/length_mean"] == row["rollouts/length_max"] == echoes + 1 for row in rows), rows
    assert rows[-1]["train/tokens"] > 0 and rows[-1]["weights/members"] == 2, "its actors take weights as members"
    run.expect_clean_audit()


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            "--actor.scripted.echos=5",
            "actor.scripted.echos: scripted does not read it, expected one of its options",
        ),
        ("--actor.scripted.echoes=0", "actor.scripted.echoes: got '0', expected int >= 1 and <= 100"),
        ("--teacher.scripted.echoes=5", "teacher.scripted.echoes: unknown key"),
    ],
)
def test_a_wrong_option_of_a_third_engine_is_refused_by_name(
    launch: Callable[..., Launched], option: str, said: str
) -> None:
    run = launch("--actors=1", "--teachers=1", "--steps=1", "--actor.engine=scripted", option)
    assert run.wait() == 2
    assert said in run.text(), run.text()
