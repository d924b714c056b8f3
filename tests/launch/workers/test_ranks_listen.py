"""On which addresses a learner of several ranks on one machine can be reached."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_ranks_on_one_machine_and_their_launcher_listen_on_loopback_only(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.launch.workers.rank_that_looks", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3 * PATIENCE_S)
    assert ended.returncode == 0, ended.stderr[-3000:]

    lines = [line.split() for rank in range(2) for line in (tmp_path / f"{rank}.txt").read_text().splitlines()]
    of_launcher = [address for who, address in lines if who == "launcher"]
    assert of_launcher == ["127.0.0.1"], "one store, in which the launcher and the ranks meet"
    assert {address for who, address in lines if who == "rank"} == {"127.0.0.1"}, "gloo's; both ranks have some"
