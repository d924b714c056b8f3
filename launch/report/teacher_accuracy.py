"""Measures how well the teachers solve the evaluation prompts.

    python -m stillhouse.launch.report.teacher_accuracy RUN_DIR LAUNCHER_PID   measures, and prints the result as JSON

It is measured once, by a process of its own: with `learner.eval_teacher` on all sets before the first step, which waits
for it; else on the run's own set after a run that ended well.

Not measured: teachers on servers, a teacher that is the student's moving average, runs without sampled evaluation
answers, and measurements that take longer than `longest_s` allows.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from stillhouse.launch.checks.threads import threads_alone
from stillhouse.launch.config.files import read_config
from stillhouse.launch.config.pools import measurable_pools
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError, LaunchError
from stillhouse.launch.processes.local import worker_environment
from stillhouse.launch.runfolder import RunFolder
from stillhouse.launch.stages.state import FOLDER as STAGES
from stillhouse.learner.evaluation.figures import MeasuredTeacher
from stillhouse.learner.evaluation.until import TEACHER_EVAL, Measured
from stillhouse.protocol.atomic_file import not_a_link, write_atomic
from stillhouse.protocol.children import die_with_parent
from stillhouse.protocol.messages import WeightVersion

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from stillhouse.launch.config.pools import TeacherPool
    from stillhouse.launch.report.local_evaluation import LocalEvaluator
    from stillhouse.learner.evaluation.evaluation import EvalPrompt
    from stillhouse.learner.prompts.records import PromptRecord

LEAST_S: Final = 60.0
SHARE_OF_RUN: Final = 0.1
SAY_EVERY_S: Final = 5.0
LOG_FILE: Final = "teacher_accuracy.log"


def longest_s(wall_s: float) -> float:
    """Longest time for the measurement after a run of `wall_s` seconds."""
    return max(LEAST_S, SHARE_OF_RUN * wall_s)


def evaluate_teachers(config: RunConfig, folder: RunFolder, say: Callable[[str], None]) -> None:
    """For `learner.eval_teacher`: measure on all sets and write the file that the learner reads, unless it is there.
    Raises LaunchError if that fails and the run's end depends on it."""
    file = folder.path / TEACHER_EVAL
    if not config.learner.eval_teacher or file.exists():
        return
    if (earlier := _earlier_stage(config, folder.path)) is not None:
        say(f"the teacher's accuracies are those of {earlier}: the same teacher, evaluation sets and settings")
        write_atomic(file, (earlier / TEACHER_EVAL).read_bytes())
        return
    measured = _measured_teachers(config, folder, config.learner.stall_timeout_s, say)
    if measured:
        write_atomic(file, msgspec.json.format(msgspec.json.encode(measured), indent=2))
    elif config.learner.until.gap is not None:
        raise LaunchError(
            f"learner.until.gap: the teacher was not measured, see {folder.logs / LOG_FILE}; expected an embedded "
            "teacher that answers all evaluation prompts within learner.stall_timeout_s"
        )


def _earlier_stage(config: RunConfig, run_dir: Path) -> Path | None:
    """Folder of an earlier stage of the same run in which the same was measured."""
    if run_dir.parent.name != STAGES:
        return None
    for file in sorted(run_dir.parent.glob(f"*/{TEACHER_EVAL}")):
        with suppress(ConfigError, OSError):
            if _asked(read_config(file.with_name("config.yaml"))) == _asked(config):
                return file.parent
    return None


def _asked(config: RunConfig) -> tuple[object, ...]:
    """All that a measurement depends on: teachers, sets, seed, how prompts are rendered and answers judged. Training
    prompts count where some of them are held out."""
    replace, learner = msgspec.structs.replace, config.learner
    sets = [learner.eval_tasks(name) for name in learner.eval_names]
    asked = [replace(one, prompts="" if one.eval_prompts else one.prompts, group_size=1) for one in sets]
    turns = [one.max_turns for one in learner.eval_sets.values()]
    teachers = [(pool.name, pool.config.models.teacher, pool.config.teacher) for pool in measurable_pools(config)]
    student = Path(config.models.student)
    files = [student / name for name in ("tokenizer.json", "chat_template.jinja")]
    rendered = [file.read_bytes() if file.is_file() else b"" for file in files]
    return config.seed, asked, turns, teachers, rendered, config.environments, config.actor


