"""What a server's weights are called: `RUN/EPOCH.STEP`, so that another run's are never taken for ours."""

from __future__ import annotations

import re
from typing import Final

from protocol.messages import WeightVersion

START_LABEL: Final = "default"
"""What a server calls the weights that it was started with, if it is not told otherwise."""
_VERSION: Final = re.compile(r"(\d+)\.(\d+)")


class Labels:
    """The labels of one run."""

    def __init__(self, run_id: str) -> None:
        self._prefix = f"{run_id}/" if run_id else ""

    def of(self, version: WeightVersion) -> str:
        """What to call these weights in an update request."""
        return f"{self._prefix}{version}"

    def updating(self, version: WeightVersion) -> str:
        """What a paused server's weights are called until its update is done: if nobody is left to finish it, nobody
        knows which weights these are, and `parse` says so."""
        return f"{self._prefix}{version}+"

    def parse(self, label: str) -> WeightVersion | None:
        """The version that a label names. None: not one of this run, or unreadable. A server's first weights are taken
        for the student that every run starts from."""
        if label == START_LABEL:
            return WeightVersion(0, 0)
        match = _VERSION.fullmatch(label.removeprefix(self._prefix)) if label.startswith(self._prefix) else None
        return WeightVersion(int(match[1]), int(match[2])) if match is not None else None
