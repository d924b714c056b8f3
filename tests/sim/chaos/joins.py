"""A `join` on another host of a run under faults, started again whenever it ends before the run (docs/hosts.md)."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Final

import psutil

from tests.hosts.network import Network
from tests.integration.joined import Joined
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, Limit
from tests.sim.chaos.commands import ROOT
from tests.sim.chaos.harness import MARK, Run, marked

AGAIN_S: Final = 1.0
BROKE_OFF, NOT_NOW = 1, 75
AGAIN: Final = frozenset({BROKE_OFF, NOT_NOW, -signal.SIGKILL, 128 + signal.SIGINT})
"""Exit codes after which it is started again: two as the table in docs/hosts.md says, two because we ended it."""
OWN_NAME: Final = 'hostname "$0"; exec "$@"'


class Guest:
    """The host and its join. A thread watches it until `close`, or until it ends with another code than AGAIN."""

    def __init__(self, run: Run, network: Network, host: str, arguments: Sequence[str]) -> None:
        self.host = host
        self.exit_codes = Counter[int]()
        self._mark = f"{run.mark}-{host}"
        folder = run.run_dir.with_name(f"{run.run_dir.name}.{host}")
        self._output = folder.with_name(f"{folder.name}.out")
        self._start = partial(
            Joined,
            run.run_dir,
            host,
            folder,
            arguments,
            network.command(host, ["unshare", "--uts", "sh", "-c", OWN_NAME, host]),
            environment={MARK: self._mark, **run.traps.environment(str(ROOT))},
        )
        self._over = threading.Event()
        self._run = run
        self._joined: Joined | None = None
        self._thread = threading.Thread(target=self._keep, name=f"join on {host}", daemon=True)
        self._thread.start()

    def until_there(self) -> None:
        """In the run for the first time."""
        limit = Limit(RUN_PATIENCE_S)
        while "have joined after" not in self._text():
            assert self._thread.is_alive() and not limit.passed, f"{self.host} did not join:\n{self._text()}"
            self._over.wait(0.1)

    def signal(self, signum: signal.Signals) -> bool:
        """To the join; False when there is none just now."""
        process = self._joined.process if self._joined is not None else None
        if process is None or process.poll() is not None:
            return False
        process.send_signal(signum)
        return True

    def complaints(self, *, well: bool) -> list[str]:
        """When the run is over; `well`: in good order, and then so must be the join."""
        if well:
            self._thread.join(PATIENCE_S)
        strange = [code for code in self.exit_codes if code and code not in AGAIN]
        found = [f"the join on {self.host} ended with exit code {code}:\n{self._text()[-1500:]}" for code in strange]
        if well and not strange and not self.exit_codes[0]:
            found.append(f"the join on {self.host} did not end with its run:\n{self._text()[-1500:]}")
        return found

    def close(self) -> None:
        """Nothing of it is left."""
        self._over.set()
        if self._joined is not None:
            self._joined.end()
        self._thread.join(PATIENCE_S)
        for process in marked(self._mark):
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _text(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def _keep(self) -> None:
        while not self._run.run_id and not self._over.wait(AGAIN_S):
            pass
        while not self._over.is_set():
            self._joined = self._start()
            self._run.folders[self._mark] = self._joined.folder
            code = self._joined.process.wait()
            self.exit_codes[code] += 1
            if code not in AGAIN:
                return
            self._over.wait(AGAIN_S)
