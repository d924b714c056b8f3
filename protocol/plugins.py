"""Extensions in installed packages and users' own modules: found by entry point, loaded by `module:attribute`.

It is in this package because environments, engines, objectives and weight transports all use it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any


def installed(group: str) -> dict[str, str]:
    """The entry points of all installed packages in this group: name -> `module:attribute`."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


def load(path: str) -> object:
    """The object that `module:attribute` names. Raises ImportError, AttributeError, ValueError, or any error of the
    module itself."""
    module_name, _, attribute = path.partition(":")
    return getattr(import_module(module_name), attribute)


def load_callable(path: str, option: str, expected: str = "a function") -> Callable[..., Any]:
    """What the user names by an option. Raises ValueError, with the option's name, for what cannot be loaded or
    called."""
    try:
        found = load(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{option} {path!r} cannot be loaded: {error}") from error
    if not callable(found):
        raise ValueError(f"{option} {path!r} is a {type(found).__name__}, expected {expected}")
    return found


def import_module(name: str) -> ModuleType:
    """A module of an installed package or of the working directory. Raises what `load` raises."""
    # The launcher starts Python with -P, but a user's module is in the folder where the command is typed. Last on the
    # path, so that no file there hides a module of ours.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)
