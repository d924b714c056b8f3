"""A real run of the built-in task, started by launch/cluster.py, with the proxy between its workers and its buffer.

How the workers come to the proxy: the launcher hands them the address that it reads in RUN/buffer.json. The buffer is
given a port that we choose (`--buffer.bind`). The launcher is stopped while the buffer writes its
buffer.json, and reads one that names the proxy when it goes on; it is looked whether it did. The product knows nothing
of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from stillhouse.buffer.server import BufferAddress
from stillhouse.protocol.addresses import free_port
from stillhouse.protocol.atomic_file import write_atomic
from tests.patience import PATIENCE_S
from tests.sim.chaos.commands import ROOT, Proxy, running_proxy
from tests.sim.chaos.traps import Traps

MARK: Final = "STILLHOUSE_CHAOS"
"""Environment variable that everything started here inherits; nothing is judged by its name."""
TASK: Final = (
    "--learner.lr=1e-4",
    "--buffer.batch_rollouts=16",
    "--actor.segment_tokens=16",
    "--learner.tasks.group_size=4",
    "--learner.checkpoint_every=4",
    "--learner.tasks.eval_greedy=64",
    "--learner.tasks.eval_sampled=256",
    "--launch.status=plain",
    "--launch.status_every_s=5",
)
PATIENT: Final = (
    "--buffer.heartbeat_s=0.5",
    "--buffer.peer_timeout_s=4",
    "--buffer.lease_s=8",
    "--buffer.ticket_timeout_s=60",
    "--buffer.max_attempts=50",
    "--buffer.max_score_attempts=50",
    "--weights.join_timeout_s=5",
    "--weights.broadcast_timeout_s=5",
    "--weights.answer_grace_s=1",
    "--weights.join_window_s=0.5",
    "--weights.rejoin_delay_s=0.1",
    "--launch.max_restarts=100000",
    "--launch.restart_backoff_s=0.03",
    "--launch.silent_kill_s=8",
    "--launch.ready_timeout_s=60",
)
"""Deadlines in seconds where a real run has tens of them, and no end to restarts: a fault every other second is no
reason to give up."""
READY: Final = "workers are ready after"
STARTS: Final = " starts, pid "
LAUNCHER_HERE: Final = "launcher launcher is here"
LAUNCHES: Final = 5
LOOPBACK: Final = "127.0.0.1"
READY_S: Final = 2 * PATIENCE_S
GONE_S: Final = PATIENCE_S


class Run:
    """A launcher and its run folder, under faults or not."""

    def __init__(self, run_dir: Path, arguments: Sequence[str], mark: str) -> None:
        self.run_dir = run_dir
        self.mark = mark
        self.folders = {mark: run_dir}
        """Where the processes with that mark have their logs; joins add theirs."""
        self._steps: list[dict[str, Any]] = []
        self._read_bytes = 0
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        self._output = run_dir.with_name(f"{run_dir.name}.out")
        self._arguments = [*arguments, f"--learner.record={self.record}"]
        self.traps = Traps(run_dir.with_name(f"{run_dir.name}.traps"))
        self.process = self._launch()

    @property
    def record(self) -> Path:
        """File with every batch, from which the run is audited."""
        return self.run_dir.with_name(f"{self.run_dir.name}.record")

    def _launch(self, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(ROOT / "launch" / "cluster.py"), "--run-dir", str(self.run_dir)]
        with self._output.open("ab") as output:
            return subprocess.Popen(
                [*command, *self._arguments, *more],
                cwd=self.run_dir.parent,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark, **self.traps.environment(str(ROOT))},
            )

    def relaunch(self, proxy: Proxy) -> None:
        """SIGKILL the launcher, whose workers die with it, and go on with the run by --resume, behind the proxy."""
        former, ready = self.run_id, self.text.count(READY)
        self._resume()
        self.ready_behind(proxy, former, ready)

    def interrupt(self, proxy: Proxy) -> int:
        """Ctrl-C, and when the launcher has ended in order, --resume as above. Returns its exit code: that of a run
        that was over by then is 0, and it is left as it is."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(PATIENCE_S)
        if code:
            self.relaunch(proxy)
        return code

    def ready_behind(self, proxy: Proxy, former_run_id: str = "", ready_before: int = 0) -> None:
        """Wait until all workers are ready, with their links by way of the proxy. A launcher that was faster than we at
        reading the buffer's own address is killed before it has started the others, and the run launched again."""
        for _ in range(LAUNCHES):
            if self._comes_by(proxy, former_run_id):
                self.until(lambda: self.text.count(READY) > ready_before, "all workers to be ready", READY_S)
                return
            former_run_id = self.run_id
            self._resume()
        raise AssertionError(f"of {LAUNCHES} launches none went by way of the proxy; the launcher said:\n{self.text}")

    def _resume(self) -> None:
        self.process.kill()
        self.process.wait(GONE_S)
        deadline_s = time.monotonic() + GONE_S
        while (left := marked(self.mark)) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert not left, f"{left} outlived their launcher by {GONE_S} s"
        self.process = self._launch("--resume")

    def _comes_by(self, proxy: Proxy, former_run_id: str) -> bool:
        """The launcher stands still from when the buffer's process is there until buffer.json names the proxy; then the
        buffer's own words are put back, for it listens where they say when it is started again."""
        self.until(lambda: self.run_id not in ("", former_run_id), "run.json", READY_S)
        self.until(lambda: self.pid("buffer-0") is not None, "the buffer's process", READY_S)
        listing = self.run_dir / "buffer.json"
        self.process.send_signal(signal.SIGSTOP)
        try:
            self.until(lambda: self._listed_run_id == self.run_id, "the buffer's own buffer.json", READY_S)
            own = listing.read_bytes()
            write_atomic(listing, msgspec.json.encode(BufferAddress(proxy.address, self.process.pid, self.run_id)))
        finally:
            self.process.send_signal(signal.SIGCONT)
        buffer_log = self.run_dir / "logs" / "buffer-0.log"
        self.until(
            lambda: LAUNCHER_HERE in buffer_log.read_text(errors="replace").rpartition(STARTS)[2],
            "the launcher at the buffer",
            READY_S,
        )
        write_atomic(listing, own)
        return bool(proxy.look().connections.get("launcher"))

    @property
    def run_id(self) -> str:
        """Id of the current launch; empty before it has one."""
        record = self.run_dir / "run.json"
        return json.loads(record.read_bytes())["run_id"] if record.exists() else ""

    @property
    def _listed_run_id(self) -> str:
        """The launch whose buffer.json is there; empty without one."""
        listing = self.run_dir / "buffer.json"
        return json.loads(listing.read_bytes())["run_id"] if listing.exists() else ""

    @property
    def step(self) -> int:
        """The newest."""
        rows = self.steps()
        return int(rows[-1]["step"]) if rows else 0

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def text(self) -> str:
        return self._output.read_text()

    def until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if not self.running or time.monotonic() > deadline_s:
                raise AssertionError(f"{what} was not seen in {timeout_s:.0f} s; the launcher said:\n{self.text}")
            time.sleep(0.02)

    def steps(self) -> list[dict[str, Any]]:
        """Step lines of metrics.jsonl so far, those of abandoned branches included."""
        file = self.run_dir / "metrics.jsonl"
        if file.exists():
            with file.open("rb") as lines:
                lines.seek(self._read_bytes)
                for line in lines:
                    if not line.endswith(b"\n"):  # being written
                        break
                    self._read_bytes += len(line)
                    row = json.loads(line)
                    self._steps += [row] if row["kind"] == "step" else []
        return self._steps

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def logs(self, name: str = "*") -> list[Path]:
        """Of the workers on all hosts."""
        return sorted(log for folder in self.folders.values() for log in (folder / "logs").glob(f"{name}.log"))

    def names(self, role: str) -> list[str]:
        return [log.stem for log in self.logs(f"{role}-*")]

    def pid(self, name: str) -> int | None:
        """Process id of the worker's current process, from its log; None if this run has none."""
        lines = [line for log in self.logs(name) for line in log.read_text(errors="replace").splitlines()]
        started = [line for line in lines if STARTS in line]
        if not started:
            return None
        pid = int(started[-1].rsplit(" ", 1)[1])
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) in self.folders:
                return pid
        return None

    def signal_worker(self, name: str, signum: signal.Signals) -> bool:
        """Signal the worker's process; False when it has none just now."""
        pid = self.pid(name)
        return pid is not None and self.signal_pid(name, pid, signum)

    def signal_pid(self, name: str, pid: int, signum: signal.Signals) -> bool:
        """The same, if this is still its process."""
        if self.pid(name) != pid:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
            return True
        return False

    def end(self) -> None:
        """Whatever still runs of it ends."""
        if self.running:
            self.process.kill()
        self.process.wait(GONE_S)
        for process in marked(self.mark):
            with contextlib.suppress(psutil.Error):
                process.kill()


