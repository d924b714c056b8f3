"""Attempts that actors say have failed: how many under which reason, and a few of the texts.

The set of reasons is bounded, whatever comes over the wire: those of `protocol.messages.FailureReason`, and for
env_error the class of the exception, `env_error_KeyError`, up to MAX_CLASSES of them. Later ones, and what is not the
name of a class, are counted as env_error_other. Texts are kept apart from the reasons: they never become a key.
"""

from __future__ import annotations

import re
from typing import Final

from protocol.messages import Ledger, RolloutFailed, RolloutFailures

MAX_CLASSES: Final = 16
"""Classes of exceptions that are counted by name."""
MAX_EXAMPLES: Final = 3
MAX_TEXT: Final = 300
"""Characters of a text that is kept."""
OTHER: Final = "env_error_other"
_CLASS = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)


class FailureBook:
    """One record per reason, the newest last. `carried`: ledger of the launch before, whose reasons stay the same."""

    def __init__(self, carried: Ledger | None = None) -> None:
        dropped = carried.tokens.dropped if carried is not None else {}
        self._named = {reason for reason in dropped if reason.startswith("env_error_") and reason != OTHER}
        """Reasons that name a class."""
        self._by_reason: dict[str, RolloutFailures] = {}

    def record(self, actor: str, message: RolloutFailed) -> str:
        """Count it; returns the reason that its tokens are dropped under."""
        reason = self._reason(message)
        told = f"{message.error}: {message.detail}" if message.error else message.detail
        text = f"{actor}: {told}"[:MAX_TEXT]
        former = self._by_reason.pop(reason, RolloutFailures(reason, 0, "", ()))
        examples = former.examples
        if text not in examples and len(examples) < MAX_EXAMPLES:
            examples = (*examples, text)
        self._by_reason[reason] = RolloutFailures(reason, former.n + 1, text, examples)
        return reason

    @property
    def records(self) -> tuple[RolloutFailures, ...]:
        return tuple(self._by_reason.values())

    def _reason(self, message: RolloutFailed) -> str:
        if message.reason != "env_error":
            return message.reason
        reason = f"env_error_{message.error}"
        if reason not in self._named:
            if len(self._named) >= MAX_CLASSES or not _CLASS.fullmatch(message.error):
                return OTHER
            self._named.add(reason)
        return reason
