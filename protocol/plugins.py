"""Extensions in installed packages and users' own modules: found by entry point, loaded by `module:attribute`.

It is in this package because environments, engines, objectives and weight transports all use it.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any


def installed(group: str) -> dict[str, str]:
    """The entry points of all installed packages in this group: name -> `module:attribute`."""
    return {entry.name: entry.value for entry in entry_points(group=group)}


class CannotLoad(ValueError):
    """`module:attribute` names nothing, or its module fails while it is imported."""


def load(path: str) -> object:
    """The object that `module:attribute` names. Raises CannotLoad, whose cause is the error."""
    module_name, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise CannotLoad(f"cannot load {path!r}: {error}") from error
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        where = traceback.extract_tb(error.__traceback__)[-1]
        at = f" ({where.filename}, line {where.lineno})"
        raise CannotLoad(f"cannot load {path!r}: {type(error).__name__}: {error}{at}") from error


def load_callable(path: str, option: str, expected: str = "a function") -> Callable[..., Any]:
    """What the user names by an option. Raises CannotLoad, with the option's name, also for what cannot be called."""
    try:
        found = load(path)
    except CannotLoad as error:
        raise CannotLoad(f"{option}: {error}") from error.__cause__
    if not callable(found):
        raise CannotLoad(f"{option}: {path!r} is a {type(found).__name__}, expected {expected}")
    return found


def import_module(name: str) -> ModuleType:
    """A module of an installed package or of the working directory. Raises whatever it raises."""
    # The launcher starts Python with -P, but a user's module is in the folder where the command is typed. Last on the
    # path, so that no file there hides a module of ours.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    return importlib.import_module(name)
