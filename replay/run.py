"""Runs a replay, with a run folder, a trainer and evaluations in this process, or compares gradients."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Final, Self

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.launch.checks.threads import threads_alone
from stillhouse.launch.config.files import write_config
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.errors import ConfigError
from stillhouse.launch.report.local_evaluation import LocalEvaluator
from stillhouse.launch.runfolder import RunFolder
from stillhouse.learner.checkpoints.checkpoint import (
    LearnerState,
    capture_rng,
    restore_rng,
    save_checkpoint,
)
from stillhouse.learner.checkpoints.files import CHECKPOINTS, CheckpointError, go_on_from, newest, set_aside
from stillhouse.learner.checkpoints.resume import first_trainer
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.evaluation.evaluation import EvalPlan, EvaluationResult, EvaluationRun
from stillhouse.learner.evaluation.figures import describe
from stillhouse.learner.evaluation.sets import render_eval_sets
from stillhouse.learner.prompts.tasks import load_prompts
from stillhouse.learner.reports.metrics import MetricsWriter, newest_epoch
from stillhouse.learner.reports.settings import all_settings, compared_settings
from stillhouse.learner.reports.step_metrics import StepMetrics
from stillhouse.learner.reports.trackers.feed import Trackers
from stillhouse.learner.sources import recorded_batch
from stillhouse.learner.step.make_trainer import make_trainer
from stillhouse.learner.step.teacher_heads import teacher_heads
from stillhouse.learner.step.train_step import Trainer
from stillhouse.learner.steps import SourceBatch
from stillhouse.models.tokenizer import load_tokenizer, token_map_fingerprint
from stillhouse.protocol.atomic_file import write_atomic
from stillhouse.protocol.handshake import vocab_tokens
from stillhouse.protocol.messages import WeightVersion
from stillhouse.recording.reader import Recording
from stillhouse.replay.compare import compare
from stillhouse.replay.plan import ReplayPlan, turns, with_divergence
from stillhouse.replay.training import Evaluate, Replay, ReplayProgress

log = logging.getLogger(__name__)

SILENT_S: Final = 5.0
"""Longest time without a line."""
SUMMARY_FILE: Final = "replay.json"
EVAL_FIELDS: Final = (
    *("name", "step", "accuracy_greedy", "accuracy_sampled", "reverse_kl", "n_greedy", "n_sampled", "at_k", "tags"),
)
"""Fields of each EvaluationResult that it contains."""


class ReplayStopped(Exception):
    """A signal asked the replay to stop, and the step under way is done."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


def train(
    recording: Recording, config: RunConfig, plan: ReplayPlan, *, run_dir: Path | None, name: str, resume: bool
) -> int:
    """Train, evaluate and write checkpoints in a run folder. Returns the exit code. `resume`: continue in the folder
    `run_dir`, whose plan and configuration have been checked."""
    torch.set_num_threads(threads_alone(config))
    torch.manual_seed(config.seed)
    began_s = time.monotonic()
    tokenizer = load_tokenizer(config.models.student)
    recording.expect_vocabulary(token_map_fingerprint(tokenizer))
    recording.expect_top_k(config.learner.objective.needs_top_k_for)
    trainer, state = _start(config, tokenizer, run_dir if resume else None)
    former = msgspec.convert(state.tasks, ReplayProgress) if state is not None else ReplayProgress()
    order = turns(plan.batches, epochs=plan.epochs, order=plan.order, seed=config.seed)
    with closing(RunFolder.open(run_dir, resume=resume, name=name)) as folder, ExitStack() as stack:
        write_config(config, folder.config_path)
        plan.write(folder.path)
        _say(_headline(recording, config, folder, plan, steps_done=trainer.steps_done))
        stop = stack.enter_context(_stop_asked())
        said = stack.enter_context(_Said(trainer.steps_done, config.steps))
        replay = Replay(
            trainer,
            recording,
            islice(order, trainer.steps_done, None),
            stack.enter_context(_metrics(config, folder, trainer.steps_done)),
            config.learner,
            steps=config.steps,
            evaluate=_evaluations(config, tokenizer, trainer, stack, stop),
            save_checkpoint=partial(_save_checkpoint, config, tokenizer, trainer, folder),
            after_step=lambda step, figures, epoch: _after_step(step, figures, epoch, said, stop),
            progress=former,
        )
        code, reason = 0, "all batches trained"
        try:
            if state is not None:
                restore_rng(state.rng)
            replay.run()
        except ReplayStopped as asked:
            code, reason = asked.exit_code, str(asked)
            replay.checkpoint()
        except BaseException as error:
            _end(folder, recording, trainer, replay.progress, 1, f"{type(error).__name__}: {error}", began_s)
            raise
        _end(folder, recording, trainer, replay.progress, code, reason, began_s)
        return code


