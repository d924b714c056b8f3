"""A `stillhouse join` in a process of its own, and somebody who looks at the run as it does."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from stillhouse.launch.buffer_link import BufferLink
from stillhouse.launch.join.target import find_target
from stillhouse.launch.runfolder import read_record
from stillhouse.protocol.keys import run_client_keys
from stillhouse.protocol.messages import PeerView
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, Limit

if TYPE_CHECKING:
    from tests.integration.conftest import Launched  # which imports this

ROOT = Path(__file__).parents[2]
HOLDS: Final = "--launch.silent_kill_s=600"
"""For a run whose learner is held for longer than the default."""


@contextlib.contextmanager
def held(run: Launched) -> Generator[None]:
    """The run makes no step meanwhile, and before long writes nothing: others load their models undisturbed."""
    (learner,) = run.workers("learner")
    learner.suspend()
    try:
        yield
    finally:
        learner.resume()


class Joined:
    """A joining launcher that runs; its workers are called `...-<prefix>-<n>`."""

    def __init__(
        self,
        run: str | Path,
        prefix: str,
        folder: Path,
        arguments: Sequence[str],
        command: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`command`: put before it, to run it on another host. `folder`: for its logs; what it says goes beside it."""
        self.folder, self.prefix = folder, prefix
        self.output = folder.with_name(f"{folder.name}.out")
        words = ["join", str(run), f"--name-prefix={prefix}", "--launch.status_every_s=1"]
        if any(word.startswith("--learner-ranks") for word in arguments):
            self.folder = Path(run) / "joined" / prefix  # no other is possible then
        else:
            words.append(f"--dir={folder}")
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*command, sys.executable, str(ROOT / "launch" / "cluster.py"), *words, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            )

    def text(self) -> str:
        return self.output.read_text()

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float = RUN_PATIENCE_S) -> None:
        limit = Limit(timeout_s)
        while not condition():
            if self.process.poll() is not None or limit.passed:
                logs = "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in self.folder.glob("logs/*.log"))
                raise AssertionError(f"{what} was not seen; the joiner said:\n{self.text()}\n{logs}")
            time.sleep(0.05)

    def until_there(self, times: int = 1, timeout_s: float = RUN_PATIENCE_S) -> None:
        sign = "have joined after"
        self.until(lambda: self.text().count(sign) >= times, f"{self.prefix} in the run", timeout_s)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def end(self) -> None:
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)  # a shell that starts it again has one
            self.process.kill()
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait(PATIENCE_S)


Join = Callable[..., Joined]
"""`join(run, prefix, *arguments)`, the fixture."""


class Onlooker:
    """Asks the buffer who is there."""

    def __init__(self, run_dir: Path) -> None:
        record = read_record(run_dir)
        assert record is not None
        address = find_target(str(run_dir)).address
        keys = run_client_keys(run_dir, "launcher", "joiner")
        self._link = BufferLink(address, record.run_id, secrets.token_hex(4), keys, name="onlooker")

    def peers(self, part: str) -> dict[str, PeerView]:
        """Those with this in their name, as of now."""
        self._link.ask_anew(time.monotonic())
        limit = Limit()
        while not self._link.answered and not limit.passed:
            self._link.take()
            time.sleep(0.01)
        assert self._link.snapshot is not None
        return {peer.name: peer for peer in self._link.snapshot.peers if part in peer.name and peer.role != "launcher"}

    def all_worked(self, part: str, n: int) -> bool:
        """`n` with this in their name are there, and each has done something."""
        peers = self.peers(part).values()
        return len(peers) == n and all(peer.alive and peer.tokens_total for peer in peers)

    def close(self) -> None:
        self._link.close()
