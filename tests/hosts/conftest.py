"""Hosts for tests, and a run with each role on a host of its own: `python -m stillhouse.launch.workers.roles` there."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from stillhouse.launch.checks import preflight
from stillhouse.launch.config.command_line import parse_arguments, resolve_config
from stillhouse.launch.config.files import write_config
from stillhouse.launch.run import own_workers
from stillhouse.launch.workers.roles import ENTRIES
from stillhouse.launch.workers.start_role import StartRole
from stillhouse.protocol.context import WorkerRole
from stillhouse.protocol.keys import KEYS, make_keys
from stillhouse.protocol.messages import Snapshot
from tests.hosts.network import Network, NotPermitted, environment, hosts
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, Limit

BUFFER_PORT: Final = 5555


@contextlib.contextmanager
def hosts_or_skip(*names: str, delay_ms: float, loss: float = 0.0) -> Generator[Network]:
    """The network while it is entered; skips the test where none can be made."""
    with contextlib.ExitStack() as stack:
        try:
            network = stack.enter_context(hosts(names, delay_ms=delay_ms, loss=loss))
        except NotPermitted as reason:
            pytest.skip(f"no network namespaces here: {reason}")
        yield network


class HostRun:
    """All roles of a run, each on the host of its name; they share the run folder, as hosts share a file system."""

    def __init__(self, network: Network, run_dir: Path, arguments: Sequence[str]) -> None:
        self.run_dir = run_dir
        (run_dir / "logs").mkdir(parents=True)
        self._network = network
        self._run_id = f"hosts-{secrets.token_hex(4)}"
        self._address = f"tcp://{network.address('buffer')}:{BUFFER_PORT}"
        addresses = (
            f"--buffer.bind={self._address}",
            f"--weights.host={network.address('learner')}",
        )
        checked = preflight.check(resolve_config(parse_arguments([*arguments, *addresses])))
        write_config(checked.config, run_dir / "config.yaml")
        make_keys(run_dir / KEYS, own_workers(checked.config))  # seen by all hosts
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, host: str, role: WorkerRole, index: int = 0, *, resume: bool = False) -> None:
        """`resume`: as the launcher says to a worker that it starts again; not to the buffer, which has its journal."""
        start = StartRole(
            entry=ENTRIES[role],
            role=role,
            index=index,
            name=f"{role}-{index}",
            incarnation=secrets.token_hex(8),
            run_id=self._run_id,
            buffer_address=self._address,
            resume=resume,
        )
        command = [sys.executable, "-P", "-m", "stillhouse.launch.workers.roles", str(self.run_dir), str(os.getpid())]
        self.processes[start.name] = subprocess.Popen(
            self._network.command(host, command),
            env=environment(),
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        stdin = self.processes[start.name].stdin
        assert stdin is not None
        stdin.write(msgspec.json.encode(start) + b"\n")

    def kill(self, name: str) -> None:
        """SIGKILL; `start` starts it again."""
        process = self.processes.pop(name)
        process.kill()
        self._bury(process)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        limit = Limit(RUN_PATIENCE_S)
        while not condition():
            failed = {name: code for name, p in self.processes.items() if (code := p.poll()) not in (None, 0)}
            late = limit.passed
            assert not failed and not late, f"{what} was not seen in {limit}; failed: {failed}\n{self.tails()}"
            time.sleep(0.05)

    def steps(self) -> list[dict[str, Any]]:
        file = self.run_dir / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [row for line in lines if line.endswith("}") and (row := json.loads(line))["kind"] == "step"]

    def final(self) -> Snapshot:
        return msgspec.json.decode((self.run_dir / "ledger.json").read_bytes(), type=Snapshot)

    def log(self, name: str) -> str:
        return (self.run_dir / "logs" / f"{name}.log").read_text(errors="replace")

    def tails(self) -> str:
        return "\n".join(f"--- {log.stem}\n" + log.read_text()[-1500:] for log in self.run_dir.glob("logs/*.log"))

    def close(self) -> None:
        """Nobody is left afterwards."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self._bury(process)

    @staticmethod
    def _bury(process: subprocess.Popen[bytes]) -> None:
        process.wait(PATIENCE_S)
        assert process.stdin is not None
        process.stdin.close()
