"""A run under faults, from the first to the verdict: strike, watch recoveries, wait for the end, judge what is left."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from launch.audit.record import AuditError
from launch.audit.report import Report
from launch.audit.run import audit as count_again
from launch.workers.supervisor import RESTARTABLE
from tests.patience import PATIENCE_S, RUN_PATIENCE_S, Limit
from tests.sim.chaos.audit import Audit, audit
from tests.sim.chaos.commands import Proxy
from tests.sim.chaos.disk import mounted_at, small_disk
from tests.sim.chaos.faults import PROCESSES, Fault, Kind, Striker, draw
from tests.sim.chaos.harness import PATIENT, TASK, Run, marked, proxied_run
from tests.sim.chaos.tap import read_tap

LOOK_EVERY_S: Final = 0.1
LAST_FAULT_AT: Final = 0.85
"""Share of the steps after which no fault strikes."""
STEPS_AFTER_RESTART: Final = (0, 1, 2, 3, 5, 7)
"""One of these is drawn. Checkpoints are made every 4 steps."""
LEFTOVER_WAIT_S: Final = PATIENCE_S
LOG_TROUBLE: Final = ("Traceback (most recent call last)", " CRITICAL ", "THE LEDGER DOES NOT BALANCE")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a campaign."""

    faults: int
    seed: int
    kinds: tuple[Kind, ...]
    roles: frozenset[str] = RESTARTABLE
    """Those whose death the run must survive."""
    actors: int = 3
    teachers: int = 2
    steps: int
    max_staleness: int = 2
    surely: tuple[Fault, ...] = ()
    """Among the faults, evenly over the run, whatever is drawn."""
    gap_s: tuple[float, float] = (0.5, 2.5)
    """Between two faults, evenly drawn; less where the run would be over before the last of them."""
    end_timeout_s: float = 120.0
    """Seconds that the run may take without a step once the faults are over."""
    disk_mib: int = 0
    """Above 0: the run folder is a file system of this size."""
    arguments: tuple[str, ...] = ()


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
    troubles: dict[str, int]
    """Tracebacks in the logs, by worker: for whoever reads on, no verdict."""


def run_campaign(plan: Plan, run_dir: Path, say: Callable[[str], None]) -> Verdict:
    """Raises AssertionError when the run does not even start."""
    fds_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    mark = f"chaos-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        disk = stack.enter_context(small_disk(run_dir, plan.disk_mib << 20)) if plan.disk_mib else None
        if disk is not None:
            stack.callback(_rescue, run_dir)
        run, proxy = stack.enter_context(proxied_run(run_dir, _arguments(plan), mark))
        striker = Striker(run, proxy, disk)
        stack.callback(striker.heal)
        began_s = time.monotonic()
        struck, missed = _storm(plan, run, proxy, striker, say)
        faults_s = time.monotonic() - began_s
        striker.heal()
        hung = _await_end(plan, run, proxy, struck, say)
        verdict = _judge(plan, run, proxy, struck, missed, faults_s, time.monotonic() - began_s)
        verdict.complaints += [*hung, *striker.complaints]
    verdict.complaints += _leftovers(mark, run_dir, fds_before)
    return verdict


def reference(plan: Plan, run_dir: Path) -> dict[str, Any]:
    """Summary of the same run without a fault, and without a proxy."""
    run = Run(run_dir, _arguments(plan), f"chaos-{secrets.token_hex(4)}")
    try:
        code = run.process.wait(RUN_PATIENCE_S + plan.steps)
        assert code == 0, f"the run without faults ended with exit code {code}:\n{run.text}"
        return run.summary()
    finally:
        run.end()


def _arguments(plan: Plan) -> list[str]:
    return [
        *TASK,
        *PATIENT,
        f"--actors={plan.actors}",
        f"--teachers={plan.teachers}",
        f"--steps={plan.steps}",
        f"--seed={plan.seed}",
        f"--max-staleness={plan.max_staleness}",
        f"--learner.eval_every={plan.steps}",
        *plan.arguments,
    ]


