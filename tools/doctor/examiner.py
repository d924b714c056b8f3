"""The process that examines: makes one check after the other, and reports each in JSON lines.

    python -P -m stillhouse.tools.doctor.examiner PARENT_PID        Orders on standard input, News on standard output

The process may be killed at any time: a check that takes too long, or that crashes the interpreter, costs itself alone,
because the next process goes on behind it.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stillhouse.launch.checks.finding import Check, Finding, Impossible, of_message
from stillhouse.launch.config.command_line import parse_arguments
from stillhouse.launch.errors import ConfigError
from stillhouse.protocol.children import die_with_parent
from stillhouse.tools.doctor.case import ModelCase
from stillhouse.tools.doctor.messages import CheckBegun, CheckEnded, ExaminerMessage, Orders
from stillhouse.tools.doctor.table import CHECKS


def examine(orders: Orders, send: Callable[[ExaminerMessage], None]) -> None:
    """Make all checks that are asked for and not made yet."""
    case = ModelCase.of(parse_arguments(orders.arguments), Path(orders.scratch))
    try:
        for check in CHECKS:
            if check.name in orders.done or (orders.only and check.name not in orders.only):
                continue
            send(CheckBegun(check.name, orders.timeout_s + check.longer_s(case.config)))
            for finding in findings(check, case):
                send(finding)
            send(CheckEnded(check.name))
    finally:
        case.close()


def findings(check: Check[ModelCase], case: ModelCase) -> Iterator[Finding]:
    """What the check reports. If it cannot be made, or fails itself, that is its report."""
    try:
        yield from check.examine(case)
    except Impossible as reason:
        yield Finding(check=check.name, status="skipped", measured=str(reason))
    except ConfigError as error:
        for mistake in error.mistakes:
            yield of_message(check.name, "failed", mistake)
    except Exception as error:
        traceback.print_exc()
        at = traceback.extract_tb(error.__traceback__)[-1]
        yield Finding(
            check=check.name,
            status="failed",
            measured=f"{type(error).__name__}: {error or 'no message'} (at {Path(at.filename).name}:{at.lineno})",
            normal="the check ends",
            advice="what it tried is mostly what the run would do, so begin with the error",
        )


def main() -> None:
    """Entry of the process."""
    die_with_parent(int(sys.argv[1]))
    out = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever libraries print goes to the log
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=Orders)

    def send(news: ExaminerMessage) -> None:
        out.write(msgspec.json.encode(news) + b"\n")

    examine(orders, send)


if __name__ == "__main__":
    main()
