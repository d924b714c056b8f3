"""The processes of bench/scale.py: started, heard and ended, with what they cost by /proc (Linux only)."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec

import stillhouse.buffer.server
from bench.scale_settings import Scenario
from stillhouse.buffer.server import BufferAddress, shard_folder
from stillhouse.protocol.messages import Snapshot
from stillhouse.protocol.shards.division import shard_address

RUN: Final = "scale"
VOCABULARY: Final = "ab" * 32
START_S: Final = 60.0
END_S: Final = 30.0
IDLE_S: Final = 5.0
"""Time in which nothing happens but heartbeats and ticks, to measure what these cost."""

Shared: TypeAlias = "SynchronizedArray[float]"
"""[0] real time at which simulated time begins (monotonic; 0: not yet), [1] newest published step, [2] from when on it
is sampled with (simulated), [3] 1 when the learner has ended."""


class Processes:
    """Starts processes that report over pipes, and ends those that are left."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self.shared: Shared = self._context.Array("d", 4)
        self._all: list[Any] = []

    def start(self, target: Any, *args: Any) -> Connection:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=target, args=(*args, theirs), daemon=True)
        process.start()
        theirs.close()
        self._all.append(process)
        return ours

    def close(self) -> None:
        for process in self._all:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()


def heard(connection: Connection, timeout_s: float, what: str) -> Any:
    """What a process reports. Raises TimeoutError, and EOFError if it died."""
    if not connection.poll(timeout_s):
        raise TimeoutError(f"{what} said nothing for {timeout_s:.0f} s")
    return connection.recv()


# ------------------------------------------------------------------------------------------------------- the buffer


def serve(scenario: Scenario, run_dir: str, shard: int, bind: str | None, report: Connection) -> None:
    """The process of one shard."""
    os.environ["OMP_NUM_THREADS"] = "1"
    code = stillhouse.buffer.server.main(
        config=scenario.buffer_config(),
        run_id=RUN,
        run_dir=Path(run_dir),
        shard=shard,
        bind=bind,
        vocab_fingerprint=VOCABULARY,
    )
    report.send(_peak_mb())
    sys.exit(code)


class Shards:
    """The processes of the buffer, one after the other at consecutive ports."""

    def __init__(self, processes: Processes, scenario: Scenario, run_dir: Path) -> None:
        run_dir.mkdir(parents=True)
        self._folders = [shard_folder(run_dir, shard) for shard in range(scenario.shards)]
        self._reports = [processes.start(serve, scenario, str(run_dir), 0, None)]
        first = _listens(self._folders[0])
        self.address: Final = first.address
        self.pids: Final = [first.pid]
        for shard in range(1, scenario.shards):
            own = shard_address(first.address, shard)
            self._reports.append(processes.start(serve, scenario, str(run_dir), shard, own))
            self.pids.append(_listens(self._folders[shard]).pid)

    def cpu_when_idle(self) -> list[float]:
        """CPU seconds per second of each, over `IDLE_S`."""
        time.sleep(1.0)  # what connecting has left to do
        before_s, began_s = cpu_s(self.pids), time.monotonic()
        time.sleep(IDLE_S)
        seconds = time.monotonic() - began_s
        return [(after - before) / seconds for after, before in zip(cpu_s(self.pids), before_s, strict=True)]

    def peaks_mb(self) -> list[float]:
        """Largest resident memory of each, once it has ended."""
        return [heard(report, END_S + START_S, "the buffer") for report in self._reports]

    def last_words(self) -> list[Snapshot]:
        """The final snapshot of each, once it has ended."""
        files = [folder / "ledger.json" for folder in self._folders]
        return [msgspec.json.decode(file.read_bytes(), type=Snapshot) for file in files]


def _listens(folder: Path) -> BufferAddress:
    deadline_s = time.monotonic() + START_S
    while not (file := folder / "buffer.json").exists():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the buffer did not listen after {START_S:.0f} s")
        time.sleep(0.02)
    return msgspec.json.decode(file.read_bytes(), type=BufferAddress)


def _peak_mb() -> float:
    """Largest resident memory of this process so far."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


# ----------------------------------------------------------------------------------------------------- the machine


def idle_s() -> float:
    """Seconds that the machine's cores were idle since it started, summed over cores."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
    return int(fields[4]) / os.sysconf("SC_CLK_TCK")


def cpu_s(pids: Sequence[int]) -> list[float]:
    """CPU time so far of each process, all threads."""
    return [
        sum(
            int((thread / "schedstat").read_text(encoding="utf-8").split()[0])
            for thread in Path(f"/proc/{pid}/task").iterdir()
        )
        / 1e9
        for pid in pids
    ]
