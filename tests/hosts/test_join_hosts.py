"""Joining from a machine that has nothing but what `cluster.py export` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from launch.join.export import export
from tests.hosts.network import NotPermitted, hosts
from tests.integration.conftest import Launched
from tests.integration.joined import Joined
from tests.patience import PATIENCE_S

PORT: Final = 5555


def test_an_exported_folder_is_all_that_another_host_needs(tmp_path: Path) -> None:
    try:
        with hosts(("home", "guest"), delay_ms=2.0, loss=0.0) as network:
            address = network.address("home")
            settings = (
                f"--buffer.bind=tcp://{address}:{PORT}",
                f"--weights.host={address}",
                *("--actors=0", "--teachers=0", "--steps=4", "--learner.eval_every=0"),
            )
            run = Launched(tmp_path / "run", settings, network.command("home", []))
            joined = None
            try:
                run.until((tmp_path / "run" / "buffer.json").exists, "a buffer that listens")
                export(tmp_path / "run", tmp_path / "exported", ("actor", "teacher"))
                arguments = ("--actors=2", "--teachers=1")
                guest = network.command("guest", [])
                joined = Joined(tmp_path / "exported", "guest", tmp_path / "guest", arguments, guest)
                assert run.wait() == 0, run.text() + joined.text()
                assert joined.process.wait(PATIENCE_S) == 0, joined.text()
                workers = run.summary()["workers"]
                assert all(workers[f"{name}-guest-0"]["tokens"] for name in ("actor", "teacher")), workers
                assert run.summary()["tokens"]["balanced"]
            finally:
                run.kill()
                if joined is not None:
                    joined.end()
    except NotPermitted as reason:
        pytest.skip(f"no network namespaces here: {reason}")
