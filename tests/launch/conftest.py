"""Launchers in processes of their own, with fake workers; ended after the test whatever it did."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # launcher_process is shared by the tests of this folder

from launcher_process import Launcher, StartLauncher, WarmLaunchers

from tests.patience import PATIENCE_S


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--check` reads some rows of the built-in prompts, not all 8,448 each time."""
    monkeypatch.setattr("stillhouse.launch.checks.check_command.ROWS_READ", 300)


@pytest.fixture(scope="session")
def warm_launchers() -> Iterator[WarmLaunchers]:
    warm = WarmLaunchers()
    yield warm
    warm.close()


@pytest.fixture
def start_launcher(tmp_path: Path, warm_launchers: WarmLaunchers) -> Iterator[StartLauncher]:
    """`warm=False`, and with arguments of Popen: a program that is started, not forked."""
    started: list[Launcher] = []

    def start(
        behaviour: Mapping[str, str] | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
        preload: tuple[str, ...] = ("fake_roles",),
        run_dir: Path | None = None,
        warm: bool = True,
        **process: Any,
    ) -> Launcher:
        launcher = Launcher(
            run_dir or tmp_path / "run",
            behaviour or {},
            settings or {},
            preload,
            warm_launchers if warm and not process else None,
            tmp_path / f"said-{len(started)}",
            **process,
        )
        started.append(launcher)
        return launcher

    yield start
    for launcher in started:
        if launcher.process.poll() is None:
            launcher.process.kill()
        launcher.process.communicate(timeout=PATIENCE_S)
