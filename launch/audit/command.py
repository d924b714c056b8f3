"""The command line of `cluster.py audit`. Exit codes: 0 clean, 2 nothing could be counted, 4 something is wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from launch.audit.record import AuditError
from launch.audit.run import audit

WRONG_USAGE_EXIT_CODE: Final = 2
FAULTS_EXIT_CODE: Final = 4
USAGE: Final = """\
usage: cluster.py audit RUN [--record FILE]

Counts again what a run trained, from its record (start it with --record FILE), and looks for tokens that were trained
twice or over the bound, and for tasks and samples that were skipped or settled twice. It shares no code with what
keeps the run's own ledger. Exit code 0: all is well; 4: something is wrong, and it says where; 2: nothing could be
counted.

  RUN              folder of a run, or its name in runs/
  --record FILE    where the record is now [what the run's config.yaml says]
"""


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    words, record = list(arguments), None
    if "--help" in words or "-h" in words:
        print(USAGE, end="")
        return 0
    for at, word in enumerate(words):
        if word == "--record" and at + 1 < len(words):
            record = Path(words[at + 1]).expanduser()
            del words[at : at + 2]
            break
        if word.startswith("--record="):
            record = Path(word.partition("=")[2]).expanduser()
            del words[at]
            break
    if len(words) != 1 or words[0].startswith("-"):
        return _refuse(f"got {' '.join(arguments) or 'nothing'}, expected RUN; --help shows how")
    run = next((path for path in (Path(words[0]).expanduser(), Path("runs") / words[0]) if path.is_dir()), None)
    if run is None:
        return _refuse(f"there is no run {words[0]}; expected the folder of a run, or its name in runs/")
    try:
        report = audit(run, record)
    except AuditError as error:
        return _refuse(str(error))
    print(f"audit of {run}\n\n{report}")
    return 0 if report.clean else FAULTS_EXIT_CODE


def _refuse(message: str) -> int:
    print(f"stillhouse: audit: {message}", file=sys.stderr)
    return WRONG_USAGE_EXIT_CODE
