"""`stillhouse doctor`: examines, before a run, what would ruin it in silence.

    stillhouse doctor --config run.toml          (any key of a run)

The checks run in a process of their own (tools.doctor.examiner), so that one that hangs or crashes costs only itself.
This process prints, counts the time, and decides the exit code. It imports no torch.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from stillhouse.launch.checks.finding import Finding
from stillhouse.launch.config.command_line import CommandLine, parse_arguments, resolve_config
from stillhouse.launch.errors import ConfigError, LaunchError, interrupted, refuse
from stillhouse.launch.processes.local import worker_environment
from stillhouse.launch.processes.slots import said
from stillhouse.launch.runfolder import choose_path
from stillhouse.protocol.children import kill_group
from stillhouse.tools.doctor.messages import CheckBegun, CheckEnded, ExaminerMessage, Orders
from stillhouse.tools.doctor.table import CHECKS

USAGE: Final = """\
usage: stillhouse doctor [--only CHECK,...] [--json FILE] [--timeout-s S] [--config FILE] [--KEY VALUE ...]

Examines the run that this configuration describes, and starts nothing that stays. Prints a line per finding: what was
measured, what is normal, and what to do. Exit code 0, or 1 if something FAILED.

  --only CHECK,...   make these checks alone: {checks}
  --json FILE        write the findings to FILE, too
  --timeout-s S      longest time of one check in seconds (default 300)
"""
TIMEOUT_S: Final = 300.0
REDRAW_S: Final = 0.5
LOG_LINES: Final = 8
ENDED_WAIT_S: Final = 10.0
OWN_FLAGS: Final = ("only", "json", "timeout_s")


class DoctorReport(msgspec.Struct, frozen=True):
    """The file of --json."""

    ok: bool
    """Nothing failed."""
    findings: list[Finding]


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        own, of_run = split_own(arguments)
        line = parse_arguments(of_run)
        if line.help:
            print(USAGE.format(checks=", ".join(check.name.replace(" ", "-") for check in CHECKS)))
            return 0
        if line.check or line.gpus or line.version:
            raise ConfigError("doctor: got --check, --gpus or --version, expected the keys of a run")
        _expect_readable(line)
        only, timeout_s = _only(own.get("only", "")), _seconds(own.get("timeout_s", ""))
        findings = list(_shown(of_run, only, timeout_s))
    except LaunchError as error:
        return refuse(error)
    except KeyboardInterrupt:
        return interrupted()
    failed = [finding for finding in findings if finding.status == "failed"]
    if "json" in own:
        report = msgspec.json.encode(DoctorReport(not failed, findings))
        try:
            Path(own["json"]).write_bytes(msgspec.json.format(report, indent=2) + b"\n")
        except OSError as error:
            return refuse(LaunchError(f"--json: {error}"))
    print(_counted(findings))
    return 1 if failed else 0


def split_own(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Flags of this command, and the words that are left. Raises ConfigError for one without a value."""
    own: dict[str, str] = {}
    words, left = list(arguments), list[str]()
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or name not in OWN_FLAGS:
            left.append(word)
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise ConfigError(f"--{name.replace('_', '-')}: needs a value")
            value = words.pop(0)
        own[name] = value
    return own, left


def _expect_readable(line: CommandLine) -> None:
    """Raise LaunchError for keys, values and folders that are wrong in themselves."""
    resolve_config(line)
    choose_path(line.run_dir, resume=line.resume, name=line.name)


def _only(text: str) -> tuple[str, ...]:
    names = [name.strip().replace("-", " ").replace("_", " ") for name in text.split(",") if name.strip()]
    known = [check.name for check in CHECKS]
    if unknown := [name for name in names if name not in known]:
        listed = ", ".join(name.replace(" ", "-") for name in known)
        raise ConfigError(f"--only: got {', '.join(unknown)}, expected names of checks: {listed}")
    return tuple(names)


def _seconds(text: str) -> float:
    try:
        seconds = float(text or TIMEOUT_S)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise ConfigError(f"--timeout-s: got {text!r}, expected seconds above 0")
    return seconds


