"""How well the teachers solve the run's own evaluation prompts.

    python -m launch.report.teacher_accuracy RUN_DIR LAUNCHER_PID      measures it, and prints it as JSON

It is measured once, when the run has ended well, by a process of its own (launch.report.local_evaluation), so that no
step waits for it. No torch here.

What cannot be measured is not shown: teachers on servers, a teacher that is the student's moving average, runs without
sampled evaluation answers, and what takes longer than `longest_s` allows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from launch.config.files import read_config
from launch.config.pools import TeacherPool, engine_of, teacher_pools
from launch.config.run import RunConfig
from launch.processes.lifeline import die_with_parent
from launch.processes.local import worker_environment
from launch.runfolder import RunFolder

LEAST_S: Final = 60.0
SHARE_OF_RUN: Final = 0.1
LOG_FILE: Final = "teacher_accuracy.log"


class MeasuredTeacher(msgspec.Struct, frozen=True, kw_only=True):
    """Of the teachers of one pool."""

    accuracy_sampled: float
    """Share of the prompts solved at temperature 1."""
    n_sampled: int
    """Prompts, one answer each: all of the student's evaluation that this pool grades."""


def measurable_pools(config: RunConfig) -> tuple[TeacherPool, ...]:
    """Pools whose model can write here as the student does."""
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
    """How long the measurement may take after a run of so many seconds."""
    return max(LEAST_S, SHARE_OF_RUN * wall_s)


def measured_teachers(
    config: RunConfig, folder: RunFolder, timeout_s: float, say: Callable[[str], None]
) -> Mapping[str, MeasuredTeacher]:
    """By pool; empty where nothing can be measured, where it fails or takes longer than `timeout_s`, and where Ctrl-C
    ends it. `say` tells the user that it begins, and why there is no figure."""
    if not measurable_pools(config):
        return {}
    say(f"measuring the teacher on the same evaluation prompts, for at most {timeout_s:.0f} s (Ctrl-C leaves it out)")
    with (folder.logs / LOG_FILE).open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "launch.report.teacher_accuracy", str(folder.path), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=output,
            env=worker_environment(config.launch.threads_per_worker),
            start_new_session=True,  # Ctrl-C in the terminal reaches the launcher only
        )
    with process:
        try:
            told, _ = process.communicate(timeout=timeout_s)
            return msgspec.json.decode(told.splitlines()[-1], type=dict[str, MeasuredTeacher])
        except subprocess.TimeoutExpired:
            why = f"it took longer than {timeout_s:.0f} s"
        except KeyboardInterrupt:
            why = "stopped"
        except (IndexError, msgspec.DecodeError):  # it left no figures
            why = f"it failed, see {folder.logs / LOG_FILE}"
        process.kill()
    say(f"the teacher's accuracy was not measured: {why}")
    return {}


def main() -> None:
    run_dir, launcher_pid = Path(sys.argv[1]), int(sys.argv[2])
    die_with_parent(launcher_pid)
    config = read_config(run_dir / "config.yaml")
    # After that, as it imports torch: for seconds nothing would end this process with its launcher.
    from launch.report.local_evaluation import measure_teachers

    print(msgspec.json.encode(measure_teachers(config)).decode())


if __name__ == "__main__":
    main()
