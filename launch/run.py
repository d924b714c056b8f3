"""One run from the command line to the exit code.

Exit codes: 0 the run finished; 1 it failed; 2 the command line, configuration, models or prompts are wrong (nothing
was started); 3 the ledger does not balance; 128 + n the user stopped it by signal n (130: Ctrl-C, 143: SIGTERM): that
is no failure, and what was trained is in a checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeAlias

import psutil

from launch.checks import preflight
from launch.checks.recorded import check_recorded
from launch.config.command_line import parse_arguments, resolve_config
from launch.config.files import write_config
from launch.config.help import help_text
from launch.config.pools import needs_no_teacher, worker_groups
from launch.config.run import RunConfig
from launch.errors import LaunchError, interrupted, refuse
from launch.machine.machine import pretended_machine
from launch.processes.backend import ProcessBackend
from launch.processes.local import local_processes
from launch.processes.slots import worker_name
from launch.report.status import make_status
from launch.report.summary import add_teachers, write_summary
from launch.report.summary_table import print_summary
from launch.report.teacher_accuracy import longest_s, measured_teachers
from launch.report.terminal import lasting_output
from launch.resume import check_resumed, describe_resumed, set_damaged_aside
from launch.runfolder import RunFolder, choose_path, unwritable
from launch.workers.launch_plan import LaunchPlan
from launch.workers.roles import PRELOADED, PRELOADED_WITH_TORCH
from launch.workers.supervisor import Supervisor
from launch.workers.work_folder import WorkFolder
from learner.checkpoints.files import NOTHING_FOUND, Found
from protocol.printable import LineFormatter

MakeBackend: TypeAlias = Callable[[LaunchPlan, WorkFolder], ProcessBackend]
"""What runs the workers of a plan, in a folder that exists."""


def main(arguments: Sequence[str], make_backend: MakeBackend = local_processes) -> int:
    """The exit code."""
    with lasting_output():
        return _main(arguments, make_backend)


def _version() -> str:
    """Of the installed package; a clone that was never installed has none."""
    try:
        return importlib.metadata.version("stillhouse")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: run from a clone)"


def _main(arguments: Sequence[str], make_backend: MakeBackend) -> int:
    began_s = time.monotonic() - (time.time() - psutil.Process().create_time())
    try:
        line = parse_arguments(arguments)
        if line.help:
            print(help_text(line.topics))
            return 0
        if line.version:
            print(f"stillhouse {_version()}")
            return 0
        config = resolve_config(line)
        checked = preflight.check(config, pretended_machine(line.gpus) if line.gpus else None)
        for warning in checked.warnings:
            print(f"stillhouse: warning: {warning}", file=sys.stderr)
        check_recorded(checked.config, resume=line.resume)
        found = NOTHING_FOUND
        if line.resume:
            folder = choose_path(line.run_dir, resume=True, name=line.name)
            found = check_resumed(checked.config, folder, read_prompts=line.check)
        if line.check:
            from launch.checks.check_command import check_run  # imports torch, which the launcher itself does without

            for told in describe_resumed(found) if line.resume else ():
                print(told)
            print(*check_run(checked.config, devices=not line.gpus), sep="\n")
            print(checked.server_report + "\n" if checked.server_report else "", end="")
            print(checked.placement.text)
            print(*checked.memory, sep="\n", end="\n" if checked.memory else "")
            for told in checked.not_here:
                print(f"not on this machine: {told}")
            print("configuration, models and prompts are fine; nothing was started")
            return 0
        plan = LaunchPlan(
            config=checked.config,
            began_s=began_s,
            resume=line.resume,
            preload=preload_modules(checked.config, checked.model_types),
            servers=tuple(checked.servers),
            placement=checked.placement,
        )
        with RunFolder.open(line.run_dir, resume=line.resume, name=line.name) as folder:
            return run(plan, folder, found=found, make_backend=make_backend)
    except LaunchError as error:
        return refuse(error)
    except KeyboardInterrupt:  # afterwards, signals are the supervisor's
        return interrupted()


def run(
    plan: LaunchPlan,
    folder: RunFolder,
    *,
    found: Found = NOTHING_FOUND,
    make_backend: MakeBackend = local_processes,
) -> int:
    """Run in an open folder; leaves summary.json there whatever happens. `found`: what a resumed one goes on from.
    Returns the exit code."""
    config = plan.config
    try:
        write_config(config, folder.config_path)
        folder.keep_keys(own_workers(config), encrypted=config.buffer.encrypted)
        log_to(folder.logs / "launcher.log")
    except OSError as error:
        raise unwritable(folder.path, error) from error
    status = make_status(config.launch.status, config.launch.status_every_s)
    status.say(_headline(config, folder, resume=plan.resume))
    for told in (*describe_resumed(found), *set_damaged_aside(found)) if plan.resume else ():
        status.say(told)
    if plan.placement.text:
        status.say(plan.placement.text)
    supervisor = Supervisor(plan, folder, status, make_backend(plan, folder))
    summary = write_summary(config, folder, supervisor.run())
    folder.finish(summary.exit_code)
    if summary.ok and any(point.accuracy_sampled is not None for point in summary.eval):
        try:
            measured = measured_teachers(config, folder, longest_s(summary.wall_s), status.say)
            summary = add_teachers(summary, folder, measured)
        except KeyboardInterrupt:
            status.say("Ctrl-C: the teacher's accuracy is not measured; the run itself was over")
    print_summary(summary, folder)
    return summary.exit_code


def own_workers(config: RunConfig) -> list[str]:
    """Names of the actors and teachers that the run's own launcher starts: each has a key of its own."""
    counts = {"teacher": config.teachers, "actor": config.actors}
    return [worker_name(role, index) for role, n in counts.items() for index in range(n)]


