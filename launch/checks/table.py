"""The checks that every start and `--check` make, in well under a second. The doctor makes them too, and those that
load models (tools.doctor.table)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

from stillhouse.launch.checks.disk import disk
from stillhouse.launch.checks.environment_servers import environment_servers
from stillhouse.launch.checks.finding import Case, Check, Finding, Impossible, of_message
from stillhouse.launch.checks.host import cores, open_files, shared_memory
from stillhouse.launch.checks.memory import TIGHT
from stillhouse.launch.checks.ports import ports


def configuration(case: Case) -> Iterator[Finding]:
    """What every start checks first (launch.checks.preflight), and where each part would run."""
    for mistake in case.mistakes:
        yield of_message("configuration", "failed", mistake)
    if case.mistakes:
        return
    for warning in case.checked.warnings:
        yield of_message("configuration", "warning", warning)
    servers = case.checked.servers
    for line in servers.report():
        yield Finding(check="configuration", status="ok", measured=line)
    for line in servers.not_here:
        yield Finding(check="configuration", status="warning", measured=f"not on this machine: {line}")


def memory(case: Case) -> Iterator[Finding]:
    """The planner's table (launch.checks.memory)."""
    for line in case.checked.servers.memory:
        where, _, figures = line.partition(": ")
        yield Finding(
            check="memory",
            subject=where,
            status="warning" if figures.endswith(TIGHT) else "ok",
            measured=figures,
            normal="less than there is; the estimate is right within 15 % on a GPU, a host may use less",
            advice="docs/scaling.md lists the keys that make each part smaller",
        )


PLAN: Final = (Check("configuration", configuration), Check("memory", memory))
"""Checks that hold for a machine that is only pretended, too."""
CHECKS: Final = (
    *PLAN,
    Check("environment servers", environment_servers, refuses=True),
    Check("open files", open_files),
    Check("cores", cores),
    Check("shared memory", shared_memory),
    Check("ports", ports, refuses=True),
    Check("disk", disk),
)


def examined(case: Case, *, here: bool) -> tuple[list[Finding], list[Finding]]:
    """All findings, and those of them that refuse a start. `here`: the run's processes are on this machine."""
    findings, refusing = list[Finding](), list[Finding]()
    for check in CHECKS if here else PLAN:
        with contextlib.suppress(Impossible):
            for finding in check.examine(case):
                findings.append(finding)
                if check.refuses and finding.status == "failed":
                    refusing.append(finding)
    return findings, refusing
