"""`--backend k8s`: the files of a run go into its folder, and from there to kubectl.

Like a job of Slurm, the run outlives this command. Its folder here has only the configuration, the keys and the
manifests; its checkpoints are on its volume, or in its store."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from stillhouse.launch.config.command_line import CommandLine
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import LaunchError
from stillhouse.launch.render.kubernetes_files import SECRETS, expect_name, kubernetes_files
from stillhouse.launch.render.submitted import expect_no_run, expect_submitted, shell_words
from stillhouse.launch.report.summary_table import own_command
from stillhouse.launch.runfolder import choose_path, unwritable
from stillhouse.launch.stored_run import CONFIG
from stillhouse.launch.topology import host_groups, said_of_groups
from stillhouse.protocol.atomic_file import write_atomic

MANIFESTS: Final = "manifests.yaml"
KUBECTL_S: Final = 120.0
"""How long one call of kubectl may take."""

LOGGED: Final = re.compile(r"[IWEF]\d{4} ")
"""Begins a line of kubectl's own log, which repeats what it says afterwards."""


def apply(line: CommandLine, config: RunConfig) -> int:
    """Start a run, or one that was started so before (`--resume`). Returns the exit code. Raises LaunchError."""
    cluster = Kubectl(config)
    run_dir = choose_path(line.run_dir, resume=line.resume, name=line.name)
    name = run_dir.name
    expect_name(name)
    if line.resume:
        expect_submitted(run_dir / MANIFESTS, line, "k8s", allowed=("cluster.kubectl",))
        _expect_no_pod(cluster, name)
        cluster.call("delete", "jobs", "--selector", f"app={name}", "--ignore-not-found")
    else:
        expect_no_run(run_dir)
        if there := cluster.call("get", "jobs,persistentvolumeclaims", "--selector", f"app={name}", "--output", "name"):
            raise LaunchError(
                f"{name} is on this cluster already ({', '.join(there.split())}); continue it with --resume, from the "
                "folder that it was started with, or choose another --name"
            )
        _write(run_dir, config)
    cluster.call("apply", "--filename", str(run_dir / SECRETS), "--filename", str(run_dir / MANIFESTS))
    kubectl = shlex.join(cluster.command)
    print(f"run {name} is on Kubernetes")
    print(f"  files    {run_dir}")
    print(f"  pods     {kubectl} get pods --selector app={name}")
    print(f"  log      {kubectl} logs --follow job/{name}-run")
    print(f"  stop     {kubectl} delete job {name}-run --cascade=foreground    (in order, with a checkpoint)")
    print(f"  resume   {own_command()} --backend k8s --resume --run-dir {run_dir}")
    print(f"  remove   {kubectl} delete all,configmaps,secrets,persistentvolumeclaims --selector app={name}")
    return 0


def check_apply(config: RunConfig) -> Iterator[str]:
    """What would be asked of Kubernetes, in lines for the user. Raises LaunchError without kubectl or the right to
    make Jobs, and ConfigError for a configuration that cannot be spread."""
    groups = host_groups(config)
    cluster = Kubectl(config)
    cluster.call("auth", "can-i", "create", "jobs.batch")
    yield f"Kubernetes: {shlex.join(cluster.command)}; Jobs may be made"
    yield from said_of_groups(groups)


class Kubectl:
    """kubectl with the options of the run."""

    def __init__(self, config: RunConfig) -> None:
        """Raises LaunchError if there is no kubectl, and ConfigError for options that a shell cannot read."""
        if shutil.which("kubectl") is None:
            raise LaunchError(
                "launch.backend: got k8s, but there is no kubectl in PATH here; use a machine that has it, or print "
                "the manifests for one: stillhouse render k8s"
            )
        self.command = ("kubectl", *shell_words("cluster.kubectl", config.cluster.kubectl))

    def call(self, *words: str) -> str:
        """What kubectl prints. Raises LaunchError with what it says if it fails."""
        command = shlex.join((*self.command, *words))
        try:
            done = subprocess.run(
                (*self.command, *words),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=KUBECTL_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"kubectl could not be run: {error}; the command was: {command}") from error
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            said = "\n".join(line for line in lines if not LOGGED.match(line)).strip() or "\n".join(lines)
            raise LaunchError(f"kubectl refused: {said}; the command was: {command} (its options: cluster.kubectl)")
        return done.stdout.strip()


def _write(run_dir: Path, config: RunConfig) -> None:
    """The files of a new run. The manifests come last: with them the run can be resumed."""
    groups = host_groups(config)
    try:
        text = kubernetes_files(config, groups, run_dir.name, run_dir)
        write_config(config, run_dir / CONFIG)
        write_atomic(run_dir / MANIFESTS, text.encode())
    except OSError as error:
        raise unwritable(run_dir, error) from error


def _expect_no_pod(cluster: Kubectl, name: str) -> None:
    """Two pods of one run would write the same checkpoints."""
    ended = ("Succeeded", "Failed")
    phases = '{range .items[*]}{.metadata.name}{" "}{.status.phase}{"\\n"}{end}'
    text = cluster.call("get", "pods", "--selector", f"app={name},part=run", "--output", f"jsonpath={phases}")
    alive = [pod for pod, _, phase in (said.partition(" ") for said in text.splitlines()) if phase not in ended]
    if alive:
        raise LaunchError(
            f"--resume: the run goes on in {', '.join(alive)}; stop it first, or wait until it has stopped: "
            f"{shlex.join(cluster.command)} delete job {name}-run --cascade=foreground"
        )