def measured_teachers(
    config: RunConfig, folder: RunFolder, timeout_s: float, say: Callable[[str], None]
) -> Mapping[str, MeasuredTeacher]:
    """Results on the run's own set by pool: those of `evaluate_teachers`, or of a measurement now. There are none where
    nothing can be measured, or where it fails, takes longer than `timeout_s` or is ended by Ctrl-C. `say` informs the
    user when it begins, and why there is no figure."""
    file = folder.path / TEACHER_EVAL
    found = (
        msgspec.json.decode(file.read_bytes(), type=Measured)
        if file.is_file()
        else _measured_teachers(config, folder, timeout_s, say)
    )
    return {pool: own[""] for pool, own in found.items() if "" in own and own[""].accuracy_sampled is not None}


def _measured_teachers(config: RunConfig, folder: RunFolder, timeout_s: float, say: Callable[[str], None]) -> Measured:
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
            return msgspec.json.decode(printed.splitlines()[-1], type=Measured)
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


def measure_teachers(config: RunConfig) -> Measured:
    """Let the teachers of each measurable pool answer the evaluation prompts with the pool's tags, one answer each,
    with the seeds that the student has. Where a prompt has a privileged text they read that. The run's own set is
    answered at temperature 1; with `learner.eval_teacher` all sets are, and their greedy half too. A set is left out
    of a pool if any answer is missing or was not judged."""
    # Imported here because they import torch, which the launcher does without.
    from stillhouse.launch.report.local_evaluation import LocalEvaluator
    from stillhouse.learner.evaluation.sets import records_of
    from stillhouse.models.tokenizer import load_tokenizer

    tokenizer, learner = load_tokenizer(config.models.student), config.learner
    records = {
        name: records_of(learner, name, config.environments)
        for name in (learner.eval_names if learner.eval_teacher else ("",))
    }
    measured: Measured = {}
    for pool in measurable_pools(config):
        other = pool.config.teacher.tokenizer == "other"
        own = load_tokenizer(pool.config.models.teacher) if other else tokenizer
        evaluator = LocalEvaluator(config, check=lambda: None, writer=pool)
        try:
            for name, rows in records.items():
                one = _measured(config, pool, name, rows, evaluator, tokenizer, own)
                if one is not None:
                    measured.setdefault(pool.name, {})[name] = one
        finally:
            evaluator.close()
    return measured


def _measured(
    config: RunConfig,
    pool: TeacherPool,
    name: str,
    rows: Sequence[PromptRecord],
    evaluator: LocalEvaluator,
    tokenizer: PreTrainedTokenizerBase,
    own: PreTrainedTokenizerBase,
) -> MeasuredTeacher | None:
    """The figures of one pool on one set. `own`: the tokenizer of its teachers."""
    from stillhouse.learner.evaluation.evaluation import EvalPlan, EvaluationRun, render_eval_set
    from stillhouse.learner.prompts.rendering import NONE

    tasks = config.learner.eval_tasks(name)
    prompts = render_eval_set(rows, tokenizer, tasks, {pool.name: own} if own is not tokenizer else {}).prompts
    n_greedy = tasks.eval_greedy if config.learner.eval_teacher else 0
    version = WeightVersion(0, 0)
    read: dict[str, list[EvalPrompt]] = {}
    for half, n in (("greedy", n_greedy), ("sampled", tasks.eval_sampled)):
        read[half] = [
            dataclasses.replace(one, ids=one.teacher_ids if len(one.teacher_ids) else one.ids, teacher_ids=NONE)
            for one in prompts[:n]
            if pool.name in tasks.teachers_for(one.tag)
        ]
    longest = max(read.values(), key=len)  # each half is its beginning
    unscored = msgspec.structs.replace(
        tasks, eval_greedy=len(read["greedy"]), eval_sampled=len(read["sampled"]), eval_samples=1, routes={}
    )
    plan = EvalPlan.of(config.learner, name)
    evaluation = EvaluationRun(unscored, longest, own, version=version, seed=config.seed, plan=plan)
    result = evaluator.run(evaluation, version, None)
    if result.failed or result.missing or result.no_reward or not longest:
        return None
    return MeasuredTeacher(
        accuracy_sampled=result.accuracy_sampled,
        n_sampled=result.n_sampled or 0,
        accuracy_greedy=result.accuracy_greedy,
        n_greedy=result.n_greedy or 0,
    )


def main() -> None:
    """Entry of the measuring process."""
    run_dir, launcher_pid = Path(sys.argv[1]), int(sys.argv[2])
    die_with_parent(launcher_pid)  # before torch is imported: for seconds nothing else would end this process
    print(msgspec.json.encode(measure_teachers(read_config(run_dir / "config.yaml"))).decode())


if __name__ == "__main__":
    main()
