"""What `--backend slurm` and `--backend k8s` share: a file in the run's folder says how the run was started."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from stillhouse.launch.config.command_line import CommandLine
from stillhouse.launch.errors import ConfigError, LaunchError
from stillhouse.launch.runfolder import read_record


def expect_no_run(run_dir: Path) -> None:
    """Raise LaunchError if a run is in this folder."""
    if (record := read_record(run_dir)) is not None:
        raise LaunchError(f"{run_dir} holds a run already ({record.state}); continue it with --resume")


def expect_submitted(file: Path, line: CommandLine, backend: str, *, allowed: Sequence[str] = ()) -> None:
    """A run that goes on is what it was, as `file` says. Raises LaunchError without it, and ConfigError for keys that
    would change it; those in `allowed` do not."""
    if not file.is_file():
        raise LaunchError(f"--resume: {file} is not there: this run was not started with --backend {backend}")
    given = ["--config"] if line.config is not None else []
    given += [f"--{key.name}" for key, _ in line.overrides if key.name not in ("launch.backend", *allowed)]
    if given:
        raise ConfigError(
            f"--resume: got {', '.join(given)}, but the run goes on as {file} says; change it there, or leave it out"
        )


def shell_words(key: str, text: str) -> tuple[str, ...]:
    """The words of a key that has options for another program. Raises ConfigError."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"{key}: got {text!r}, which a shell cannot read: {error}") from None
