"""Runs a replay, with a run folder, a trainer and evaluations in this process."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

import torch
from transformers import PreTrainedTokenizerBase

from stillhouse.launch.checks.threads import threads_alone
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.report.local_evaluation import LocalEvaluator
from stillhouse.launch.report.teacher_accuracy import evaluate_teachers
from stillhouse.launch.runfolder import RunFolder
from stillhouse.launch.terminal import StopRequests
from stillhouse.learner.assembly import TrainingParts, checkpoint_to_resume, open_reports
from stillhouse.learner.checkpoints.checkpoint import restore_rng
from stillhouse.learner.checkpoints.files import CHECKPOINTS, CheckpointError, newest
from stillhouse.learner.checkpoints.resume import first_trainer, stage_checkpoint
from stillhouse.learner.checkpoints.writer import CheckpointWriter, Write
from stillhouse.learner.evaluation.evaluation import EvalPlan, EvaluationResult, EvaluationRun
from stillhouse.learner.evaluation.sets import render_eval_sets
from stillhouse.learner.prompts.tasks import load_prompts
from stillhouse.learner.reports.metrics import newest_epoch
from stillhouse.learner.reports.progress import AccountFile, LearnerProgress
from stillhouse.learner.step.train_step import Trainer
from stillhouse.learner.steps import StepDone
from stillhouse.models.tokenizer import load_tokenizer, token_map_fingerprint
from stillhouse.protocol.handshake import vocab_tokens
from stillhouse.protocol.messages import Snapshot, WeightVersion
from stillhouse.recording.reader import Recording
from stillhouse.replay.plan import ReplayPlan, turns
from stillhouse.replay.training import Evaluate, Replay

SILENT_S: Final = 5.0
"""Longest time without a line."""
SUMMARY_FILE: Final = "replay.json"
ACCOUNTED: Final = ("eval", "eval_sets", "tokens_trained", "reverse_kl_first", "reverse_kl_last")
"""Parts of a learner's account that a replay has, too."""


class ReplayStopped(Exception):
    """A signal asked the replay to stop, and the step under way is done."""


@dataclass(frozen=True, slots=True)
class _Account:
    """replay.json: the account of a learner, and what it was that was replayed."""

    recording: Recording
    folder: RunFolder
    file: AccountFile
    progress: LearnerProgress
    began_s: float

    def end(self, code: int, reason: str) -> None:
        self.write(code, reason)
        self.folder.finish(code)
        _say(f"{self.progress.step} steps, {reason}; {self.folder.path}")

    def write(self, code: int | None = None, reason: str = "under way") -> None:
        """`code`: the exit code; None before the end."""
        last = newest(self.folder.path / CHECKPOINTS)
        about: dict[str, Any] = {
            "file": str(self.recording.path),
            "run": self.recording.header.run,
            "writer": self.recording.header.writer,
            "steps": self.progress.step,
            "checkpoint": "" if last is None else last.name,
            "reason": reason,
            "exit_code": code,
            "wall_s": time.monotonic() - self.began_s,
        }
        account = self.progress.account()
        self.file.write({name: account[name] for name in ACCOUNTED} | about)


def train(
    recording: Recording, config: RunConfig, plan: ReplayPlan, *, run_dir: Path | None, name: str, resume: bool
) -> int:
    """Train, evaluate and write checkpoints in a run folder. Returns the exit code. `resume`: continue in the folder
    `run_dir`, whose plan and configuration have been checked."""
    began_s = time.monotonic()
    torch.set_num_threads(threads_alone(config))
    torch.manual_seed(config.seed)
    tokenizer = load_tokenizer(config.models.student)
    recording.expect_vocabulary(token_map_fingerprint(tokenizer))
    recording.expect_top_k(config.learner.objective.needs_top_k_for)
    try:
        found = checkpoint_to_resume(run_dir) if resume and run_dir is not None else None
        n_vocab = vocab_tokens(tokenizer.get_vocab())
        trainer, state = first_trainer(config, found.path if found else None, vocab_tokens=n_vocab)
    except CheckpointError as error:
        raise ConfigError(*str(error).splitlines()) from error
    done = trainer.steps_done
    with closing(RunFolder.open(run_dir, resume=resume, name=name)) as folder, ExitStack() as stack:
        _begin(recording, config, folder, plan, steps_done=done)
        evaluate_teachers(config, folder, _say)
        stop = stack.enter_context(StopRequests(second_ends=True))
        said = stack.enter_context(_Said(done, config.steps))
        epoch = newest_epoch(folder.path)
        resumed = None if epoch is None else WeightVersion(epoch + 1, done)
        metrics, progress = open_reports(config, folder.path, step=done, resume=resumed)
        stack.callback(metrics.close)
        file = AccountFile(folder.path, metrics.unwritten, resume=resumed, name=SUMMARY_FILE)
        account = _Account(recording, folder, file, progress, began_s)

        def after_step(step: StepDone, epoch: int) -> None:
            said.stepped(step, progress, epoch)
            _raise_if_asked(stop)

        def stage(version: WeightVersion, _: Snapshot | None) -> Write:
            root, keep = folder.path / CHECKPOINTS, config.learner.keep_checkpoints
            return stage_checkpoint(root, version, trainer, tokenizer, keep=keep, metrics=progress.last)

        writer = CheckpointWriter(stage, progress, saved=lambda _: account.write())
        replay = Replay(
            TrainingParts(
                trainer=trainer,
                metrics=metrics,
                checkpoints=stack.enter_context(writer),
                config=config.learner,
                version=WeightVersion(0, done),
                steps=config.steps,
            ),
            recording,
            islice(turns(plan.batches, epochs=plan.epochs, order=plan.order, seed=config.seed), done, None),
            evaluate=_evaluations(config, tokenizer, trainer, stack, stop),
            say=_say,
            after_step=after_step,
        )
        if state is not None:
            restore_rng(state.rng)
        return _run(replay, account, stop)


