"""Finds trackers by name: Weights & Biases, MLflow, those of installed packages, and `module:Class`. No torch.

A package adds its own in its pyproject.toml (docs/metrics.md has the interface):

    [project.entry-points."stillhouse.trackers"]
    mine = "my_package.tracker:MyTracker"
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol, cast

import msgspec

from stillhouse.learner.reports.settings import Setting
from stillhouse.protocol.plugins import CannotLoad, installed, load

ENTRY_POINT_GROUP: Final = "stillhouse.trackers"
BUILT_IN: Final = {
    "wandb": "stillhouse.learner.reports.trackers.wandb_tracker:WandbTracker",
    "mlflow": "stillhouse.learner.reports.trackers.mlflow_tracker:MlflowTracker",
}
NEEDED: Final = {"wandb": ("wandb",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""Packages that a built-in tracker needs, beyond those of Stillhouse."""


class TrackedRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a tracker is told about the run."""

    name: str
    """Name of the run, which is that of its folder."""
    folder: Path
    """A folder of the tracker's own in the run folder. It exists, and is there again when the run is resumed: keep in
    it the id by which the tracker's service knows the run."""
    settings: Mapping[str, Setting]
    """Every key of the configuration; what may be a secret is hidden."""


class Tracker(Protocol):
    """Sends the figures of a run to a service or a file. All calls come from one thread that does nothing else. Any of
    them may raise: the row is counted as lost, and training goes on. It is made without arguments."""

    def start(self, run: TrackedRun) -> str:
        """Open the run, or the one that `run.folder` knows. Returns where it can be seen. If it raises, it is called
        again later."""
        ...

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Record the figures of one optimizer step or evaluation, by tag (docs/metrics.md). Steps may come twice or go
        back when a run is resumed, and an evaluation comes after later steps. A figure may be NaN or infinite."""
        ...

    def finish(self, ok: bool | None) -> None:
        """The last call. `ok`: whether the run finished or failed; None if it was stopped, and may be resumed."""
        ...


class UnknownTracker(ValueError):
    """There is no tracker of this name, or it cannot be loaded."""


def check_tracker(name: str) -> None:
    """Raise UnknownTracker for an unknown name, or a package that is not installed. Imports nothing of it."""
    known = known_trackers()
    if name not in known and ":" not in name:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownTracker(
            f"{name}: unknown tracker, expected one of {', '.join(sorted(known))}, module:Class, or an entry point in "
            f"the group {ENTRY_POINT_GROUP!r}{hint}"
        )
    missing = [package for package in NEEDED.get(name, ()) if find_spec(package) is None]
    if missing:
        raise UnknownTracker(
            f"{name} needs {', '.join(missing)}, which this environment lacks: pip install -e '.[{name}]' "
            "(make trackers, in a clone)"
        )


def known_trackers() -> dict[str, str]:
    """Name -> `module:Class`. A package cannot take a built-in name."""
    return installed(ENTRY_POINT_GROUP) | BUILT_IN


def make_tracker(name: str) -> Tracker:
    """A new tracker. Raises UnknownTracker, and whatever its class raises."""
    try:
        made: Any = load(known_trackers().get(name, name))
    except CannotLoad as error:
        raise UnknownTracker(f"{name}: {error}") from error
    return cast(Tracker, made())
