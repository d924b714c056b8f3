"""`cluster.py render SCHEDULER`: prints the file with which a scheduler starts a run on several hosts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from launch.config.command_line import CommandLine, resolve_config, split_words
from launch.errors import ConfigError, LaunchError, refuse
from launch.render.hosts import host_groups
from launch.render.slurm import SlurmJob, sbatch_script

HOME: Final = Path(__file__).resolve().parents[2]
USAGE: Final = """\
usage: cluster.py render slurm --run-dir DIR [--config FILE] [--KEY VALUE ...] [--sbatch=OPTIONS] > job.sbatch

Prints a script for sbatch that starts the run on several hosts. It has a job step for each role, and continues from the
newest checkpoint when Slurm starts it again. The section `cluster` says how many workers share a host, and what each
host has; all other keys are those of a run. docs/cluster.md has an example.

  --run-dir DIR      folder of the run; all hosts must see it under this path, as they must see this clone
  --sbatch=OPTIONS   further options of sbatch, in one word: --sbatch="--partition=gpu --time=24:00:00"
  --config FILE      configuration of the run
  --KEY VALUE        any key of a run; cluster.py --help explains all keys, --help cluster those of hosts
"""


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit code."""
    try:
        words = split_words(arguments, own=("run_dir", "config", "sbatch"), switches=("help",), positional=1)
        if "help" in words.switches:
            print(USAGE, end="")
            return 0
        if words.positional != ("slurm",):
            got = " ".join(words.positional) or "nothing"
            raise ConfigError(f"render: got {got}, expected slurm; --help shows how")
        if "run_dir" not in words.own:
            raise ConfigError("--run-dir: got none, expected the folder of the run, which all hosts see")
        run_dir = Path(words.own["run_dir"]).expanduser().absolute()
        if run_dir.name != plain_name(run_dir.name):
            raise ConfigError(f"--run-dir: got the name {run_dir.name!r}, expected letters, digits, dots, dashes, _")
        file = Path(words.own["config"]).expanduser().absolute() if "config" in words.own else None
        config = resolve_config(CommandLine(config=file, overrides=words.overrides))
        described = ("--config", str(file)) if file is not None else ()
        job = SlurmJob(
            name=run_dir.name,
            run_dir=run_dir,
            home=HOME,
            arguments=(*described, *(word for key, text in words.overrides for word in (f"--{key.name}", text))),
            groups=host_groups(config),
            port=config.cluster.port,
            options=tuple(shlex.split(words.own.get("sbatch", ""))),
        )
    except LaunchError as error:
        return refuse(error)
    print(sbatch_script(job), end="")
    return 0


def plain_name(name: str) -> str:
    """The name with `-` for characters that schedulers do not take in the name of a job."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)