def _start(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, folder: Path | None
) -> tuple[Trainer, LearnerState | None]:
    """Load the last readable checkpoint in `folder`, or start anew if there is none. Raises ConfigError if there are
    checkpoints but none can be read."""
    try:
        found = go_on_from(folder / CHECKPOINTS) if folder is not None else None
    except CheckpointError as error:
        raise ConfigError(*str(error).splitlines()) from error
    for skipped in found.damaged if found is not None else ():
        _say(f"{skipped}; it is kept as {set_aside(skipped.path)}")
    return first_trainer(config, found.path if found is not None else None, vocab_tokens=_vocab(tokenizer))


def _metrics(config: RunConfig, folder: RunFolder, steps_done: int) -> MetricsWriter:
    epoch = newest_epoch(folder.path)
    return MetricsWriter(
        folder.path,
        resume=None if epoch is None else WeightVersion(epoch + 1, steps_done),
        settings=compared_settings(config),
        trackers=Trackers(config.learner.trackers, folder.path, all_settings(config)),
    )


def compare_estimators(recording: Recording, config: RunConfig, names: Sequence[str], n_batches: int) -> int:
    """Print the gradient of each divergence on the first batches, for the given student."""
    mistakes: list[str] = []
    compared: dict[str, LearnerConfig] = {}
    for name in names:
        try:
            objective = with_divergence(config.learner.objective, name)
            recording.expect_top_k(objective.needs_top_k_for)
            compared[name] = msgspec.structs.replace(config.learner, objective=objective)
        except ValueError as error:
            mistakes.append(f"--compare: {error}")
    if mistakes:
        raise ConfigError(*mistakes)
    torch.set_num_threads(threads_alone(config))
    tokenizer = load_tokenizer(config.models.student)
    recording.expect_vocabulary(token_map_fingerprint(tokenizer))
    torch.manual_seed(config.seed)
    n_vocab = _vocab(tokenizer)
    head_of = teacher_heads(config)
    first = make_trainer(
        config.models.student, config.learner, steps=config.steps, vocab_tokens=n_vocab, seed=config.seed
    )
    trainers = {
        name: Trainer(
            first.model,
            learner,
            total_steps=config.steps,
            adapters=first.adapters,
            vocab_tokens=n_vocab,
            seed=config.seed,
            head_of=head_of,
        )
        for name, learner in compared.items()
    }

    def gradient_of(name: str, batch: SourceBatch) -> list[Tensor]:
        return trainers[name].gradient(batch.items, batch.offline)

    batches = [recorded_batch(recording, kept) for kept in recording.batches[:n_batches]]
    table = Table("divergence", "|mean gradient|", "noise of a batch", f"cosine with {names[0]}")
    for row in compare(names, batches, gradient_of):
        table.add_row(row.name, f"{row.norm:.4g}", f"{row.noise:.4g}", f"{row.cosine:.4f}")
    _say(
        f"{len(batches)} batches of {recording.path}, student {config.models.student}, importance "
        f"{config.learner.objective.importance.name}; gradients before clipping"
    )
    Console().print(table)
    return 0


