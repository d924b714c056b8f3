"""What the launcher says no to. Each is shown to the user as its message alone, without a traceback."""

from __future__ import annotations


class LaunchError(Exception):
    """The run cannot be started or went wrong; the message says what to do."""


class ConfigError(LaunchError):
    """The configuration is wrong; one line per mistake."""

    def __init__(self, *mistakes: str) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = mistakes
