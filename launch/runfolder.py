"""The folder of one run: its layout, its lock, and the state in which it was left.

runs/<name>/   config.yaml    the resolved configuration; another run can be started from it
               run.json       RunRecord: run id, state, exit code
               lock           held by the launcher as long as it lives
               keys/          for the encrypted links (protocol.keys); missing when links are not encrypted
               logs/          <role>-<i>.log, forkserver.log, launcher.log
               buffer.json    where the buffer listens
               ledger.json    the buffer's last snapshot     learner.json   the learner's own account
               summary.json   written at the end of every run
               teacher_eval.json   with learner.eval_teacher: accuracies of the teachers
               replay.json, replay_plan.json   of a replay in their place (replay.run, replay.plan)
               servers/       <worker>.json: what its inference server can do
               trace/         events of each process, with --trace (tracing.events)
               stages.json, stages/   of a run with stages in place of most of these (launch.stages)
               joined/        a folder for each `stillhouse join RUN` on a machine that sees this folder
               checkpoints/, tensorboard/, trackers/ and other files belong to the learner
runs/latest    -> the most recently started run
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import secrets
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal, Self, TypeAlias

import msgspec

from stillhouse.engines.provider import SERVERS
from stillhouse.launch.errors import INTERRUPTED_EXIT_CODE, ConfigError, LaunchError, unwritten
from stillhouse.launch.workers.start_role import WorkFolder
from stillhouse.protocol.atomic_file import not_a_link, write_atomic
from stillhouse.protocol.context import ExitCode
from stillhouse.protocol.keys import KEYS, make_keys

EndState: TypeAlias = Literal["finished", "failed", "stopped"]
"""stopped: ended by the user or the system (Ctrl-C, SIGTERM), or by an alarm (learner.stop_on_alarm)."""
ALARM_EXIT_CODE: Final = 5
RunState: TypeAlias = Literal["running"] | EndState
RUNS: Final = Path("runs")
LATEST: Final = "latest"
log = logging.getLogger(__name__)


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """run.json. If it says "running" but the lock is free, the launcher was killed."""

    name: str
    run_id: str
    state: RunState
    started: str
    """Local time, ISO 8601."""
    launcher_pid: int
    exit_code: int | None = None
    host: str = ""
    """Host name of the launcher's machine; empty in records of older versions."""
    launches: int = 1
    """Number of starts: 1, plus one for each --resume."""


def end_state(exit_code: int) -> EndState:
    """The state for a launcher's exit code; 128 + n means ended by signal n."""
    return (
        "finished"
        if exit_code == 0
        else "stopped"
        if exit_code > 128 or exit_code in (ALARM_EXIT_CODE, ExitCode.SPENT)
        else "failed"
    )