def _evaluations(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, trainer: Trainer, stack: ExitStack, stop: list[int]
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
        result = evaluator.run(evaluation, version, trainer.weights())
        _say(f"evaluation at step {step}{f' on {name}' if name else ''}: {describe(result)}")
        for group, figures in (*result.tags.items(), *result.environments.items()):
            _say(f"  {group}: {describe(figures)}")
        return result

    return evaluate


def _save_checkpoint(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    trainer: Trainer,
    folder: RunFolder,
    step: int,
    figures: StepMetrics,
    progress: ReplayProgress,
) -> None:
    state = LearnerState(
        version=WeightVersion(0, step),
        optimizer=trainer.state_dict(),
        value_head=trainer.critic.state_dict(),
        tasks=msgspec.to_builtins(progress),
        ledger=None,
        rng=capture_rng(),
        metrics=dict(figures.as_dict()),
    )
    root, keep = folder.path / CHECKPOINTS, config.learner.keep_checkpoints
    save_checkpoint(root, trainer.model, tokenizer, state, keep=keep, adapters=trainer.adapters)


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

    def stepped(self, step: int, figures: StepMetrics | None, epoch: int) -> None:
        now_s = time.monotonic()
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


def _after_step(step: int, figures: StepMetrics | None, epoch: int, said: _Said, stop: list[int]) -> None:
    said.stepped(step, figures, epoch)
    _raise_if_asked(stop)


@contextlib.contextmanager
def _stop_asked() -> Generator[list[int]]:
    """Context in which the first SIGINT or SIGTERM is entered in the list. Later ones have their usual effect."""
    asked: list[int] = []
    former = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}

    def note(signum: int, _frame: FrameType | None) -> None:
        asked.append(signum)
        _restore()

    def _restore() -> None:
        for signum, handler in former.items():
            signal.signal(signum, handler)

    for signum in former:
        signal.signal(signum, note)
    try:
        yield asked
    finally:
        _restore()


def _raise_if_asked(stop: list[int]) -> None:
    if stop:
        raise ReplayStopped(stop[0])


def _headline(recording: Recording, config: RunConfig, folder: RunFolder, plan: ReplayPlan, *, steps_done: int) -> str:
    header, learner, objective = recording.header, config.learner, config.learner.objective
    own = "".join(f", {pool}: {divergence.name}" for pool, divergence in objective.teacher_divergences.items())
    going_on = f", going on from step {steps_done}" if folder.record.launches > 1 else ""
    return (
        f"replay of {len(recording.batches)} batches of the run {header.run} (written by the {header.writer}, "
        f"configuration {header.config_digest[:12]}), {plan.epochs} epochs, {plan.order}{going_on}: "
        f"{config.models.student}, divergence {objective.divergence.name}{own}, importance "
        f"{objective.importance.name}, lr {learner.lr:g}, {config.steps} steps; all of it in {folder.path}"
    )


def _end(
    folder: RunFolder,
    recording: Recording,
    trainer: Trainer,
    progress: ReplayProgress,
    code: int,
    reason: str,
    began_s: float,
) -> None:
    last = newest(folder.path / CHECKPOINTS)
    account = {
        "file": str(recording.path),
        "run": recording.header.run,
        "writer": recording.header.writer,
        "steps": trainer.steps_done,
        "checkpoint": "" if last is None else last.name,
        "tokens_trained": progress.tokens_trained,
        "reason": reason,
        "exit_code": code,
        "wall_s": time.monotonic() - began_s,
        "reverse_kl_first": progress.reverse_kl_first,
        "reverse_kl_last": progress.reverse_kl_last,
        "eval": [{name: getattr(result, name) for name in EVAL_FIELDS} for result in progress.evaluations],
    }
    write_atomic(folder.path / SUMMARY_FILE, msgspec.json.format(msgspec.json.encode(account), indent=2) + b"\n")
    folder.finish(code)
    _say(f"{trainer.steps_done} steps, {reason}; {folder.path}")


def _vocab(tokenizer: PreTrainedTokenizerBase) -> int:
    return vocab_tokens(tokenizer.get_vocab())


def _say(text: str) -> None:
    print(text, flush=True)
