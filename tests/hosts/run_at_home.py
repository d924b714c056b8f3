"""A run on the host `home`, and joins on other hosts, as their users start them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from tests.hosts.network import ROOT, Network
from tests.integration.conftest import Launched
from tests.integration.joined import Joined
from tests.patience import PATIENCE_S

HOME: Final = "home"
PORT: Final = 5555


class RunAtHome:
    """Started. All that still runs ends with the stack."""

    def __init__(self, network: Network, folder: Path, stack: ExitStack, *settings: str, address: str = "") -> None:
        """`folder`: for the run's folder and the others'. `address`: of home, if not that of the network."""
        self._network, self._folder, self._stack = network, folder, stack
        address = address or network.address(HOME)
        self._settings = (*settings, f"--buffer.bind=tcp://{address}:{PORT}", f"--weights.host={address}")
        self.run = self._launch()

    def resume(self, *settings: str) -> None:
        """Go on with the run, which has ended in one way or another, with some settings changed."""
        self.run = self._launch(*settings, "--resume")

    def _launch(self, *more: str) -> Launched:
        run = Launched(self._folder / "run", (*self._settings, *more), self._network.command(HOME, []))
        self._stack.callback(run.kill)
        return run

    def export(self) -> Path:
        """What other hosts need, once the buffer listens."""
        self.run.until((self.run.run_dir / "buffer.json").exists, "a buffer that listens")
        exported = self._folder / "exported"
        invite = [sys.executable, str(ROOT / "launch" / "cluster.py"), "invite", str(self.run.run_dir), str(exported)]
        subprocess.run(self._network.command(HOME, invite), check=True, timeout=PATIENCE_S, capture_output=True)
        return exported

    def join(self, host: str, *arguments: str, to: Path | None = None, before: Sequence[str] = ()) -> Joined:
        """`to`: what the host knows of the run; its folder if not given. `before`: put before the command, in place of
        what only runs it on that host."""
        command = before or self._network.command(host, [])
        joined = Joined(to or self.run.run_dir, host, self._folder / host, arguments, command)
        self._stack.callback(joined.end)
        return joined

    def expect_good_end(self, *joins: Joined) -> None:
        """Of the run, whose tokens balance, and of these."""
        texts = [joined.text() for joined in joins]
        assert self.run.wait() == 0, "\n".join([self.run.text(), *texts])
        for joined in joins:
            assert joined.process.wait(PATIENCE_S) == 0, joined.text()
        assert self.run.summary()["tokens"]["balanced"]
