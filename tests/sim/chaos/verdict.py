"""What became of a run under faults: judged by the ledger, the wire, the record and what is left of it."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from stillhouse.tools.audit.record import AuditError
from stillhouse.tools.audit.report import Report
from stillhouse.tools.audit.run import audit as count_again
from tests.patience import PATIENCE_S
from tests.sim.chaos.audit import Audit, audit
from tests.sim.chaos.commands import Proxy
from tests.sim.chaos.disk import mounted_at
from tests.sim.chaos.faults import Fault
from tests.sim.chaos.harness import Run, marked
from tests.sim.chaos.tap import read_tap

LOOK_EVERY_S: Final = 0.1
LEFTOVER_WAIT_S: Final = PATIENCE_S
LOG_TROUBLE: Final = ("Traceback (most recent call last)", " CRITICAL ", "THE LEDGER DOES NOT BALANCE")
SILENT: Final = r" is gone: silent"
"""In the buffer's log."""
LEFT_OUT: Final = r"is left out of the weight group for .*: (\w+)"
"""In the learner's."""


class Struck(msgspec.Struct):
    """A fault that came to pass."""

    at_s: float
    """Since the workers were ready."""
    fault: Fault
    over_s: float
    """time.monotonic() at which it ended by itself."""
    recovery_s: float | None = None
    """From then until its target did work again; None: not seen before the run ended."""


class Verdict(msgspec.Struct, kw_only=True):
    """All there is to say about the run."""

    exit_code: int
    summary: dict[str, Any]
    struck: list[Struck]
    missed: int
    """Faults that found nothing to hit."""
    faults_s: float
    """Seconds from the first fault to the end of the last."""
    wall_s: float
    audit: Audit
    """Counts of what went over the wire."""
    report: Report | None
    """Audit of the record; None without a record."""
    complaints: list[str]
    """Empty: everything held."""
    silent: int
    """Peers that the buffer counted as lost for their silence."""
    left_out: dict[str, int]
    """Actors that were left out of the weight group, by reason."""
    join_exits: dict[str, dict[int, int]] = {}
    """Host -> exit code of its joins -> how often."""
    troubles: dict[str, int]
    """Tracebacks in the logs, by worker: for whoever reads on, no verdict."""


def judge(
    steps: int, run: Run, proxy: Proxy, struck: list[Struck], missed: int, faults_s: float, wall_s: float
) -> Verdict:
    """`steps`: as many were asked for."""
    complaints: list[str] = []
    code = -1 if run.running else run.process.wait(1)
    if code != 0:
        complaints.append(f"exit code {code}: {run.text.strip().splitlines()[-1:]}")
    summary = run.summary() if (run.run_dir / "summary.json").exists() else {}
    found = Audit(batches=0, tokens=0, staleness_max=0, other_epoch_tokens=0, complaints=["there is no summary.json"])
    if summary:
        seen = read_tap(run.run_dir.with_name(f"{run.run_dir.name}.tap"))
        found = audit(seen, summary, run.steps(), whole_ledger=summary["ledger"]["source"] == "final")
        complaints += _unbalanced(summary)
        if code == 0 and summary["steps"] != steps:
            complaints.append(f"{summary['steps']} steps were made, {steps} were asked for")
        if "was left behind and is killed" in run.text:
            complaints.append("the launcher had to kill a process that was left behind")
    complaints += found.complaints
    try:
        report = count_again(run.run_dir)
        complaints += [] if report.clean else [f"the audit of {run.run_dir}:\n{report}"]
    except AuditError as error:
        report = None
        complaints.append(f"the run cannot be audited: {error}")
    complaints += [f"the proxy: {error}" for error in proxy.look().errors]
    return Verdict(
        exit_code=code,
        summary=summary,
        struck=struck,
        missed=missed,
        faults_s=faults_s,
        wall_s=wall_s,
        audit=found,
        report=report,
        complaints=complaints,
        troubles=_troubles(run),
        silent=len(_found(run, "buffer-0", SILENT)),
        left_out=dict(Counter(_found(run, "learner-0", LEFT_OUT))),
    )


def _found(run: Run, name: str, pattern: str) -> list[str]:
    log = run.run_dir / "logs" / f"{name}.log"
    return re.findall(pattern, log.read_text(errors="replace")) if log.exists() else []


def _unbalanced(summary: dict[str, Any]) -> list[str]:
    counts = {"tokens": summary["tokens"]} | {
        unit: summary["ledger"][unit] for unit in ("rollouts", "segments", "eval_tokens")
    }
    found = [] if summary["tokens"]["balanced"] else ["the ledger says that it does not balance"]
    for unit, count in counts.items():
        gone = count["trained"] + sum(count["masked"].values()) + sum(count["dropped"].values())
        off = count["accepted"] - gone - count["waiting"] - count["in_flight"]
        if off:
            found.append(f"{unit}: {count['accepted']} accepted, off by {off}")
        if summary["ok"] and (count["waiting"] or count["in_flight"]):
            found.append(f"{unit}: {count['waiting']} wait and {count['in_flight']} are in flight after the end")
    return found


def _troubles(run: Run) -> dict[str, int]:
    found: dict[str, int] = {}
    for log in run.logs():
        lines = log.read_text(errors="replace").splitlines()
        if n := sum(any(word in line for word in LOG_TROUBLE) for line in lines):
            found[log.stem] = n
    return found


def leftovers(marks: Sequence[str], run_dir: Path, fds_before: int) -> list[str]:
    """What is still there of a run that has ended."""
    deadline_s = time.monotonic() + LEFTOVER_WAIT_S
    while (left := marked(*marks)) and time.monotonic() < deadline_s:
        time.sleep(LOOK_EVERY_S)
    complaints = [f"process {process.pid} is left" for process in left]
    fds = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    if fds > fds_before:
        complaints.append(f"{fds - fds_before} file descriptors are left open here")
    if mounted_at(run_dir):
        complaints.append(f"{run_dir} is still mounted")
    complaints += [f"{draft} is left" for draft in run_dir.glob(".*.[0-9]*")]
    return complaints