def _run(replay: Replay, account: _Account, stop: StopRequests) -> int:
    code, reason = 0, "all batches trained"
    account.write()
    try:
        replay.run()
        reason = replay.ended_early or reason
    except ReplayStopped as asked:
        code, reason = stop.exit_code, str(asked)
        replay.checkpoint()
    except BaseException as error:
        account.end(1, f"{type(error).__name__}: {error}")
        raise
    account.end(code, reason)
    return code


def _evaluations(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, trainer: Trainer, stack: ExitStack, stop: StopRequests
) -> Evaluate | None:
    if not config.learner.eval_every:
        return None
    learner = config.learner
    own = load_prompts(learner.tasks, config.environments).evaluation
    prompts = render_eval_sets(learner, own, tokenizer, config.environments)
    evaluator = LocalEvaluator(config, check=lambda: _raise_if_asked(stop))
    stack.callback(evaluator.close)

    def evaluate(step: int, name: str) -> EvaluationResult:
        version, plan = WeightVersion(0, step), EvalPlan.of(learner, name)
        tasks = learner.eval_tasks(name)
        evaluation = EvaluationRun(tasks, prompts[name], tokenizer, version=version, seed=config.seed, plan=plan)
        return evaluator.run(evaluation, version, trainer.weights())

    return evaluate


class _Said:
    """What a replay prints: a line for some steps, at least every SILENT_S seconds where steps end that often, and one
    that says how long the present work takes where they do not (a slow step, an evaluation, a checkpoint)."""

    def __init__(self, steps_done: int, steps: int) -> None:
        self._step, self._steps = steps_done, steps
        self._said_s = self._began_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def stepped(self, done: StepDone, progress: LearnerProgress, epoch: int) -> None:
        now_s, step, figures = time.monotonic(), done.version.step, progress.last
        self._step, self._began_s = step, now_s
        regular = step % max(1, min(20, self._steps // 10)) == 0 or now_s - self._said_s >= SILENT_S
        if figures is not None and regular:
            self._said_s = now_s
            kl = "" if figures.reverse_kl is None else f"reverse KL {figures.reverse_kl:.4f}, "
            _say(
                f"step {step}/{self._steps}, epoch {epoch}: loss {figures.loss:.4f}, {kl}log-prob "
                f"{figures.logprob:.4f}, gradient {figures.grad_norm:.3g}"
            )

    def _watch(self) -> None:
        while not self._over.wait(SILENT_S / 5):
            now_s = time.monotonic()
            if now_s - self._said_s >= SILENT_S:
                self._said_s = now_s
                _say(f"step {self._step}/{self._steps} is done; working for {now_s - self._began_s:.0f} s since")


def _raise_if_asked(stop: StopRequests) -> None:
    if stop.first is not None:
        raise ReplayStopped(f"stopped by {stop.first.name}")


def _begin(recording: Recording, config: RunConfig, folder: RunFolder, plan: ReplayPlan, *, steps_done: int) -> None:
    write_config(config, folder.config_path)
    plan.write(folder.path)
    header, learner, objective = recording.header, config.learner, config.learner.objective
    own = "".join(f", {pool}: {divergence.name}" for pool, divergence in objective.teacher_divergences.items())
    going_on = f", going on from step {steps_done}" if folder.record.launches > 1 else ""
    _say(
        f"replay of {len(recording.batches)} batches of the run {header.run} (written by the {header.writer}, "
        f"configuration {header.config_digest[:12]}), {plan.epochs} epochs, {plan.order}{going_on}: "
        f"{config.models.student}, divergence {objective.divergence.name}{own}, importance "
        f"{objective.importance.name}, lr {learner.lr:g}, {config.steps} steps; all of it in {folder.path}"
    )


def _say(text: str) -> None:
    print(text, flush=True)
