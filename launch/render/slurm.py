"""One sbatch script for a run: a component of the job for each group of hosts, and a job step for each role.

The run's launcher is on the first host. Other hosts join the run by its folder, which all hosts must see. A script that
Slurm starts again continues the run from its newest checkpoint."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stillhouse.launch.config.keys import Key
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.render.template import render_template
from stillhouse.launch.topology import REJOIN_S, HostGroup, flags_of_the_run, host_groups

STOP_S: Final = 180
"""Seconds before the end of the job's time at which Slurm tells the script to stop the run and to requeue itself. A
learner finishes its step and writes a checkpoint in this time."""
JOINS_END_S: Final = 60
"""Seconds that the joined hosts have to leave after the run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What to render."""

    name: str
    run_dir: Path
    """Absolute; all hosts see it."""
    python: Path
    """On all hosts: an interpreter that has Stillhouse."""
    where: Path
    """Absolute, on all hosts: the folder that paths on the command line and in the configuration start from."""
    arguments: tuple[str, ...]
    """Words of the command line that describe the run, as the user typed them."""
    groups: tuple[HostGroup, ...]
    port: int
    options: str = ""
    """Further options of sbatch, for every component: --partition=gpu."""


def slurm_job(run_dir: Path, file: Path | None, keys: Sequence[tuple[Key, str]], config: RunConfig) -> SlurmJob:
    """The job of a run. `file`, `keys`: what the command line named. Raises ConfigError for what Slurm cannot run."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", run_dir.name):
        raise ConfigError(f"--run-dir: got the name {run_dir.name!r}, expected letters, digits, dots, dashes and _")
    options = config.cluster.sbatch
    try:
        shlex.split(options)
    except ValueError as error:
        raise ConfigError(f"cluster.sbatch: got {options!r}, which a shell cannot read: {error}") from None
    described = ("--config", str(file.expanduser().absolute())) if file is not None else ()
    return SlurmJob(
        name=run_dir.name,
        run_dir=run_dir,
        python=Path(sys.executable),
        where=Path.cwd(),
        arguments=(*described, *(word for key, text in keys for word in (f"--{key.name}", text))),
        groups=host_groups(config),
        port=config.cluster.port,
        options=options,
    )


def sbatch_script(job: SlurmJob) -> str:
    """The whole script."""
    return render_template(
        "slurm.sbatch.j2",
        job=job,
        joining=job.groups[1:],
        no_workers=flags_of_the_run(job.groups),
        rejoin_s=REJOIN_S,
        stop_s=STOP_S,
        joins_end_s=JOINS_END_S,
    )
