"""The Python that SGLang's servers run in: which one, and whether it has SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from engines.sglang_config import ServerConfig
from sglang_cpu.servers import DEFAULT_PYTHON

LOOK: Final = "import importlib.util as u, sys; print(*[name for name in sys.argv[1:] if u.find_spec(name) is None])"
LOOK_TIMEOUT_S: Final = 30.0


def choose_python(server: ServerConfig) -> Path:
    """`server.python`, or the environment of `make sglang-cpu`, or the interpreter that runs this."""
    if server.python:
        return Path(server.python).expanduser().absolute()
    return DEFAULT_PYTHON if DEFAULT_PYTHON.exists() or server.device == "cpu" else Path(sys.executable)


def needs_shim(server: ServerConfig, python: Path) -> bool:
    """Whether the servers are forked from sglang_cpu's zygote: on a CPU, in the environment made for it. An interpreter
    of the user's own has a real build of SGLang."""
    return server.device == "cpu" and python == DEFAULT_PYTHON


def lacks_sglang(key: str, server: ServerConfig, python: Path) -> str | None:
    """What to tell the user when `python` cannot run servers, else None. Does not import SGLang: that takes seconds."""
    on_gpu_without_shim = server.device == "cuda" and python == DEFAULT_PYTHON
    make = "; `make sglang-cpu` makes one" if server.device == "cpu" else "; name one that has it"
    if not python.is_file() or not os.access(python, os.X_OK):
        return f"{key}.server.python: no interpreter {python}{make}"
    try:
        done = subprocess.run(
            [python, "-c", LOOK, "sglang", *(["triton"] if on_gpu_without_shim else [])],
            capture_output=True,
            text=True,
            timeout=LOOK_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{key}.server.python: {python} cannot be run: {error}"
    if not (missing := " and no ".join(done.stdout.split())):
        return None
    return f"{key}.server.python: {python} has no {missing}, expected an interpreter that can run SGLang{make}"