def _counted(findings: Sequence[Finding]) -> str:
    counts = {status: sum(f.status == status for f in findings) for status in ("ok", "warning", "failed", "skipped")}
    return (
        f"{counts['failed']} failed, {counts['warning']} warnings, {counts['ok']} ok, {counts['skipped']} skipped; "
        "nothing was left running"
    )


def _shown(arguments: Sequence[str], only: tuple[str, ...], timeout_s: float) -> Iterator[Finding]:
    progress = ProgressLine()
    try:
        for finding in examined(arguments, only, timeout_s, progress.show):
            progress.clear()
            print(finding.line(), flush=True)
            yield finding
    finally:
        progress.clear()


class ProgressLine:
    """The check that is being made, on a terminal only."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._written = 0

    def show(self, text: str) -> None:
        if self._terminal:
            self.clear()
            self._written = sys.stderr.write(text)
            sys.stderr.flush()

    def clear(self) -> None:
        if self._written:
            sys.stderr.write("\r" + " " * self._written + "\r")
            sys.stderr.flush()
            self._written = 0


def examined(
    arguments: Sequence[str], only: tuple[str, ...], timeout_s: float, progress: Callable[[str], None]
) -> Iterator[Finding]:
    """All findings, from as many examining processes as it takes."""
    done: list[str] = []
    with tempfile.TemporaryDirectory(prefix="stillhouse-doctor-", ignore_cleanup_errors=True) as scratch:
        while True:
            orders = Orders(
                arguments=tuple(arguments), only=only, done=tuple(done), timeout_s=timeout_s, scratch=scratch
            )
            with Examiner(orders) as examiner:
                yield from examiner.findings(progress)
                if examiner.died is None:
                    return
                yield examiner.died
                if not examiner.check:
                    return  # not even the first check was reached, and another process would not reach it either
            done = [*done, *examiner.ended, examiner.check]


class Examiner:
    """One examining process."""

    def __init__(self, orders: Orders) -> None:
        self._timeout_s = orders.timeout_s
        self._log = Path(orders.scratch) / f"examiner-{len(orders.done)}.log"
        self.check = ""
        """The check that is being made; empty before the first one."""
        self.ended: list[str] = []
        self.died: Finding | None = None
        """Set when the process did not reach its end."""
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "stillhouse.tools.doctor.examiner", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=worker_environment(1),
                start_new_session=True,  # Ctrl-C in the terminal reaches this process only
            )
        self._news: queue.SimpleQueue[ExaminerMessage | None] = queue.SimpleQueue()
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(orders) + b"\n")
        self._process.stdin.close()
        threading.Thread(target=self._read, name="doctor-news", daemon=True).start()

    def __enter__(self) -> Examiner:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process and everything that it started in its group. Servers die with it."""
        kill_group(self._process.pid)
        self._process.wait(ENDED_WAIT_S)

    def findings(self, progress: Callable[[str], None]) -> Iterator[Finding]:
        """Everything that the process reports, until it ends or a check takes too long."""
        began_s, deadline_s, limit_s = time.monotonic(), time.monotonic() + self._timeout_s, self._timeout_s
        while True:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                self.died = self._lost(f"did not end within {limit_s:.0f} s", "--timeout-s gives it longer")
                return
            progress(f"{self.check or 'reading the configuration'} ... {now_s - began_s:.0f} s")
            try:
                news = self._news.get(timeout=min(REDRAW_S, deadline_s - now_s))
            except queue.Empty:
                continue
            match news:
                case CheckBegun(check, limit_s):
                    self.check, began_s = check, time.monotonic()
                    deadline_s = began_s + limit_s
                case Finding():
                    yield news
                case CheckEnded(check):
                    self.ended.append(check)
                case None:
                    code = self._process.wait(ENDED_WAIT_S)
                    if code != 0:
                        self.died = self._lost(said(code), "its last words: " + self._last_words())
                    return

    def _lost(self, what: str, advice: str) -> Finding:
        check = self.check or "configuration"
        return Finding(check=check, status="failed", measured=f"the check {what}", normal="it ends", advice=advice)

    def _read(self) -> None:
        """Runs in a thread of its own, until the process closes its end."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._news.put(msgspec.json.decode(line, type=ExaminerMessage))
        self._news.put(None)

    def _last_words(self) -> str:
        words = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
        return " | ".join(words) or "none"
