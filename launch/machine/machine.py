"""This machine: its GPUs, and what its Python interpreters have. Found without importing torch in this process.

Machines can also be pretended (`--check --gpus 8`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import psutil

from stillhouse.launch.errors import ConfigError
from stillhouse.launch.machine import torch_build
from stillhouse.launch.machine.torch_build import TorchBuild
from stillhouse.protocol.control_groups import groups_with

NVIDIA_SMI_TIMEOUT_S: Final = 20.0
TORCH_TIMEOUT_S: Final = 60.0
NVIDIA_NODE: Final = "nvidiactl"
GPU_NODES: Final = (NVIDIA_NODE, "kfd", "dxg")
"""Nodes in /dev. If one of these exists, torch may find a GPU that nvidia-smi does not list (ROCm, WSL)."""
LOOK_TIMEOUT_S: Final = 30.0
PRETENDED_GIB: Final = 80.0
COUNT_BY_TORCH: Final = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"


class Machine(NamedTuple):
    """The GPUs that a run can be placed on."""

    gpus: tuple[str, ...] = ()
    """Names (numbers, or the entries of CUDA_VISIBLE_DEVICES) of the GPUs that a process started here sees. The torch
    device cuda:2 is the third of them."""
    gib: tuple[float, ...] = ()
    """Memory of each in GiB; empty when unknown."""
    unlisted: str = ""
    """Set when there is a driver but no way to count its GPUs: what was tried."""
    pretended: bool = False
    host_gib: float = 0.0
    """Memory of the host, or of this container; 0 when unknown."""
    cores: float = 0.0
    """Cores for the processes that are placed on it; 0: unknown, or others have them."""


NO_GPUS: Final = Machine()
MEMORY_LIMITS: Final = ("memory.max", "memory.limit_in_bytes")
"""Files of a control group, in versions 2 and 1."""


def host_gib(root: Path = Path("/")) -> float:
    """Memory of this host in GiB, or less if a control group of this process, or one above it, has a limit. `root`: of
    proc and sys."""
    total = psutil.virtual_memory().total
    for group in groups_with("memory", root):
        for file in MEMORY_LIMITS:
            with suppress(OSError, ValueError):  # not there, or "max"
                total = min(total, int((group / file).read_text(encoding="utf-8")))
    return total / 2**30


def pretended_machine(text: str) -> Machine:
    """Parse --gpus: `8`, or `8x40` for GPUs of 40 GiB each. Raises ConfigError."""
    match = re.fullmatch(r"(\d+)(?:x(\d+(?:\.\d+)?))?", text)
    n = int(match[1]) if match else 0
    gib = float(match[2] or PRETENDED_GIB) if match else 0.0
    if not 1 <= n <= 1024 or gib <= 0:
        raise ConfigError(
            f"--gpus: got {text!r}, expected a number of GPUs to pretend, e.g. 8 ({PRETENDED_GIB:g} GiB each), or with "
            "the memory of each in GiB, e.g. 8x40"
        )
    return Machine(tuple(map(str, range(n))), (gib,) * n, pretended=True)


def find_machine(
    environment: Mapping[str, str] = os.environ,
    *,
    proc: Path = Path("/proc/driver/nvidia/gpus"),
    dev: Path = Path("/dev"),
    python: str = sys.executable,
) -> Machine:
    """This machine's visible GPUs: from nvidia-smi; if that is not in PATH or fails, from the driver's files in /proc;
    else, where a GPU's device node exists, from torch in a process of its own."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    command = shutil.which("nvidia-smi", path=environment.get("PATH"))
    listed = _output([command, "-L"], environment) if command is not None else None
    if listed is not None:
        uuids = re.findall(r"^GPU \d+:.*?\(UUID: ([^)]*)\)", listed, re.MULTILINE)
        return _visible(uuids, chosen, _memory(command, environment))
    if uuids := _from_proc(proc, dev):
        return _visible(uuids, chosen, ())
    if (chosen is not None and not chosen.strip()) or not any((dev / node).exists() for node in GPU_NODES):
        return Machine()
    counted = (_output([python, "-c", COUNT_BY_TORCH], environment, TORCH_TIMEOUT_S) or "").strip()
    if counted.isdecimal() and int(counted):  # torch counts only those that the variable allows
        names = [name.strip() for name in chosen.split(",")] if chosen else [str(i) for i in range(int(counted))]
        return Machine(tuple(names[: int(counted)]))
    if not (dev / NVIDIA_NODE).exists():
        return Machine()  # nodes of ROCm and WSL also exist without a GPU that torch could use
    smi = "nvidia-smi fails" if command is not None else "nvidia-smi is not in PATH"
    return Machine(unlisted=f"{smi}, {proc} names none, and torch of {python} finds none")


