"""A run under faults, from the first to the verdict: strike, watch recoveries, wait for the end, judge what is left."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

from tests.hosts.network import Network, hosts
from tests.patience import RUN_PATIENCE_S, Limit
from tests.sim.chaos.commands import Proxy
from tests.sim.chaos.disk import small_disk
from tests.sim.chaos.faults import PROCESSES, Striker, draw
from tests.sim.chaos.harness import LOOPBACK, Run, proxied_run
from tests.sim.chaos.joins import Guest
from tests.sim.chaos.limits import HOME
from tests.sim.chaos.plan import Plan
from tests.sim.chaos.verdict import LOOK_EVERY_S, Struck, Verdict, judge, leftovers

LAST_FAULT_AT: Final = 0.85
"""Share of the steps after which no fault strikes."""
STEPS_AFTER_RESTART: Final = (0, 1, 2, 3, 5, 7)
"""One of these is drawn. Checkpoints are made every 4 steps."""


def run_campaign(plan: Plan, run_dir: Path, say: Callable[[str], None]) -> Verdict:
    """Raises AssertionError when the run does not even start, and NotPermitted where no hosts can be made."""
    fds_before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    mark = f"chaos-{secrets.token_hex(4)}"
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(_network(plan)) if plan.hosts > 1 else None
        disk = stack.enter_context(small_disk(run_dir, plan.disk_mib << 20)) if plan.disk_mib else None
        if disk is not None:
            stack.callback(_rescue, run_dir)
        listen = network.address(HOME) if network is not None else LOOPBACK
        run, proxy = stack.enter_context(proxied_run(run_dir, plan.arguments_of_run(), mark, listen))
        guests = _join(plan, run, network, stack) if network is not None else []
        run.ready_behind(proxy)
        for guest in guests:
            guest.until_there()
        striker = Striker(run, proxy, disk, network, {guest.host: guest for guest in guests})
        stack.callback(striker.heal)
        began_s = time.monotonic()
        struck, missed = _storm(plan, run, proxy, striker, say)
        faults_s = time.monotonic() - began_s
        striker.heal()
        complaints = [*_await_end(plan, run, proxy, struck, say), *striker.complaints, *_await_joins(run, guests)]
        verdict = judge(plan.steps, run, proxy, struck, missed, faults_s, time.monotonic() - began_s)
        verdict.complaints += complaints
        verdict.join_exits = {guest.host: dict(guest.exit_codes) for guest in guests}
    marks = (mark, f"{mark}-proxy", *(f"{mark}-{host}" for host in plan.guests))
    verdict.complaints += leftovers(marks, run_dir, fds_before)
    return verdict


def _join(plan: Plan, run: Run, network: Network, stack: contextlib.ExitStack) -> list[Guest]:
    guests: list[Guest] = []
    for host in plan.guests:
        guests.append(Guest(run, network, host, plan.arguments_of_join(host)))
        stack.callback(guests[-1].close)
    return guests


@contextlib.contextmanager
def _network(plan: Plan) -> Generator[Network]:
    """This thread, and what it starts, is on HOME meanwhile. Raises NotPermitted."""
    names = (HOME, *plan.guests)
    with (
        hosts(names, delay_ms=plan.delay_ms, loss=plan.loss, seed=plan.seed) as network,
        network.entered(HOME),
    ):
        yield network


def reference(plan: Plan, run_dir: Path) -> dict[str, Any]:
    """Summary of the same run without a fault, on one host, and without a proxy."""
    run = Run(run_dir, plan.alone().arguments_of_run(), f"chaos-{secrets.token_hex(4)}")
    try:
        code = run.process.wait(RUN_PATIENCE_S + plan.steps)
        assert code == 0, f"the run without faults ended with exit code {code}:\n{run.text}"
        return run.summary()
    finally:
        run.end()


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
        if struck and (struck[-1].fault.restarts_run or struck[-1].fault.kind == "partition"):
            _await_steps(run, rng.choice(STEPS_AFTER_RESTART))
        _watch(run, proxy, struck, rng.uniform(*plan.gap_s), due_step)
        fault = plan.sure_fault(len(struck)) or draw(rng, plan.kinds, _targets(plan, run, proxy), plan.roles)
        if not run.running or run.step >= plan.steps:
            break
        if not striker.strike(fault):
            missed += 1
            continue
        now_s = time.monotonic()
        struck.append(Struck(now_s - began_s, fault, now_s + fault.seconds))
        say(f"{now_s - began_s:7.1f} s  step {run.step:4d}/{plan.steps}  {len(struck):4d}  {fault}")
        if fault.kind == "partition":  # others would hide what it does
            _watch(run, proxy, struck, fault.seconds)
    return struck, missed


def _targets(plan: Plan, run: Run, proxy: Proxy) -> dict[str, list[str]]:
    """Names by role."""
    names = {"launcher": ["launcher"]} | {role: run.names(role) for role in PROCESSES}
    if plan.hosts > 1:
        names["joiner"] = sorted(name for name in proxy.look().connections if name.startswith("joiner-"))
        names["host"] = [HOME, *plan.guests]
    return names


def _await_steps(run: Run, n: int) -> None:
    """Wait for `n` steps after a restart or a partition, because otherwise most faults would hit a run that has not
    found together again."""
    rows, limit = len(run.steps()) + n, Limit()
    while run.running and len(run.steps()) < rows and not limit.passed:
        time.sleep(LOOK_EVERY_S)


def _watch(run: Run, proxy: Proxy, struck: Sequence[Struck], seconds: float, step: float = math.inf) -> None:
    """Sleep so long, or until that step, and note who is at work again."""
    until_s = time.monotonic() + seconds
    while run.running and run.step < step:
        useful_s = proxy.look().useful_s
        for one in struck:
            at_work_s = max((at_s for name, at_s in useful_s.items() if one.fault.concerns(name)), default=0.0)
            if one.recovery_s is None and at_work_s > one.over_s:
                one.recovery_s = at_work_s - one.over_s
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return
        time.sleep(min(LOOK_EVERY_S, left_s))


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


def _await_joins(run: Run, guests: Sequence[Guest]) -> list[str]:
    """Complaints about joins whose run has ended."""
    return [complaint for guest in guests for complaint in guest.complaints(well=run.process.poll() == 0)]


def _rescue(run_dir: Path) -> None:
    """The logs, out of a file system that goes away, to beside it."""
    for log in (run_dir / "logs").glob("*.log"):
        run_dir.with_name(f"{run_dir.name}.{log.name}").write_bytes(log.read_bytes())
