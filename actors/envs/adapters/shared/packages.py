"""Imports the packages that adapters stand on. Each is an extra of ours; a missing one is a line that says which."""

from __future__ import annotations

import importlib
from typing import Any


class MissingPackage(ImportError):
    """The package that an environment needs is not installed; the message names it and the command that installs it."""


def import_package(module: str, *, environment: str, package: str, extra: str) -> Any:
    """The module of a package that need not be there. Any, because type checks run without it too.

    Raises MissingPackage, and whatever the module raises when it is there."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is installed, and something that it needs itself is not
        raise MissingPackage(
            f"environment {environment!r} needs the package {package}: pip install -e '.[{extra}]'"
        ) from error
