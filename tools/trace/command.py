"""The command line of `stillhouse trace`: a run's trace and its figures. Launchers start it at the end of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from stillhouse.launch.config.tree import get
from stillhouse.launch.errors import INTERRUPTED_EXIT_CODE, ConfigError, LaunchError, refuse
from stillhouse.launch.runfolder import find_run
from stillhouse.tools.trace.figures import read_figures
from stillhouse.tools.trace.merge import WrittenTrace, merge

FILE: Final = "trace.json.gz"
USAGE: Final = f"""\
usage: stillhouse trace RUN [FILE]

Writes the trace of a run that was started with --trace FILE, and prints its figures. A run does this itself at its end;
use the command while a run goes on, after its launcher was killed, or with the events of workers that joined from
machines that do not see the run folder (copy their folder `trace` to RUN/joined/NAME/trace first).

  RUN     folder of a run, or its name in runs/
  FILE    what to write [the FILE of the run's --trace; or RUN/{FILE}]. Open it at https://ui.perfetto.dev
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return 0
    try:
        run, out = parse(arguments)
        for line in write_trace(run, out):
            print(line)
    except (LaunchError, OSError, ValueError) as error:
        return refuse(error if isinstance(error, LaunchError) else LaunchError(f"trace: {error}"))
    except KeyboardInterrupt:
        print("stillhouse: stopped; no trace was written", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    return 0


def parse(arguments: Sequence[str]) -> tuple[Path, Path]:
    """The folder of the run, and the file to write. Raises ConfigError."""
    if flags := [word for word in arguments if word.startswith("-")]:
        raise ConfigError(f"trace: unknown flag {flags[0]}; --help shows how to use it")
    if not 1 <= len(arguments) <= 2:
        got = " ".join(arguments) or "nothing"
        raise ConfigError(f"trace: got {got}, expected RUN, the folder of a run, and perhaps FILE; --help shows how")
    run = find_run(arguments[0], "trace")
    return run, Path(arguments[1]).expanduser() if len(arguments) > 1 else _configured(run) or run / FILE


def _configured(run: Path) -> Path | None:
    """The file that the run's config.yaml names, if any."""
    try:
        plain: Any = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return None
    named = get(plain, "launch.trace") if isinstance(plain, dict) else None
    return Path(str(named)).expanduser() if named else None


def write_trace(run: Path, out: Path) -> Iterator[str]:
    """Write the trace; lines for the user. Raises LaunchError, OSError, and ValueError for damaged events."""
    yield from describe(merge(run, out))
    for label, text in read_figures(out).lines():
        yield f"{label}: {text}"


def describe(written: WrittenTrace) -> Iterator[str]:
    """What was written, and what is missing."""
    yield f"trace: {written.path} ({written.events:,} events, {written.arrows:,} arrows); open it at ui.perfetto.dev"
    lost = written.lost
    if lost.dropped:
        yield f"trace: {lost.dropped:,} events are missing, because a file of events or the disk was full"
    if lost.torn or lost.damaged or lost.files:
        yield (
            f"trace: unreadable were {lost.torn} lines of killed processes, {lost.damaged} other lines and "
            f"{lost.files} whole files"
        )
    for clock in written.clocks:
        yield f"trace: {clock}"
