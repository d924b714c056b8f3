"""One sbatch script for a run: a component of the job for each group of hosts, and a job step for each role.

The run's launcher is on the first host. Other hosts join the run by its folder, which all hosts must see. A script that
Slurm starts again continues the run from its newest checkpoint.

A run with a store (`store`) shares no folder. Its folder may be on the first host's own disk, and the job goes on from
the store if it gets another one. The other hosts are sent an exported folder (launch.join.export) through their job
step's standard input; the keys in it are on no command line and in no file that others can read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stillhouse.launch.config.keys import Key
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.join.target import TRY_AGAIN_EXIT_CODE
from stillhouse.launch.render.submitted import shell_words
from stillhouse.launch.report.figures import plural
from stillhouse.launch.topology import REJOIN_S, HostGroup, flags_of_the_run, host_groups

HOME: Final = Path(__file__).resolve().parents[2]
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
    """Absolute; all hosts see it if they share a folder."""
    home: Path
    """Absolute: the clone of Stillhouse, on all hosts, with its virtual environment."""
    where: Path
    """Absolute, on all hosts: the folder that paths on the command line and in the configuration start from."""
    arguments: tuple[str, ...]
    """Words of the command line that describe the run, as the user typed them."""
    groups: tuple[HostGroup, ...]
    port: int
    shares_folder: bool = True
    """False: the run has a store."""
    options: tuple[str, ...] = ()
    """Further options of sbatch, for every component: --partition=gpu."""


def slurm_job(run_dir: Path, file: Path | None, keys: Sequence[tuple[Key, str]], config: RunConfig) -> SlurmJob:
    """The job of a run. `file`, `keys`: what the command line named. Raises ConfigError for what Slurm cannot run."""
    if not re.fullmatch(r"[A-Za-z0-9._-]+", run_dir.name):
        raise ConfigError(f"--run-dir: got the name {run_dir.name!r}, expected letters, digits, dots, dashes and _")
    described = ("--config", str(file.expanduser().absolute())) if file is not None else ()
    typed = (word for key, text in keys if key.name != "launch.backend" for word in (f"--{key.name}", text))
    return SlurmJob(
        name=run_dir.name,
        run_dir=run_dir,
        home=HOME,
        where=Path.cwd(),
        arguments=(*described, *typed),
        groups=host_groups(config),
        port=config.cluster.port,
        shares_folder=not config.store,
        options=shell_words("cluster.sbatch", config.cluster.sbatch),
    )


def sbatch_script(job: SlurmJob) -> str:
    """The whole script."""
    return "\n".join((*_header(job), *_body(job))) + "\n"


def _header(job: SlurmJob) -> Iterator[str]:
    command = shlex.join(("launch/cluster.py", "render", "slurm", "--run-dir", str(job.run_dir), *job.arguments))
    yield "#!/bin/bash"
    yield f"# Made by: {command}"
    yield f"#SBATCH --job-name={job.name}"
    yield f"#SBATCH --output={job.run_dir}.slurm-%j.log --open-mode=append"
    yield f"#SBATCH --requeue --signal=B:USR1@{STOP_S}"
    for index, group in enumerate(job.groups):
        if index:
            yield "#SBATCH hetjob"
        yield f"# {group.name}: {plural(len(group.workers), 'host')}"
        gpus = f" --gres=gpu:{group.host.gpus}" if group.host.gpus else ""
        yield (
            f"#SBATCH --nodes={len(group.workers)} --ntasks-per-node=1 --cpus-per-task={group.host.cpus} "
            f"--mem={group.host.memory_gib}G{gpus}"
        )
        if job.options:
            yield f"#SBATCH {' '.join(job.options)}"


def _body(job: SlurmJob) -> Iterator[str]:
    alone = len(job.groups) == 1
    yield ""
    yield f"cd {shlex.quote(str(job.where))} || exit 1"
    yield f"export RUN={shlex.quote(str(job.run_dir))} HERE={shlex.quote(str(job.home))} PYTHONUNBUFFERED=1"
    yield 'stillhouse() { exec "$HERE/.venv/bin/python" "$HERE/launch/cluster.py" "$@"; }'
    yield "export -f stillhouse"
    if not alone:
        yield from _address(job.port)
        yield from _joining() if job.shares_folder else _joining_exported()
    yield from _run_step(job)
    if not alone and not job.shares_folder:
        yield from _exported()
    for index, group in enumerate(job.groups):
        if index:
            yield from _join_step(index, group, shares_folder=job.shares_folder)
    yield from _ending(alone=alone, shares_folder=job.shares_folder)


def _address(port: int) -> Iterator[str]:
    yield ""
    yield "# The address of the first host, at which the others reach the run."
    yield 'first=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)'
    yield "name=$(scontrol --oneliner show node \"$first\" | grep -o ' NodeAddr=[^ ]*' | cut -d= -f2)"
    yield "ADDRESS=$(getent ahostsv4 \"$name\" | awk 'NR == 1 { print $1 }')"
    yield f'network=(--buffer.bind "tcp://${{ADDRESS:?has no IPv4 address}}:{port}" --weights.host "$ADDRESS")'


def _joining() -> Iterator[str]:
    yield ""
    yield "# Joins the run; again after 1 and 75: it broke off, or cannot be joined yet (docs/hosts.md)."
    yield 'export ENDED="$RUN.ended.$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"'
    yield "join_run() {"
    yield '    while [ ! -f "$ENDED" ]; do'
    yield '        if [ ! -f "$RUN/run.json" ]; then sleep 1; continue; fi'
    yield '        (stillhouse join "$RUN" "$@"); code=$?'
    yield f"        case $code in 1|75) sleep {REJOIN_S} ;; *) return $code ;; esac"
    yield "    done"
    yield "}"
    yield "export -f join_run"


def _joining_exported() -> Iterator[str]:
    yield ""
    yield "# Joins the run by what it gets on standard input: address, configuration, keys. Again after 1 and 75: it"
    yield "# broke off, or cannot be joined yet (docs/hosts.md)."
    yield "join_run() {"
    yield '    home=$(umask 077; mktemp -d) && tar -C "$home" -x || return 1'
    yield "    trap 'rm -rf \"$home/run/keys\"' EXIT"
    yield "    while true; do"
    yield '        (stillhouse join "$home/run" "$@" < /dev/null); code=$?'
    yield f"        case $code in 1|75) sleep {REJOIN_S} ;; *) return $code ;; esac"
    yield "    done"
    yield "}"
    yield "export -f join_run"


def _exported() -> Iterator[str]:
    yield ""
    yield "# What the other hosts need to join, in a folder that only you can read, once the run listens."
    yield "umask 077; export EXPORTED=$(mktemp -d)"
    yield "while kill -0 $run 2> /dev/null; do"
    yield '    [ -f "$RUN/run.json" ] || { sleep 1; continue; }'
    yield '    (stillhouse export "$RUN" "$EXPORTED/run") > "$EXPORTED/output" 2>&1; code=$?'
    yield "    case $code in"
    yield f"        0) break ;; {TRY_AGAIN_EXIT_CODE}) sleep 1 ;;  # {TRY_AGAIN_EXIT_CODE}: it does not listen yet"
    yield '        *) echo "nobody can join this run, so it is stopped:"; cat "$EXPORTED/output"'
    yield "           kill -TERM $run; break ;;"
    yield "    esac"
    yield "done >&2"
    yield 'tar -C "$EXPORTED" -cf "$EXPORTED/run.tar" run 2> /dev/null'


def _run_step(job: SlurmJob) -> Iterator[str]:
    words = shlex.join(job.arguments)
    network = "" if len(job.groups) == 1 else ' "${network[@]}"'
    yield ""
    yield "# The run: launcher, buffer, learner, and roles without hosts of their own; on the host of this script."
    yield "# If Slurm starts the job again, the run continues from its newest checkpoint."
    yield f'(stillhouse --run-dir "$RUN" --resume-or-start{network} --launch.status plain \\'
    yield f"    {words}{flags_of_the_run(job.groups)}) &"
    yield "run=$!"


def _join_step(index: int, group: HostGroup, *, shares_folder: bool) -> Iterator[str]:
    hosts = len(group.workers)
    yield ""
    yield f"# {group.label}: {sum(group.workers)}, on {plural(hosts, 'host')}"
    yield (
        f"srun --het-group={index} --nodes={hosts} --ntasks-per-node=1 --cpus-per-task={group.host.cpus} "
        "--kill-on-bad-exit=0 \\"
    )
    shares = " ".join(map(str, group.workers))
    yield f"    bash -c 'shares=({shares}); join_run {group.flag} ${{shares[SLURM_PROCID]}} \\"
    stdin = "" if shares_folder else ' < "$EXPORTED/run.tar"'
    yield f"        --name-prefix {group.label}-$SLURM_PROCID'{stdin} &"
    yield "joins+=($!)"


def _ending(*, alone: bool, shares_folder: bool) -> Iterator[str]:
    yield ""
    yield "# USR1: the time of the job is nearly over. TERM: you stop the run (scancel --signal=TERM --batch JOB)."
    yield "# In both cases the run writes a checkpoint; after USR1 the job is queued again and goes on from there."
    yield "again="
    yield "trap 'again=yes; kill -TERM $run' USR1"
    yield "trap 'kill -TERM $run' TERM"
    yield "while wait $run; code=$?; kill -0 $run 2> /dev/null; do :; done"
    if not alone:
        yield ""
        yield "# The other hosts leave by themselves when the run has ended."
        yield 'touch "$ENDED"' if shares_folder else 'rm -rf "$EXPORTED"'
        yield f"for _ in $(seq {JOINS_END_S}); do"
        yield '    kill -0 "${joins[@]}" 2> /dev/null || break'
        yield "    sleep 1"
        yield "done"
        yield 'kill "${joins[@]}" 2> /dev/null'
        yield 'wait; rm "$ENDED"' if shares_folder else "wait"
    yield '[ -z "$again" ] || scontrol requeue "$SLURM_JOB_ID"'
    yield "exit $code"