def preload_modules(
    config: RunConfig,
    model_types: Sequence[str],
    *,
    learner: bool = True,
    roles: Collection[str] = ("actor", "teacher"),
) -> tuple[str, ...]:
    """What the fork server imports before it forks: all that every worker of `roles` needs, the models' own modules
    among it (transformers would import them in each worker otherwise). Without torch where none of them has a model.
    `learner`: it is one of those that are forked."""
    groups = [group for group in worker_groups(config) if group.role in roles]
    needed = [*PRELOADED, *(module for group in groups for module in group.engine.preload(group.role))]
    if not any(group.engine.loads_model for group in groups):
        return tuple(dict.fromkeys(needed))
    transformers = importlib.util.find_spec("transformers")
    models: list[str] = []
    if transformers is not None and transformers.origin is not None:
        folder = Path(transformers.origin).parent / "models"
        for model_type in model_types:
            name = model_type.replace("-", "_")
            if (folder / name / f"modeling_{name}.py").is_file():
                models.append(f"transformers.models.{name}.modeling_{name}")
    with_torch = (*PRELOADED_WITH_TORCH, "learner.worker") if learner else PRELOADED_WITH_TORCH
    return tuple(dict.fromkeys((*with_torch, *needed, *models)))


def _headline(config: RunConfig, folder: RunFolder, *, resume: bool) -> str:
    what = "going on with run" if resume else "run"
    teachers = "no teacher (rewards only)" if needs_no_teacher(config) else f"{config.teachers} teachers"
    return (
        f"{what} {folder.record.name}: {config.steps} steps, {config.actors} actors, {teachers}, "
        f"max staleness {config.buffer.max_staleness}; all of it in {folder.path}"
    )


def log_to(file: Path) -> None:
    """The launcher's own log; the terminal belongs to the status."""
    to_file = logging.FileHandler(file)
    to_file.setFormatter(LineFormatter("launcher"))
    logging.basicConfig(level=logging.INFO, force=True, handlers=[to_file])
    logging.captureWarnings(True)
