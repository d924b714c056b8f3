"""The launcher. `from launch import Run` starts and watches a run from a notebook or a script (launch.notebook)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launch.notebook import Run as Run
    from launch.notebook import RunFailed as RunFailed


def __getattr__(name: str) -> object:
    """Import what is asked for, so that importing a module of this package imports no more than that."""
    if name in ("Run", "RunFailed"):
        from launch import notebook

        return getattr(notebook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