def _visible(uuids: Sequence[str], chosen: str | None, gib: Sequence[float]) -> Machine:
    """As in CUDA, the first entry of CUDA_VISIBLE_DEVICES that is not a GPU ends the list."""
    known = dict(enumerate(gib)) if len(gib) == len(uuids) else {}
    if chosen is None:
        return Machine(tuple(str(i) for i in range(len(uuids))), tuple(known.values()))
    names: list[str] = []
    indices: list[int] = []
    for name in (part.strip() for part in chosen.split(",")):
        index = int(name) if name.isdecimal() else uuids.index(name) if name in uuids else len(uuids)
        if index >= len(uuids):
            break
        names.append(name)
        indices.append(index)
    return Machine(tuple(names), tuple(known[index] for index in indices if index in known))


def _from_proc(proc: Path, dev: Path) -> list[str]:
    """UUIDs in the order of the PCI bus, as nvidia-smi numbers them. Only GPUs whose device node exists: a container
    may see the files of all GPUs and have the nodes of some."""
    uuids: list[str] = []
    for file in sorted(proc.glob("*/information")):
        try:
            fields = dict(re.findall(r"^([^:\n]+):\s*(.*?)\s*$", file.read_text(encoding="utf-8"), re.MULTILINE))
        except OSError:
            continue
        minor = fields.get("Device Minor", "")
        if minor.isdecimal() and (dev / f"nvidia{minor}").exists():
            uuids.append(fields.get("GPU UUID", ""))
    return uuids


def _memory(command: str | None, environment: Mapping[str, str]) -> tuple[float, ...]:
    """GiB of each GPU; empty when nvidia-smi does not report it."""
    printed = _output([str(command), "--query-gpu=memory.total", "--format=csv,noheader,nounits"], environment)
    figures = [line.strip() for line in (printed or "").split("\n") if line.strip()]
    return tuple(float(figure) / 1024 for figure in figures) if all(map(str.isdecimal, figures)) else ()


def _output(
    command: Sequence[str], environment: Mapping[str, str], limit_s: float = NVIDIA_SMI_TIMEOUT_S
) -> str | None:
    """Standard output of the command; None when it fails or cannot be run."""
    try:
        return subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=limit_s, check=True, env=environment
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None


class InstalledPackages(msgspec.Struct, frozen=True):
    """What an interpreter has installed. Nothing is imported: importing an inference engine takes seconds."""

    missing: tuple[str, ...] = ()
    """Modules that were looked for and not found."""
    torch: TorchBuild = TorchBuild()
    unusable: str = ""
    """Why it cannot be run at all; empty if it can."""


class Interpreters:
    """Inspects interpreters, each only once."""

    def __init__(self) -> None:
        self._looks: dict[tuple[Path, tuple[str, ...]], InstalledPackages] = {}
        self._own: TorchBuild | None = None

    def look(self, python: Path, modules: tuple[str, ...] = ()) -> InstalledPackages:
        """Look for `modules`; the first look takes a fraction of a second."""
        if (python, modules) not in self._looks:
            self._looks[python, modules] = _look(python, modules)
        return self._looks[python, modules]

    def own(self) -> TorchBuild:
        """Build of this process's torch, which the learner and all embedded engines use."""
        self._own = self._own or torch_build.own_build()
        return self._own


def _look(python: Path, modules: tuple[str, ...]) -> InstalledPackages:
    if not python.is_file() or not os.access(python, os.X_OK):
        return InstalledPackages(unusable=f"no interpreter {python}")
    source = Path(torch_build.__file__).read_text(encoding="utf-8")
    try:
        done = subprocess.run(
            [python, "-c", source, *modules], capture_output=True, encoding="utf-8", timeout=LOOK_TIMEOUT_S, check=True
        )
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=InstalledPackages)
    except (OSError, subprocess.SubprocessError, IndexError, msgspec.DecodeError) as error:
        return InstalledPackages(unusable=f"{python} cannot be run: {error}")
