"""What a worker needs to start, wherever it starts: a StartRole, and the folder that it shares with its launcher.

A StartRole is plain data and crosses to another process or machine as JSON, so it contains no process id, file
descriptor or path. Everything else is in the folder. Each host knows where its own mount of that folder is:

    config.yaml         the resolved configuration
    keys/               the worker's own key pair, and the public keys of those it connects to (protocol.keys)
    logs/<name>.log     the worker's output
    checkpoints/, journal/, weights/, ...        what the roles read and write
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

import msgspec

from stillhouse.launch.config.pools import pool_of
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.machine.devices import on_device
from stillhouse.protocol.atomic_file import not_a_link
from stillhouse.protocol.context import RoleContext, WorkerRole
from stillhouse.protocol.printable import LineFormatter, printable

STARTS: Final = " starts, pid "
"""In the first line that a worker logs."""

replace = msgspec.structs.replace

THREAD_VARIABLES: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Native libraries read their number of threads from these, when they are loaded."""


class StartRole(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Launcher -> the process that becomes the worker, through a backend (launch.processes.backend)."""

    entry: str
    """`module:function`"""
    role: WorkerRole
    index: int
    """Counted from 0 within the role."""
    name: str
    incarnation: str
    """Random per process."""
    run_id: str
    buffer_address: str
    """As in RoleContext."""
    resume: bool
    server_url: str = ""
    """URL of the worker's inference server; empty for an embedded engine."""
    device: str = ""
    """Torch device that the launcher chose (launch.checks.placement); empty: use the configured device."""
    threads: int = 1
    """Native threads that the launcher planned for it, or for each of its ranks (launch.checks.threads)."""
    in_turns: bool = False
    gpus: float = 0.0
    """As in RoleContext, like `in_turns`."""

    def context(self, config: RunConfig, run_dir: Path) -> RoleContext[RunConfig]:
        """`run_dir`: path of the run folder on this host."""
        own = pool_of(config, self.index).config if self.role == "teacher" else config
        # The learner records it: products of another number of threads differ in their last bits.
        own = replace(own, launch=replace(own.launch, threads_per_worker=self.threads))
        return RoleContext(
            role=self.role,
            index=self.index,
            name=self.name,
            incarnation=self.incarnation,
            run_id=self.run_id,
            run_dir=run_dir,
            buffer_address=self.buffer_address,
            resume=self.resume,
            config=on_device(own, self.role, self.device) if self.device else own,
            buffer_away_s=config.launch.ready_timeout_s,  # as long as the launcher waits for a restarted one
            server_url=self.server_url,
            in_turns=self.in_turns,
            gpus=self.gpus,
        )


class WorkFolder:
    """The folder that a launcher shares with its workers: configuration and logs. `run_id`: empty when unknown."""

    def __init__(self, path: Path, run_id: str = "") -> None:
        self.path = path
        self.run_id = run_id

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def log_path(self, worker_name: str) -> Path:
        return self.logs / f"{worker_name}.log"

    def log_launcher(self) -> None:
        """Send this process's log to the launcher's file; the terminal belongs to the status."""
        os.close(not_a_link(self.log_path("launcher"), os.O_WRONLY | os.O_CREAT | os.O_APPEND))
        to_file = logging.FileHandler(self.log_path("launcher"))
        to_file.setFormatter(LineFormatter("launcher"))
        logging.basicConfig(level=logging.INFO, force=True, handlers=[to_file])
        logging.captureWarnings(True)

    def log_tail(self, worker_name: str, *, lines: int = 15) -> str:
        """The last lines of a worker's log, indented, for an error message."""
        if not self.log_path(worker_name).is_file():
            return "    (no log)"
        tail = self._end_of_log(worker_name)[-lines:]
        return "\n".join(f"    {printable(line)}" for line in tail if line) or "    (the log is empty)"

    def last_error(self, worker_name: str) -> str:
        """The last line of a worker's log that is no remark of ours: an error, or the end of a traceback. Empty without
        one since its start."""
        for line in reversed(self._end_of_log(worker_name) if self.log_path(worker_name).is_file() else []):
            if STARTS in line:
                break
            if line and " INFO stillhouse." not in line and " WARNING stillhouse." not in line:
                return printable(line.strip())
        return ""

    def _end_of_log(self, worker_name: str) -> list[str]:
        with self.log_path(worker_name).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 16384))
            return log.read().decode(errors="replace").rstrip("\n").split("\n")
