"""What the launcher says no to. Each is shown to the user as its message alone, without a traceback."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)
WRONG_CONFIG_EXIT_CODE: Final = 2
INTERRUPTED_EXIT_CODE: Final = 130


class LaunchError(Exception):
    """The run cannot be started or went wrong; the message says what to do."""


class ConfigError(LaunchError):
    """The configuration is wrong; one line per mistake."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


def unwritten(file: Path, error: OSError) -> None:
    """Tell the user that this file of a run that is over could not be written; nothing else is lost for it."""
    told = f"{file} could not be written: {error}"
    log.error("%s", told)
    print(f"stillhouse: {told}", file=sys.stderr)


def refuse(error: Exception) -> int:
    """Tell the user why nothing is started, a line per mistake. The exit code of the command."""
    for mistake in str(error).splitlines():
        print(f"stillhouse: {mistake}", file=sys.stderr)
    return WRONG_CONFIG_EXIT_CODE


def interrupted() -> int:
    """The same after a Ctrl-C that came before anything was started."""
    print("stillhouse: stopped before anything was started", file=sys.stderr)
    return INTERRUPTED_EXIT_CODE
