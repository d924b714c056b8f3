"""`--backend slurm`: the script of a run goes into its folder, and from there to sbatch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stillhouse.launch.config.command_line import CommandLine
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import LaunchError
from stillhouse.launch.render.slurm import sbatch_script, slurm_job
from stillhouse.launch.render.submitted import expect_no_run, expect_submitted
from stillhouse.launch.report.figures import plural
from stillhouse.launch.report.summary_table import own_command
from stillhouse.launch.runfolder import SCRIPT, choose_path, unwritable
from stillhouse.launch.topology import host_groups, said_of_groups
from stillhouse.protocol.atomic_file import write_atomic

SBATCH_S: Final = 60.0
"""How long sbatch may take; it answers when the controller has the job."""


def submit(line: CommandLine, config: RunConfig) -> int:
    """Submit a run, or one that has a script again (`--resume`). Returns the exit code. Raises LaunchError."""
    sbatch = _sbatch()
    run_dir = choose_path(line.run_dir, resume=line.resume, name=line.name)
    script = run_dir / SCRIPT
    if line.resume:
        expect_submitted(script, line, "slurm")
    else:
        expect_no_run(run_dir)
        text = sbatch_script(slurm_job(run_dir, line.config, line.overrides, config))
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            write_atomic(script, text.encode())
        except OSError as error:
            raise unwritable(run_dir, error) from error
    job = _submitted(sbatch, script)
    print(f"run {run_dir.name} is job {job} of Slurm")
    print(f"  script   {script}")
    print(f"  log      {run_dir}.slurm-{job}.log")
    print(f"  stop     scancel --signal=TERM --batch {job}    (in order, with a checkpoint)")
    print(f"  resume   {own_command()} --backend slurm --resume --run-dir {run_dir}")
    return 0


def check_submission(config: RunConfig) -> Iterator[str]:
    """What would be asked of Slurm, in lines for the user. Raises LaunchError without sbatch, and ConfigError for a
    configuration that cannot be spread."""
    groups = host_groups(config)
    yield f"Slurm: {_sbatch()}; {plural(len(groups), 'group')} of hosts"
    yield from said_of_groups(groups)


def _sbatch() -> str:
    found = shutil.which("sbatch")
    if found is None:
        raise LaunchError(
            "launch.backend: got slurm, but there is no sbatch in PATH here; use a machine from which jobs can be "
            "submitted, or print the script for one: stillhouse render slurm"
        )
    return found


def _submitted(sbatch: str, script: Path) -> str:
    """Number of the job. Raises LaunchError with what sbatch said."""
    command = [sbatch, "--parsable", str(script)]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=SBATCH_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"sbatch could not be run: {error}; squeue shows whether the job is there") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()
        raise LaunchError(f"sbatch refused the job: {said}; the script is {script}, its options: cluster.sbatch")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)
    return done.stdout.strip().split(";")[0]
