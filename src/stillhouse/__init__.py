"""Stillhouse: on-policy distillation of language models. The parts of this package are the folders beside src/, each
linked here by its name.

`from stillhouse import Run` starts and watches a run from a notebook or a script (stillhouse.tools.notebook)."""

# Why it is so: docs/decisions/rooms.md

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from stillhouse.tools.notebook import Run as Run
    from stillhouse.tools.notebook import RunFailed as RunFailed

SOURCES: Final = Path(__file__).resolve().parent.parent
"""The folder on whose path `import stillhouse` works: src/ of a checkout, or site-packages."""


def __getattr__(name: str) -> object:
    """Import what is asked for, so that importing a part of this package imports no more than that."""
    if name in ("Run", "RunFailed"):
        from stillhouse.tools import notebook

        return getattr(notebook, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