def _storm(
    plan: Plan, run: Run, proxy: Proxy, striker: Striker, say: Callable[[str], None]
) -> tuple[list[Struck], int]:
    """Strike until there were enough faults, or the run is over."""
    rng = Random(plan.seed)
    struck: list[Struck] = []
    missed = 0
    began_s = time.monotonic()
    while len(struck) < plan.faults and run.running:
        due_step = LAST_FAULT_AT * plan.steps * (len(struck) + 1) / plan.faults
        if struck and struck[-1].fault.restarts_run:
            _await_steps(run, rng.choice(STEPS_AFTER_RESTART))
        _watch(run, proxy, struck, rng.uniform(*plan.gap_s), due_step)
        names = {"launcher": ["launcher"]} | {role: run.names(role) for role in PROCESSES}
        fault = _planned(plan, len(struck)) or draw(rng, plan.kinds, names, plan.roles)
        if not run.running or run.step >= plan.steps:
            break
        if not striker.strike(fault):
            missed += 1
            continue
        now_s = time.monotonic()
        struck.append(Struck(now_s - began_s, fault, now_s + fault.seconds))
        say(f"{now_s - began_s:7.1f} s  step {run.step:4d}/{plan.steps}  {len(struck):4d}  {fault}")
    return struck, missed


def _await_steps(run: Run, n: int) -> None:
    """Wait for `n` steps after a restart, because otherwise most faults would hit the start."""
    rows, limit = len(run.steps()) + n, Limit()
    while run.running and len(run.steps()) < rows and not limit.passed:
        time.sleep(LOOK_EVERY_S)


def _watch(run: Run, proxy: Proxy, struck: Sequence[Struck], seconds: float, step: float = math.inf) -> None:
    """Sleep so long, or until that step, and note who is at work again."""
    until_s = time.monotonic() + seconds
    while run.running and run.step < step:
        useful_s = proxy.look().useful_s
        for one in struck:
            anybody = one.fault.target in ("run", "buffer-0") or one.fault.restarts_run
            at_work_s = max(useful_s.values(), default=0.0) if anybody else useful_s.get(one.fault.target, 0.0)
            if one.recovery_s is None and at_work_s > one.over_s:
                one.recovery_s = at_work_s - one.over_s
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(LOOK_EVERY_S, left_s))


def _planned(plan: Plan, n_struck: int) -> Fault | None:
    """The sure fault whose turn is next, if it is one's turn. One that finds nothing to hit is tried again."""
    turns = {plan.faults * (n + 1) // (len(plan.surely) + 1): fault for n, fault in enumerate(plan.surely)}
    return turns.get(n_struck)


def _await_end(plan: Plan, run: Run, proxy: Proxy, struck: Sequence[Struck], say: Callable[[str], None]) -> list[str]:
    """The run goes on by itself to its end. A complaint if it stands still."""
    steps, since_s = -1, time.monotonic()
    while run.running:
        _watch(run, proxy, struck, 1.0)
        if run.step != steps:
            steps, since_s = run.step, time.monotonic()
            say(f"         faults are over, step {steps}/{plan.steps}")
        elif time.monotonic() - since_s > plan.end_timeout_s:
            return [f"the run stood still at step {steps} for {plan.end_timeout_s:.0f} s after the last fault"]
    return []


def _judge(
    plan: Plan, run: Run, proxy: Proxy, struck: list[Struck], missed: int, faults_s: float, wall_s: float
) -> Verdict:
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
        if code == 0 and summary["steps"] != plan.steps:
            complaints.append(f"{summary['steps']} steps were made, {plan.steps} were asked for")
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
    )


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
    for log in sorted((run.run_dir / "logs").glob("*.log")):
        lines = log.read_text(errors="replace").splitlines()
        if n := sum(any(word in line for word in LOG_TROUBLE) for line in lines):
            found[log.stem] = n
    return found


def _leftovers(mark: str, run_dir: Path, fds_before: int) -> list[str]:
    deadline_s = time.monotonic() + LEFTOVER_WAIT_S
    while (left := [*marked(mark), *marked(f"{mark}-proxy")]) and time.monotonic() < deadline_s:
        time.sleep(LOOK_EVERY_S)
    complaints = [f"process {process.pid} is left" for process in left]
    fds = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    if fds > fds_before:
        complaints.append(f"{fds - fds_before} file descriptors are left open here")
    if mounted_at(run_dir):
        complaints.append(f"{run_dir} is still mounted")
    complaints += [f"{draft} is left" for draft in run_dir.glob(".*.[0-9]*")]
    return complaints


def _rescue(run_dir: Path) -> None:
    """The logs, out of a file system that goes away, to beside it."""
    for log in (run_dir / "logs").glob("*.log"):
        run_dir.with_name(f"{run_dir.name}.{log.name}").write_bytes(log.read_bytes())
