"""What installed packages and users' own modules bring: found by entry point, loaded by `module:attribute`.

It stands here because environments, engines, objectives and weight transports all have members of this kind, and the
arrows point down to this layer.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points
from pathlib import Path


def installed(group: str) -> dict[str, str]:
    """Name -> `module:attribute`, of the entry points of all installed packages in this group."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def load(path: str) -> object:
    """What `module:attribute` names; modules in the working directory are found too. Raises what the import raises,
    ImportError, AttributeError or ValueError among others."""
    module_name, _, attribute = path.partition(":")
    _look_in_working_directory()
    return getattr(importlib.import_module(module_name), attribute)


def _look_in_working_directory() -> None:
    """After everything else, in the launcher as in the workers: a user's module lies where the command is typed, and
    the launcher starts Python with -P."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