def marked(*marks: str) -> list[psutil.Process]:
    """Living processes that were started with one of these marks."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) in marks:
                found.append(process)
    return found


@contextmanager
def proxied_run(
    run_dir: Path, arguments: Sequence[str], mark: str, listen_host: str = LOOPBACK
) -> Generator[tuple[Run, Proxy]]:
    """Start the run and its proxy; `run.ready_behind(proxy)` waits for its workers. Both are gone afterwards. The
    proxy's tap is RUN.tap beside the run folder. `listen_host`: where workers reach the proxy and the learner; other
    hosts may, and what passes the proxy is not encrypted, because it must read it."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    port = free_port()
    tap, environment = run_dir.with_name(f"{run_dir.name}.tap"), {MARK: f"{mark}-proxy"}
    with running_proxy(port, listen_host=listen_host, tap=tap, environment=environment) as proxy:
        where = [f"--buffer.bind=tcp://{LOOPBACK}:{port}"]
        if listen_host != LOOPBACK:
            where += [f"--buffer.advertise={proxy.address}", "--buffer.encrypt=off"]
            where += ["--buffer.allow_plain_network=true", f"--weights.host={listen_host}"]
        run = Run(run_dir, [*arguments, *where], mark)
        try:
            yield run, proxy
        finally:
            run.end()
