"""stages.json in the folder of the whole run: what each stage is, and how far it came. Written before and after each
step of a stage, as a whole, so that a killed launcher leaves the one or the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from stillhouse.launch.errors import LaunchError
from stillhouse.protocol.atomic_file import write_atomic

STATE: Final = "stages.json"
FOLDER: Final = "stages"


class StageState(msgspec.Struct, kw_only=True):
    """One stage. Paths are relative to the folder of the whole run."""

    name: str
    folder: str
    text: str
    epochs: int
    config: dict[str, Any]
    """The resolved configuration, with the models that it was checked with."""
    models_from: Mapping[str, str]
    steps_given: bool
    flags: tuple[str, ...] = ()
    """Keys that flags of the command line have set."""
    models: dict[str, str] = {}
    """Key of a model -> folder of the earlier stage's student, since the stage began."""
    sources: dict[str, str] = {}
    """Key of a model -> SHA-256 of the manifest of the checkpoint that it comes from."""
    phases: list[str] = []
    """Commands that have ended well, in order: write, replay or run, export."""
    begun: bool = False
    done: bool = False
    result: str = ""
    """Folder of the student that it ended with."""
    checkpoint: str = ""
    """Checkpoint of that student."""
    wall_s: float = 0.0
    """Time in all launches that ended in order."""


class ChainState(msgspec.Struct, kw_only=True):
    """stages.json."""

    format: int = 1
    stages: list[StageState]

    def write(self, folder: Path) -> None:
        """Raises OSError."""
        write_atomic(folder / STATE, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")


def read_state(folder: Path) -> ChainState | None:
    """None for a folder without stages. Raises LaunchError."""
    file = folder / STATE
    if not file.is_file():
        return None
    try:
        state = msgspec.json.decode(file.read_bytes(), type=ChainState)
    except msgspec.DecodeError as error:
        raise LaunchError(f"{file} is not of this version: {error}; put it back from a copy") from error
    if state.format != 1:
        raise LaunchError(f"{file} has format {state.format}, expected 1; resume with the release that wrote it")
    return state
