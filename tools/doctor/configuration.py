"""Checks that the launcher makes too: the configuration and its placement, the prompts, and the memory estimate."""

from __future__ import annotations

from collections.abc import Iterator

from stillhouse.launch.checks.memory import TIGHT
from stillhouse.launch.errors import ConfigError
from stillhouse.tools.doctor.case import Case
from stillhouse.tools.doctor.finding import Finding


def configuration(case: Case) -> Iterator[Finding]:
    """What every start checks first (launch.checks.preflight)."""
    for mistake in case.mistakes:
        yield Finding(
            check="configuration",
            status="failed",
            measured=mistake,
            normal="the launcher accepts it",
            advice="correct it; checks that need a configuration that would start are skipped",
        )
    if case.mistakes:
        return
    for warning in case.checked.warnings:
        yield Finding(
            check="configuration",
            status="warning",
            measured=warning,
            normal="the launcher has nothing to warn of",
            advice="follow the warning, or leave it as it is on purpose",
        )
    servers = case.checked.servers
    placed = servers.placement.text or "devices are chosen by each worker"
    yield Finding(check="configuration", status="ok", measured=f"the launcher accepts it: {placed}")


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


def prompts(case: Case) -> Iterator[Finding]:
    """What --check makes of architectures and prompts (launch.checks.check_command)."""
    from stillhouse.launch.checks.check_command import check_run  # imports torch

    try:
        lines = check_run(case.checked.config)
    except ConfigError as error:
        for mistake in error.mistakes:
            yield Finding(
                check="prompts",
                status="failed",
                measured=mistake,
                normal="models and prompts can be read",
                advice="correct it, then see `--check`",
            )
        return
    dropped = [line.strip() for line in lines if line.strip().startswith("dropped:")]
    for line in dropped:
        yield Finding(
            check="prompts",
            status="warning",
            measured=line,
            normal="every row is used",
            advice="correct the rows or the limit that is named; otherwise the run is without them",
        )
    used = [line for line in lines if " rows read" in line]
    yield Finding(check="prompts", status="ok", measured="; ".join(used))
