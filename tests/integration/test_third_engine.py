"""An engine that nothing of Stillhouse knows, installed as a package, writes for a whole run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import Launched
from tests.integration.scripted_engine import ECHOES

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
@pytest.mark.parametrize("name", ["scripted", "a_scripted_engine:PROVIDER"])
def test_a_run_with_a_third_engine_ends_in_order(launch: Callable[..., Launched], name: str) -> None:
    run = launch("--actors=2", "--teachers=1", "--steps=4", "--learner.eval_every=0", f"--actor.engine={name}")
    assert run.wait() == 0, run.text()
    summary = run.summary()
    assert summary["ok"] and summary["steps"] == 4 and summary["tokens"]["balanced"]
    rows = run.steps()
    assert all(row["rollouts/length_mean"] == row["rollouts/length_max"] == ECHOES + 1 for row in rows), rows
    assert rows[-1]["train/tokens"] > 0 and rows[-1]["weights/members"] == 2, "its actors take weights as members"
    run.expect_clean_audit()