class RunFolder(WorkFolder):
    """An open run folder, locked against other launchers until `close`."""

    def __init__(self, path: Path, record: RunRecord, lock_fd: int) -> None:
        super().__init__(path, record.run_id)
        self.record = record
        self._lock_fd = lock_fd

    @classmethod
    def open(cls, path: Path | None, *, resume: bool, name: str = "") -> RunFolder:
        """Create a new folder, or open an old one (`resume`). Without a path: runs/<name or time>; on resume
        runs/<name> or runs/latest. Raises LaunchError."""
        path = choose_path(path, resume=resume, name=name)
        try:
            return cls._open(path, resume=resume)
        except OSError as error:
            raise unwritable(path, error) from error

    @classmethod
    def _open(cls, path: Path, *, resume: bool) -> RunFolder:
        if resume:
            expect_fit(path, resume=True)
        path.mkdir(parents=True, exist_ok=True)
        lock_fd = _lock(path)
        try:
            former = expect_fit(path, resume=resume)
            os.ftruncate(lock_fd, 0)
            os.write(lock_fd, f"{os.getpid()}\n".encode())
            (path / "logs").mkdir(exist_ok=True)
            for stale in ("buffer.json", "ledger.json", "learner.json", "summary.json"):
                _set_aside(path / stale, former)
            for stale in (path / SERVERS).glob("*.json"):
                stale.unlink()
            name = former.name if former is not None else path.name
            record = RunRecord(
                name=name,
                run_id=f"{name}-{secrets.token_hex(4)}",
                state="running",
                started=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                launcher_pid=os.getpid(),
                host=platform.node(),
                launches=1 if former is None else former.launches + 1,
            )
            folder = cls(path, record, lock_fd)
            folder._write_record()
            _point_latest(path)
        except BaseException:
            os.close(lock_fd)
            raise
        return folder

    def keep_keys(self, workers: Iterable[str] = (), *, encrypted: bool) -> None:
        """Make the run's keys, including those of its own workers, or keep existing ones. Without encryption they are
        renamed, because processes that find keys use them."""
        keys, unused = self.path / KEYS, self.path / f"{KEYS}.unused"
        if encrypted:
            if unused.is_dir() and not keys.is_dir():
                unused.rename(keys)
            make_keys(keys, workers)
        elif not encrypted and keys.is_dir():
            keys.rename(unused)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Record an end for a launcher that raises before it has recorded one."""
        if self.record.state == "running" and error is not None:
            self.finish(INTERRUPTED_EXIT_CODE if isinstance(error, KeyboardInterrupt) else 1)
        self.close()

    def finish(self, exit_code: int) -> None:
        """Record how the run ended. Reports when that cannot be written."""
        self.record = msgspec.structs.replace(self.record, state=end_state(exit_code), exit_code=exit_code)
        try:
            self._write_record()
        except OSError as error:
            unwritten(self.path / "run.json", error)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _write_record(self) -> None:
        write_atomic(self.path / "run.json", msgspec.json.format(msgspec.json.encode(self.record), indent=2))


def unwritable(path: Path, error: OSError) -> LaunchError:
    """The error for a run folder that cannot be created or written."""
    return LaunchError(
        f"the run folder {path} cannot be written: {error}; make it writable, or name another one with --run-dir DIR"
    )


def expect_fit(path: Path, *, resume: bool) -> RunRecord | None:
    """The record of the run that is to be resumed; None for a new one. Raises LaunchError for a folder without a run,
    or with something that a new run would mix with."""
    former = read_record(path)
    if resume and former is None:
        raise LaunchError(f"--resume: {path} holds no run (no run.json in it); leave --resume out to start one there")
    if former is not None and not resume:
        raise LaunchError(
            f"{path} holds a run already ({_describe(former)}); continue it with --resume, or give another --run-dir"
        )
    if former is None and path.exists():
        _expect_empty(path)
    return former


def expect_usable(path: Path, *, resume: bool) -> None:
    """Raises LaunchError for a run folder that is in use, does not fit, or cannot be made or written. Makes a file
    there, or in the nearest folder above it, and removes it."""
    try:
        if (path / "lock").is_file():
            os.close(_lock(path))
        expect_fit(path, resume=resume)
        with tempfile.TemporaryFile(dir=next(one for one in (path, *path.parents) if one.exists())):
            pass
    except OSError as error:
        raise unwritable(path, error) from error


def choose_path(path: Path | None, *, resume: bool, name: str) -> Path:
    """Path of the run's folder; of runs/latest that of its run, which else would become a link to itself. Raises
    LaunchError when there is nothing to resume, or for a new run that is called latest."""
    if path is None and not resume:
        path = _free_path(RUNS / (name or time.strftime("%Y%m%d-%H%M%S")), exact=bool(name))
    if path is not None and path.absolute() != (RUNS / LATEST).absolute():
        return path.absolute()
    chosen = RUNS / (name or LATEST) if path is None else path
    if not resume and not chosen.is_symlink():
        raise LaunchError(f"{chosen} is the link to the newest run; choose another --name or --run-dir")
    if not chosen.is_dir():
        raise LaunchError(f"--resume: {chosen} does not exist; name the run with --run-dir DIR")
    return chosen.resolve()


def resumes(path: Path | None, name: str) -> bool:
    """With --resume-or-start: whether the run is there. Raises ConfigError where no folder is named."""
    named = path or (RUNS / name if name else None)
    if named is None:
        raise ConfigError("--resume-or-start: which run? expected --run-dir DIR or --name NAME, too")
    return (named / "run.json").exists()


def find_run(named: str, command: str) -> Path:
    """The folder of a run, by its path or by its name in runs/. `command` is the word that asks for it, for the
    message. Raises ConfigError."""
    for path in (Path(named).expanduser(), RUNS / named):
        if path.is_dir():
            return path
    raise ConfigError(f"{command}: no run {named}; expected the folder of a run, or its name in {RUNS}/")


def _free_path(path: Path, *, exact: bool) -> Path:
    """Two runs started in the same second get different folders."""
    candidate, n = path, 1
    while not exact and candidate.exists():
        n += 1
        candidate = path.with_name(f"{path.name}-{n}")
    return candidate


def read_record(path: Path) -> RunRecord | None:
    """The record in run.json, or None without one. Raises LaunchError when it cannot be read."""
    file = path / "run.json"
    if not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=RunRecord)
    except msgspec.DecodeError as error:
        raise LaunchError(f"{file} is not a run record of this version: {error}") from error


def _describe(record: RunRecord) -> str:
    code = "" if record.exit_code is None else f", exit code {record.exit_code}"
    return f"{record.name}, started {record.started}, {record.state}{code}"


def _lock(path: Path) -> int:
    """Lock by flock: it ends with the process, so a killed launcher leaves no lock. Children do not inherit it. Raises
    OSError for a link, or what is no plain file of its own: its content would be replaced."""
    lock_fd = not_a_link(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
    try:
        found = os.fstat(lock_fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise OSError(
                errno.EINVAL, "expected a plain file with no other name, or none; remove it", str(path / "lock")
            )
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(lock_fd, 64).decode(errors="replace").strip()
        os.close(lock_fd)
        raise LaunchError(f"{path} is in use by another launcher (pid {holder}); wait for it or stop it") from None
    except BaseException:
        os.close(lock_fd)
        raise
    return lock_fd


def _expect_empty(path: Path) -> None:
    """Keys may be there before the run is, where a scheduler hands them out."""
    others = sorted(entry.name for entry in path.iterdir() if entry.name not in ("lock", KEYS))
    if others:
        if (path / "lock").is_file() and (path / "lock").stat().st_size == 0:  # made just now
            (path / "lock").unlink()
        raise LaunchError(
            f"{path} is neither empty nor a run folder (it holds {', '.join(others[:3])}); choose another"
        )


def _set_aside(file: Path, former: RunRecord | None) -> None:
    """Rename a result of the previous launch to carry its number, so that it is not taken for this launch's."""
    if file.exists() and former is not None:
        file.replace(file.with_name(f"{file.stem}.{former.launches}{file.suffix}"))


def _point_latest(path: Path) -> None:
    """Let runs/latest point to this run, if it is in runs/."""
    if path.parent != RUNS.absolute():
        return
    draft = path.parent / f".latest.{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(path.name)
    draft.replace(path.parent / LATEST)
