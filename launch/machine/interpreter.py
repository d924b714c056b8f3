"""Python interpreters, looked at from outside: what each has, and which torch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Final

import msgspec

from launch.machine import torch_build
from launch.machine.torch_build import TorchBuild

LOOK_TIMEOUT_S: Final = 30.0


class Look(msgspec.Struct, frozen=True):
    """What an interpreter has. Looked for, not imported: importing an inference engine takes seconds."""

    missing: tuple[str, ...] = ()
    """Of the modules that were looked for."""
    torch: TorchBuild = TorchBuild()
    unusable: str = ""
    """Why it cannot be run at all."""


class Interpreters:
    """Looks at each interpreter once."""

    def __init__(self) -> None:
        self._looks: dict[tuple[Path, tuple[str, ...]], Look] = {}
        self._own: TorchBuild | None = None

    def look(self, python: Path, modules: tuple[str, ...] = ()) -> Look:
        """`modules`: looked for. The first look takes a fraction of a second."""
        if (python, modules) not in self._looks:
            self._looks[python, modules] = _look(python, modules)
        return self._looks[python, modules]

    def own(self) -> TorchBuild:
        """Of this process's interpreter, which runs the learner and all embedded engines."""
        self._own = self._own or torch_build.own_build()
        return self._own


def _look(python: Path, modules: tuple[str, ...]) -> Look:
    if not python.is_file() or not os.access(python, os.X_OK):
        return Look(unusable=f"no interpreter {python}")
    source = Path(torch_build.__file__).read_text(encoding="utf-8")
    try:
        done = subprocess.run(
            [python, "-c", source, *modules], capture_output=True, text=True, timeout=LOOK_TIMEOUT_S, check=True
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Look)
    except (OSError, subprocess.SubprocessError, IndexError, msgspec.DecodeError) as error:
        return Look(unusable=f"{python} cannot be run: {error}")
