"""One run from the command line to the exit code.

Exit codes: 0 the run finished; 1 it failed; 2 the command line, configuration, models or prompts are wrong, and nothing
was started; 3 the ledger does not balance; 5 an alarm stopped it (learner.stop_on_alarm); 128 + n the user stopped it
with signal n (130: Ctrl-C, 143: SIGTERM). Stopping is not a failure: what was trained is in a checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil

from stillhouse.launch.checks import preflight
from stillhouse.launch.checks.finding import Case
from stillhouse.launch.checks.preflight import Checked, check_recorded
from stillhouse.launch.checks.table import examined
from stillhouse.launch.config.command_line import CommandLine, parse_arguments, resolve_config
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.help import help_text
from stillhouse.launch.config.known_sets import describe_known_sets
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError, LaunchError, interrupted, refuse
from stillhouse.launch.machine.machine import pretended_machine
from stillhouse.launch.processes.local import LocalProcesses, worker_environment
from stillhouse.launch.processes.slots import worker_name
from stillhouse.launch.report.figures import plural
from stillhouse.launch.resume import check_resumed, describe_resumed, not_as_before, set_damaged_aside
from stillhouse.launch.runfolder import RunFolder, choose_path, expect_usable, resumes, unwritable
from stillhouse.launch.stages.run import is_staged, run_stages
from stillhouse.launch.terminal import lasting_output
from stillhouse.launch.topology import workers_text
from stillhouse.launch.workers.launch_plan import LaunchPlan, MakeBackend, preload_modules
from stillhouse.launch.workers.roles import entries_of
from stillhouse.learner.checkpoints.files import NOTHING_FOUND, FoundCheckpoint
from stillhouse.tracing.events import FOLDER


@lasting_output()
def main(arguments: Sequence[str], make_backend: MakeBackend = LocalProcesses) -> int:
    """Run the command; returns the exit code."""
    began_s = time.monotonic() - (time.time() - psutil.Process().create_time())
    try:
        line = parse_arguments(arguments)
        if line.help:
            print(help_text(line.topics))
            return 0
        if line.version:
            print(f"stillhouse {_version()}")
            return 0
        if line.resume_or_start:
            line = replace(line, resume=resumes(line.run_dir, line.name))
        if is_staged(line):
            return run_stages(line)
        with ExitStack() as stack:
            config = resolve_config(line)
            if config.launch.backend == "ray":
                config, make_backend = _on_ray(line, config, stack)
            return _start(line, config, make_backend, began_s)
    except LaunchError as error:
        return refuse(error)
    except KeyboardInterrupt:  # from then on the supervisor handles signals
        return interrupted()


def _on_ray(line: CommandLine, config: RunConfig, stack: ExitStack) -> tuple[RunConfig, MakeBackend]:
    from stillhouse.launch.ray.run import check_on_ray, on_ray  # the package ray is an extra

    former = choose_path(line.run_dir, resume=True, name=line.name) if line.resume else None
    if line.check:
        pretended = len(pretended_machine(line.gpus).gpus) if line.gpus else None
        run, lines = check_on_ray(config, former, pretended)
        print(*lines, sep="\n")
        return run, LocalProcesses
    return stack.enter_context(on_ray(config, former))


def _start(line: CommandLine, config: RunConfig, make_backend: MakeBackend, began_s: float) -> int:
    """Check everything, and start the run unless only the check was asked for."""
    checked = preflight.check(config, pretended_machine(line.gpus) if line.gpus else None)
    check_recorded(checked.config, resume=line.resume)
    path = choose_path(line.run_dir, resume=line.resume, name=line.name)
    here = not line.gpus and config.launch.backend == "local"
    if here:
        expect_usable(path, resume=line.resume)
    findings, refusing = examined(Case(checked.config, path, checked), here=here)
    if line.check:
        from stillhouse.launch.checks.check_command import check_run  # imports torch, which the launcher does without

        found = _found(line, checked.config)
        for said in describe_resumed(found, checked.config.steps) if line.resume else ():
            print(said)
        findings = [*check_run(checked.config, devices=not line.gpus), *findings]
        for finding in findings:
            print(finding.text() if finding.status == "ok" else f"{finding.status}: {finding.text()}")
        wrong = "; a start would be refused" if refusing else ""
        print(f"configuration, models and prompts are fine; nothing was started{wrong}")
        return 0
    if refusing:
        raise ConfigError(*(finding.text() for finding in refusing))
    for finding in findings:
        if finding.status in ("warning", "failed"):
            print(f"stillhouse: warning: {finding.text()}", file=sys.stderr)
    return _launch(line, checked, make_backend, began_s)


def _found(line: CommandLine, config: RunConfig) -> FoundCheckpoint:
    if not line.resume:
        return NOTHING_FOUND
    folder = choose_path(line.run_dir, resume=True, name=line.name)
    found = check_resumed(config, folder, read_prompts=line.check)
    for text in not_as_before(config, folder) if found.path else ():
        print(f"stillhouse: warning: {text}", file=sys.stderr)
    return found


def _launch(line: CommandLine, checked: Checked, make_backend: MakeBackend, began_s: float) -> int:
    found = _found(line, checked.config)
    with RunFolder.open(line.run_dir, resume=line.resume, name=line.name) as folder:
        config = checked.config
        plan = LaunchPlan(
            config=config,
            began_s=began_s,
            resume=line.resume,
            preload=preload_modules(config, checked.model_types),
            entries=entries_of(config),
            servers=checked.servers.plans,
            placement=checked.servers.placement,
        )
        return run(plan, folder, found=found, make_backend=make_backend)


def run(
    plan: LaunchPlan,
    folder: RunFolder,
    *,
    found: FoundCheckpoint = NOTHING_FOUND,
    make_backend: MakeBackend = LocalProcesses,
) -> int:
    """Run in an open folder and write summary.json there, whatever happens. `found`: the checkpoint that a resumed run
    continues from. Returns the exit code."""
    # Imported here: --help, --check and a refusal do without, and are there a quarter sooner.
    from stillhouse.launch.report.status import make_status
    from stillhouse.launch.report.summary import add_teachers, write_summary
    from stillhouse.launch.report.summary_table import print_summary
    from stillhouse.launch.report.teacher_accuracy import evaluate_teachers, longest_s, measured_teachers
    from stillhouse.launch.workers.supervisor import RunSupervisor

    config = plan.config
    try:
        write_config(config, folder.config_path)
        folder.keep_keys(own_workers(config), encrypted=config.buffer.encrypted)
        folder.log_launcher()
    except OSError as error:
        raise unwritable(folder.path, error) from error
    status = make_status(config.launch.status, config.launch.status_every_s)
    if config.launch.prometheus:
        from stillhouse.launch.report.prometheus import PublishedStatus

        status = PublishedStatus(status, folder.record.name, config.launch.prometheus)
    backend = make_backend(plan, folder)
    status.say(_headline(config, folder, backend.elsewhere, resume=plan.resume))
    for line in (*describe_resumed(found, config.steps), *set_damaged_aside(found)) if plan.resume else ():
        status.say(line)
    for key, said in describe_known_sets(config):
        status.say(f"{key}: {said}")
    if plan.placement.text:
        status.say(plan.placement.text)
    evaluate_teachers(config, folder, status.say)
    supervisor = RunSupervisor(plan, folder, status, backend)
    first_step = found.version.step if plan.resume and found.version is not None else 0
    summary = write_summary(
        config, folder, supervisor.run(), first_step=first_step, gpus=len(plan.placement.places.gpus)
    )
    folder.finish(summary.exit_code)
    if summary.ok and any(point.accuracy_sampled is not None for point in summary.eval):
        try:
            measured = measured_teachers(config, folder, longest_s(summary.wall_s), status.say)
            summary = add_teachers(summary, folder, measured)
        except KeyboardInterrupt:
            status.say("Ctrl-C: the teacher's accuracy is not measured; the run itself had ended")
    print_summary(summary, folder)
    if config.launch.trace:
        _print_trace(folder.path, Path(config.launch.trace).expanduser())
    return summary.exit_code


def _print_trace(run: Path, out: Path) -> None:
    """By `stillhouse trace`, which prints its figures too. What goes wrong is reported, and changes nothing."""
    words = ["trace", str(run), str(out)]
    command = [sys.executable, "-P", "-m", "stillhouse.launch.cluster", *words]
    done = subprocess.run(command, env=worker_environment(1), capture_output=True, encoding="utf-8", check=False)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    if done.returncode != 0:
        later = f"to write it later: stillhouse {shlex.join(words)}"
        print(f"stillhouse: no trace; the events are in {run / FOLDER}; {later}", file=sys.stderr)


def _version() -> str:
    """Version of the installed package; a clone that was never installed has none."""
    try:
        return importlib.metadata.version("stillhouse")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: run from a clone)"


def own_workers(config: RunConfig) -> list[str]:
    """Names of the actors and teachers that the run's own launcher starts; each has its own key."""
    counts = {"teacher": config.teachers, "actor": config.actors}
    return [worker_name(role, index) for role, n in counts.items() for index in range(n)]


def _headline(config: RunConfig, folder: RunFolder, elsewhere: str, *, resume: bool) -> str:
    what = "resuming run" if resume else "run"
    return (
        f"{what} {folder.record.name}: {plural(config.steps, 'step')}, {workers_text(config, elsewhere)}, "
        f"max staleness {config.buffer.max_staleness}; files in {folder.path}"
    )
