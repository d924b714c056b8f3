"""Kills this process before or after a named function. Python imports it at its start when its folder is on PYTHONPATH.

Only tests.sim.chaos.traps puts it there; nothing of the product knows of it. The environment says

    STILLHOUSE_TRAP_POINTS   module:function,module:Class.method,...   which functions can be trapped
    STILLHOUSE_TRAP_FOLDER   where traps are set

and a trap is a file FOLDER/<point>.before or .after that holds `n passer victim...`: when the process `passer` passes
there for the n-th time, the victims get SIGKILL, of which it may be the last. A function is patched as soon as its
module has been imported, so that who imports it by name gets the patched one; a module that is run by `python -m` is
not patched.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

POINTS: dict[str, list[str]] = {}
"""Module -> names in it."""
for _point in filter(None, os.environ.get("STILLHOUSE_TRAP_POINTS", "").split(",")):
    POINTS.setdefault(_point.partition(":")[0], []).append(_point.partition(":")[2])
FOLDER = Path(os.environ.get("STILLHOUSE_TRAP_FOLDER", "."))


def pass_by(trap: str) -> None:
    """Springs the trap if it is set for this process and its turn has come."""
    if not os.path.exists(trap):  # noqa: PTH110 - on every call of the function
        return
    with contextlib.suppress(OSError):
        n, passer, *victims = map(int, Path(trap).read_text(encoding="utf-8").split())
        if passer != os.getpid():
            return
        if n > 1:
            draft = Path(f"{trap}.draft")
            draft.write_text(" ".join(map(str, (n - 1, passer, *victims))), encoding="utf-8")
            draft.replace(trap)
            return
        Path(trap).rename(f"{trap}.sprung")
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def trapped(function: FunctionType, point: str) -> Callable[..., Any]:
    before, after = str(FOLDER / f"{point}.before"), str(FOLDER / f"{point}.after")

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        pass_by(before)
        result = function(*args, **kwargs)
        pass_by(after)
        return result

    return call


class Patching(Loader):
    """A module's own loader, and the patching behind it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # its resources and source, for who asks for them

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for name in POINTS[module.__name__]:
            path, _, last = name.rpartition(".")
            owner = functools.reduce(getattr, filter(None, path.split(".")), module)
            setattr(owner, last, trapped(vars(owner)[last], f"{module.__name__}:{name}"))


class Finder:
    """Finds the modules with points as all other finders do, and gives them a loader that patches."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in POINTS:
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target) if finder is not Finder else None
            if spec is not None and spec.loader is not None:
                spec.loader = Patching(spec.loader)
                return spec
        return None


if POINTS:
    sys.meta_path.insert(0, Finder)
