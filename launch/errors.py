"""Errors that the launcher shows to the user: the message alone, without a traceback."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import ClassVar, Final

log = logging.getLogger(__name__)
WRONG_CONFIG_EXIT_CODE: Final = 2
INTERRUPTED_EXIT_CODE: Final = 130


class LaunchError(Exception):
    """The run cannot be started or went wrong; the message says what to do."""

    exit_code: ClassVar[int] = WRONG_CONFIG_EXIT_CODE
    """Exit code of a command that ends with this error."""


class ConfigError(LaunchError):
    """The configuration is wrong; one line per mistake."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes


def unwritten(file: Path | str, error: OSError) -> None:
    """Report that this file of a finished run could not be written; nothing else is lost."""
    message = f"{file} could not be written: {error}"
    log.error("%s", message)
    print(f"stillhouse: {message}", file=sys.stderr)


def refuse(error: Exception) -> int:
    """Print why nothing is started, one line per mistake. Returns the command's exit code."""
    for mistake in str(error).splitlines():
        print(f"stillhouse: {mistake}", file=sys.stderr)
    return error.exit_code if isinstance(error, LaunchError) else WRONG_CONFIG_EXIT_CODE


def interrupted() -> int:
    """Report a Ctrl-C that came before anything was started. Returns the command's exit code."""
    print("stillhouse: stopped before anything was started", file=sys.stderr)
    return INTERRUPTED_EXIT_CODE
