"""The Python that SGLang's servers run in: which one, whether it has SGLang, and which torch it has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec

from engines.sglang.config import ServerConfig
from launch.machine import torch_build
from launch.machine.torch_build import TorchBuild
from sglang_server.servers import DEFAULT_PYTHON

LOOK_TIMEOUT_S: Final = 30.0
LOOKED_FOR: Final = ("sglang", "triton")


class Look(msgspec.Struct, frozen=True):
    """What an interpreter has. Looked for, not imported: importing SGLang takes seconds."""

    missing: tuple[str, ...] = ()
    """Of LOOKED_FOR."""
    torch: TorchBuild = TorchBuild()
    unusable: str = ""
    """Why it cannot be run at all."""


class Interpreters:
    """Looks at each interpreter once."""

    def __init__(self) -> None:
        self._looks: dict[Path, Look] = {}
        self._own: TorchBuild | None = None

    def look(self, python: Path) -> Look:
        """The first look takes a fraction of a second."""
        if python not in self._looks:
            self._looks[python] = _look(python)
        return self._looks[python]

    def own(self) -> TorchBuild:
        """Of this process's interpreter, which runs the learner and all embedded engines."""
        self._own = self._own or torch_build.own_build()
        return self._own


def _look(python: Path) -> Look:
    if not python.is_file() or not os.access(python, os.X_OK):
        return Look(unusable=f"no interpreter {python}")
    source = Path(torch_build.__file__).read_text(encoding="utf-8")
    try:
        done = subprocess.run(
            [python, "-c", source, *LOOKED_FOR], capture_output=True, text=True, timeout=LOOK_TIMEOUT_S, check=True
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=Look)
    except (OSError, subprocess.SubprocessError, IndexError, msgspec.DecodeError) as error:
        return Look(unusable=f"{python} cannot be run: {error}")


def choose_python(server: ServerConfig) -> Path:
    """`server.python`, or the environment of `make sglang-cpu`, or the interpreter that runs this."""
    if server.python:
        return Path(server.python).expanduser().absolute()
    return DEFAULT_PYTHON if DEFAULT_PYTHON.exists() or server.device == "cpu" else Path(sys.executable)


def needs_shim(server: ServerConfig, python: Path) -> bool:
    """Whether the servers are forked from sglang_server's zygote: on a CPU, in the environment made for it. A user's
    own interpreter has a real build of SGLang."""
    return server.device == "cpu" and python == DEFAULT_PYTHON


def lacks_sglang(key: str, server: ServerConfig, python: Path, look: Look) -> str | None:
    """What to tell the user when `python` cannot run servers, else None. `server.device` is cpu or cuda."""
    make = "; `make sglang-cpu` makes one" if server.device == "cpu" else "; name one that has it"
    if look.unusable:
        return f"{key}.server.python: {look.unusable}{make}"
    needed = LOOKED_FOR if server.device == "cuda" and python == DEFAULT_PYTHON else LOOKED_FOR[:1]
    if not (missing := " and no ".join(name for name in needed if name in look.missing)):
        return None
    return f"{key}.server.python: {python} has no {missing}, expected an interpreter that can run SGLang{make}"
