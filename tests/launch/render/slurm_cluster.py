"""A real Slurm on this machine: one controller, and a daemon for each of several hosts, all on loopback.

Everything that it starts has its files in one folder, and is ended by process id."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final, Self

from tests.patience import PATIENCE_S, eventually

PROGRAMS: Final = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "squeue")
CORES: Final = 4
"""That each host says it has, whatever the machine has."""
CONFIG: Final = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
MpiDefault=none
ReturnToService=2
KillWait=30
"""


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    absent = [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install slurmd slurmctld slurm-client munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root here"


class Slurm:
    """A context manager: the daemons live inside it."""

    def __init__(self, folder: Path, hosts: int) -> None:
        folder.chmod(0o755)  # munge refuses a socket that others cannot reach
        self.folder = folder
        self._hosts = [f"host{index}" for index in range(hosts)]
        port, *ports = _free_ports(1 + hosts)
        lines = [CONFIG.format(host=socket.gethostname().split(".")[0], port=port, folder=folder)]
        for name, own in zip(self._hosts, ports, strict=True):
            lines.append(f"NodeName={name} NodeHostname={socket.gethostname().split('.')[0]} NodeAddr=127.0.0.1 ")
            lines[-1] += f"Port={own} CPUs={CORES} RealMemory=16000 State=UNKNOWN\n"
        lines.append(f"PartitionName=all Nodes={','.join(self._hosts)} Default=YES MaxTime=INFINITE State=UP\n")
        self._config = folder / "slurm.conf"
        self._config.write_text("".join(lines))
        self._environment = {**os.environ, "SLURM_CONF": str(self._config), "PATH": _path()}

    def __enter__(self) -> Self:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self.run("munged", "--force", *(f"--{flag}={self.folder}/munge.{end}" for flag, end in files.items()))
        (self.folder / "state").mkdir()
        self.run("slurmctld")
        for name in self._hosts:
            self.run("slurmd", "-N", name)
        eventually(lambda: self.run("sinfo", "-h", "-o", "%T").split() == ["idle"], "all hosts are idle")
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--user=root", "--signal=KILL", "--full")
        pids = [self.folder / f"slurmd.{name}.pid" for name in self._hosts]
        for file in (*pids, self.folder / "slurmctld.pid", self.folder / "munge.pid"):
            if file.is_file() and (pid := int(file.read_text() or 0)):
                os.kill(pid, signal.SIGTERM)
                eventually(partial(_gone, pid), f"process {pid} ended")

    def run(self, *command: str) -> str:
        """Run a command that uses Slurm; returns what it printed."""
        done = self._done(command)
        assert done.returncode == 0, f"{command}: {done.stderr or done.stdout}"
        return done.stdout.strip()

    def fails(self, *command: str) -> str:
        """Run a command that is refused; returns why."""
        done = self._done(command)
        assert done.returncode == 2, f"{command}: {done.stderr or done.stdout}"
        return done.stderr

    def _done(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def states(self, job: str) -> set[str]:
        """States of the components of a job; empty when it is over and forgotten."""
        listed = self.run("squeue", "-h", "-o", "%i %T")
        return {state for place, state in map(str.split, listed.splitlines()) if place.split("+")[0] == job}


def _gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin"


def _free_ports(n: int) -> list[int]:
    held = [socket.socket() for _ in range(n)]
    try:
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]
    finally:
        for each in held:
            each.close()
