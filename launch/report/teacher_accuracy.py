"""Measures how well the teachers solve the run's own evaluation prompts.

    python -m stillhouse.launch.report.teacher_accuracy RUN_DIR LAUNCHER_PID   measures, and prints the result as JSON

It is measured once, after a run that ended well, by a process of its own, so that no step waits for it.

Not measured: teachers on servers, a teacher that is the student's moving average, runs without sampled evaluation
answers, and measurements that take longer than `longest_s` allows.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from stillhouse.launch.checks.threads import threads_alone
from stillhouse.launch.config.files import read_config
from stillhouse.launch.config.pools import TeacherPool, engine_of, teacher_pools
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.processes.local import worker_environment
from stillhouse.launch.runfolder import RunFolder
from stillhouse.protocol.atomic_file import not_a_link
from stillhouse.protocol.children import die_with_parent
from stillhouse.protocol.messages import WeightVersion

LEAST_S: Final = 60.0
SHARE_OF_RUN: Final = 0.1
SAY_EVERY_S: Final = 5.0
LOG_FILE: Final = "teacher_accuracy.log"


class MeasuredTeacher(msgspec.Struct, frozen=True, kw_only=True):
    """Accuracy of the teachers of one pool."""

    accuracy_sampled: float
    """Share of the prompts solved at temperature 1."""
    n_sampled: int
    """Prompts, with one answer each: all prompts of the student's evaluation that this pool scores."""


def measurable_pools(config: RunConfig) -> tuple[TeacherPool, ...]:
    """Pools whose model can write in this process as the student does."""
    learner = config.learner
    if not learner.eval_every or not learner.tasks.eval_sampled or learner.frozen:
        return ()
    if not engine_of(config, "actor").loads_model:
        return ()
    average = learner.ema.pool if learner.ema.decay else None
    return tuple(
        pool
        for pool in teacher_pools(config)
        if engine_of(pool.config, "teacher").loads_model and pool.config.teachers and pool.name != average
    )


def longest_s(wall_s: float) -> float:
    """Longest time for the measurement after a run of `wall_s` seconds."""
    return max(LEAST_S, SHARE_OF_RUN * wall_s)


def measured_teachers(
    config: RunConfig, folder: RunFolder, timeout_s: float, say: Callable[[str], None]
) -> Mapping[str, MeasuredTeacher]:
    """Run the measurement. Returns results by pool: none where nothing can be measured, or where it fails, takes longer
    than `timeout_s` or is ended by Ctrl-C. `say` informs the user when it begins, and why there is no figure."""
    if not measurable_pools(config):
        return {}
    say(f"measuring the teacher on the same evaluation prompts, for at most {timeout_s:.0f} s (Ctrl-C skips it)")
    with open(folder.logs / LOG_FILE, "ab", opener=not_a_link) as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-m",
                "stillhouse.launch.report.teacher_accuracy",
                str(folder.path),
                str(os.getpid()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            env=worker_environment(threads_alone(config)),
            start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
        )
    with process:
        try:
            printed = _printed_by(process, timeout_s, say)
            return msgspec.json.decode(printed.splitlines()[-1], type=dict[str, MeasuredTeacher])
        except subprocess.TimeoutExpired:
            why = f"it took longer than {timeout_s:.0f} s"
        except KeyboardInterrupt:
            why = "stopped"
        except (IndexError, msgspec.DecodeError):  # it left no figures
            why = f"it failed, see {folder.logs / LOG_FILE}"
        process.kill()
    say(f"the teacher's accuracy was not measured: {why}")
    return {}


def _printed_by(process: subprocess.Popen[bytes], timeout_s: float, say: Callable[[str], None]) -> bytes:
    """The output of the process, with a line for the user every few seconds meanwhile. Raises TimeoutExpired."""
    began_s = time.monotonic()
    while True:
        left_s = began_s + timeout_s - time.monotonic()
        try:
            return process.communicate(timeout=max(0.0, min(SAY_EVERY_S, left_s)))[0]
        except subprocess.TimeoutExpired:
            if left_s <= SAY_EVERY_S:
                raise
            say(f"measuring the teacher: {time.monotonic() - began_s:.0f} of at most {timeout_s:.0f} s")


def measure_teachers(config: RunConfig) -> dict[str, MeasuredTeacher]:
    """Let the teachers of each measurable pool answer the run's own evaluation prompts with the pool's tags: one answer
    each at temperature 1, with the seeds that the student had. Where a prompt has a privileged text they read that. A
    pool is left out if any answer is missing or was not judged."""
    # Imported here because they import torch, which the launcher does without.
    from stillhouse.launch.report.local_evaluation import LocalEvaluator
    from stillhouse.learner.evaluation.evaluation import EvaluationRun, render_eval_set
    from stillhouse.learner.prompts.rendering import NONE
    from stillhouse.learner.prompts.tasks import load_prompts
    from stillhouse.models.tokenizer import load_tokenizer

    tokenizer, tasks = load_tokenizer(config.models.student), config.learner.tasks
    records = load_prompts(tasks, config.environments).evaluation
    unscored = msgspec.structs.replace(tasks, eval_greedy=0, eval_samples=1, routes={})
    version = WeightVersion(0, 0)
    measured: dict[str, MeasuredTeacher] = {}
    for pool in measurable_pools(config):
        other = pool.config.teacher.tokenizer == "other"
        own = load_tokenizer(pool.config.models.teacher) if other else tokenizer
        prompts = render_eval_set(records, tokenizer, tasks, {pool.name: own} if other else {}).prompts
        read = [
            dataclasses.replace(
                prompt, ids=prompt.teacher_ids if len(prompt.teacher_ids) else prompt.ids, teacher_ids=NONE
            )
            for prompt in prompts[: tasks.eval_sampled]
            if pool.name in tasks.teachers_for(prompt.tag)
        ]
        evaluator = LocalEvaluator(config, check=lambda: None, writer=pool)
        try:
            evaluation = EvaluationRun(unscored, read, own, version=version, seed=config.seed)
            result = evaluator.run(evaluation, version, None)
        finally:
            evaluator.close()
        if result.accuracy_sampled is not None and not (result.failed or result.missing or result.no_reward):
            measured[pool.name] = MeasuredTeacher(
                accuracy_sampled=result.accuracy_sampled, n_sampled=result.n_sampled or 0
            )
    return measured


def main() -> None:
    """Entry of the measuring process."""
    run_dir, launcher_pid = Path(sys.argv[1]), int(sys.argv[2])
    die_with_parent(launcher_pid)  # before torch is imported: for seconds nothing else would end this process
    print(msgspec.json.encode(measure_teachers(read_config(run_dir / "config.yaml"))).decode())


if __name__ == "__main__":
    main()
