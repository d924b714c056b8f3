"""The learner's process: builds the parts of learner.loop, runs the loop, writes learner.json, closes everything."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from stillhouse.engines.registry import find_engine
from stillhouse.learner.assembly import checkpoint_to_resume, open_reports
from stillhouse.learner.checkpoints.checkpoint import restore_rng
from stillhouse.learner.checkpoints.files import CHECKPOINTS, CheckpointError
from stillhouse.learner.checkpoints.resume import first_trainer, stage_checkpoint
from stillhouse.learner.checkpoints.writer import CheckpointWriter, Write
from stillhouse.learner.config import record_path
from stillhouse.learner.device_turns import LearnerTurns
from stillhouse.learner.evaluation.evaluation import EvalPlan, EvalPrompt, EvaluationRun
from stillhouse.learner.evaluation.sets import render_eval_sets
from stillhouse.learner.group_rewards import GroupRewards
from stillhouse.learner.inbox import RunStopped, StopAsked, StopRequest
from stillhouse.learner.loop import LearnerLoop, LearnerParts
from stillhouse.learner.offline import OfflineMixer, open_mixer
from stillhouse.learner.prompts.records import DataError
from stillhouse.learner.prompts.tasks import TaskStream, load_prompts
from stillhouse.learner.ranks.group import Ranks
from stillhouse.learner.ranks.messages import RanksBegin
from stillhouse.learner.reports.metrics import TENSORBOARD_FOLDER, MetricsWriter, newest_epoch
from stillhouse.learner.reports.progress import AccountFile, AccountWriter, LearnerProgress
from stillhouse.learner.run_config import LearnerRunConfig, models_of_other_tokenizers
from stillhouse.learner.step.critic import CriticStateError
from stillhouse.learner.step.ema import StudentEma
from stillhouse.learner.step.train_step import Trainer
from stillhouse.learner.written import WrittenStream
from stillhouse.models.flops import forward_flops
from stillhouse.models.routing import RoutingError
from stillhouse.models.tokenizer import load_tokenizer, token_map_fingerprint
from stillhouse.protocol.client import Client, worker_client
from stillhouse.protocol.context import ExitCode, RoleContext
from stillhouse.protocol.handshake import vocab_tokens
from stillhouse.protocol.keys import run_server_keys
from stillhouse.protocol.messages import (
    PostWeightPlan,
    Snapshot,
    TeacherWeights,
    VersionPublished,
    WeightsRef,
    WeightVersion,
)
from stillhouse.protocol.turns import Turn
from stillhouse.recording.format import FORMAT, RecordError, RecordHeader, config_digest
from stillhouse.recording.writer import BatchRecorder
from stillhouse.weights.checkpoint_names import NamesError, checkpoint_pieces
from stillhouse.weights.config import sent_dtype
from stillhouse.weights.publisher import Publisher
from stillhouse.weights.roster import GroupMembers
from stillhouse.weights.server_checks import LearnerCanary

log = logging.getLogger(__name__)

SNAPSHOTS: Final = "weights"
EXPORT: Final = "export"
TEACHER_SNAPSHOTS: Final = "teacher_weights"
"""Folder of the snapshots of the student's moving average (learner.ema)."""
FLUSH_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class LearnerStart:
    """State that the run starts from: the student as configured, or a checkpoint; and what is made of it."""

    ctx: RoleContext[LearnerRunConfig]
    tokenizer: PreTrainedTokenizerBase
    trainer: Trainer
    members: GroupMembers
    """What gets the weights of each version."""
    stream: TaskStream
    eval_prompts: Mapping[str, tuple[EvalPrompt, ...]]
    """By the name of the evaluation set."""
    version: WeightVersion | None
    """Version of the checkpoint; None without one."""
    average: dict[str, Tensor]
    """The student's moving average in the checkpoint; empty without one."""
    mixer: OfflineMixer | None = None
    """Adds rollouts of the teacher to the batches; None without learner.offline."""

    @property
    def fingerprint(self) -> str:
        return token_map_fingerprint(self.tokenizer)

    def stage(
        self, ema: StudentEma | None, progress: LearnerProgress, version: WeightVersion, snapshot: Snapshot | None
    ) -> Write:
        return stage_checkpoint(
            self.ctx.run_dir / CHECKPOINTS,
            version,
            self.trainer,
            self.tokenizer,
            keep=self.ctx.config.learner.keep_checkpoints,
            stream=self.stream,
            mixer=self.mixer,
            ema=ema,
            ledger=snapshot.ledger if snapshot is not None else None,
            metrics=progress.last,
        )

    def saved(self, progress: LearnerProgress, account: AccountWriter, version: WeightVersion) -> None:
        account.write()
        over = version.step == self.ctx.config.steps or bool(progress.rule.reason)
        if self.trainer.adapters is not None and over:
            self._export(progress)

    def evaluation(self, version: WeightVersion, name: str) -> EvaluationRun:
        learner = self.ctx.config.learner
        return EvaluationRun(
            learner.eval_tasks(name),
            self.eval_prompts[name],
            self.tokenizer,
            version=version,
            seed=self.ctx.config.seed,
            plan=EvalPlan.of(learner, name),
        )

    def _export(self, progress: LearnerProgress) -> None:
        """Write what the run leaves."""
        from stillhouse.learner.export import export, from_checkpoint  # load peft

        trainer, out = self.trainer, self.ctx.run_dir / EXPORT
        assert trainer.adapters is not None and progress.checkpoint is not None
        if trainer.ranks.world_size > 1:  # no process has the student in full
            exported = from_checkpoint(progress.checkpoint, out, self.ctx.config.models.student)
        else:
            exported = export(trainer.adapters, self.tokenizer, out)
        log.info("merged weights %s, adapters in peft's format %s", exported.merged, exported.adapter)

    def make_publisher(self, client: Client, turn: Turn | None) -> Publisher:
        config, publish = self.ctx.config, self.ctx.config.weights
        if config.buffer.max_staleness == 0:
            publish = msgspec.structs.replace(publish, every_version=True)
        members, model, canary = self.members, self.trainer.model, None
        if members.kind != "engines" and members.check_by != "off":
            n_vocab = vocab_tokens(self.tokenizer.get_vocab())
            canary = LearnerCanary(
                model,
                vocab_tokens=n_vocab,
                bfloat16=self.trainer.bfloat16,
                sent=sent_dtype(publish.dtype, members.dtype),
                logprobs=self.trainer.logprobs,
            )
        return Publisher(
            publish,
            snapshot_dir=self.ctx.run_dir / SNAPSHOTS,
            post_plan=lambda plan: client.send(PostWeightPlan(plan=plan)),
            published=lambda version, _: client.send(VersionPublished(version=version)),
            expected_actors=config.actors,
            device=model.device,
            members=members,
            canary=canary,
            control_keys=run_server_keys(self.ctx.run_dir, "learner", ("actor",)),
            staging=self.trainer.ranks.staging,
            turn=turn,
        )

    def group_rewards(self) -> GroupRewards | None:
        path = self.ctx.config.learner.tasks.group_reward
        if not path:
            return None

        def decode(token_ids: list[int]) -> str:
            return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

        return GroupRewards(path, self.stream.row, decode, self.ctx.config.buffer.reward_limit)

    def student_ema(self, client: Client, failed: Callable[[str], None]) -> StudentEma | None:
        config = self.ctx.config.learner.ema
        if not config.decay:
            return None

        def send(ref: WeightsRef) -> None:
            client.send(TeacherWeights(pool=config.pool, weights=ref))

        ema = StudentEma(
            config, self.trainer.weights(), folder=self.ctx.run_dir / TEACHER_SNAPSHOTS, send=send, failed=failed
        )
        if self.version is not None:
            ema.load_state_dict(self.average)
        return ema

    def make_recorder(
        self, metrics: MetricsWriter, resume: WeightVersion | None, parent: WeightVersion
    ) -> BatchRecorder | None:
        """Raises RecordError for the file of another run."""
        config, learner = self.ctx.config, self.ctx.config.learner
        if not learner.record:
            return None
        plain = cast(dict[str, Any], msgspec.to_builtins(config))
        header = RecordHeader(
            format=FORMAT,
            run=self.ctx.run_id.rpartition("-")[0],  # its name; that of the folder changes when it is moved
            vocab_fingerprint=self.fingerprint,
            writer="teacher" if _teacher_writes(config) else "student",
            config_digest=config_digest(plain),
            config=plain,
        )
        return BatchRecorder(
            record_path(learner.record, self.ctx.run_dir),
            header,
            metrics.unwritten,
            resume=resume,
            parent=parent,
            max_bytes=learner.record_max_bytes,
            as_read=self.stream.as_read if isinstance(self.stream, WrittenStream) else None,
        )


def main(ctx: RoleContext[LearnerRunConfig], ranks: Ranks | None = None) -> int:
    """The learner, or rank 0 of it (see launch.workers.ranks). `ranks`: all of them."""
    torch.manual_seed(ctx.config.seed)
    turn = ctx.first_turn()
    try:
        start = _start(ctx, ranks or Ranks())
    except RecordError as error:
        log.error("learner.offline.file: %s", error)
        return ExitCode.USELESS
    except (CriticStateError, CheckpointError, NamesError, DataError, RoutingError) as error:
        log.error("%s", error)
        return ExitCode.USELESS
    with ExitStack() as stack:
        if start.mixer is not None:
            stack.callback(start.mixer.close)
        client = stack.enter_context(worker_client(ctx, start.fingerprint))
        welcome = client.connect()
        noted = newest_epoch(ctx.run_dir) if ctx.resume else None
        version = first_version(start.version, welcome.version, noted, resume=ctx.resume)
        stop = stack.enter_context(StopRequest())
        try:
            parts = _make_parts(start, client, version, stack, stop, turn)
        except RecordError as error:
            log.error("learner.record: %s", error)
            return ExitCode.USELESS
        loop = LearnerLoop(parts)
        try:
            loop.run()
            code = ExitCode.OK
        except RunStopped as stopped:
            log.warning("%s", stopped)
            code = ExitCode.OK if stopped.shutdown.ok else ExitCode.FAILED
        except StopAsked as asked:
            log.info("%s; step %d is the last one", asked, loop.version.step)
            code = ExitCode.TERMINATED
        finally:
            parts.account.write()
        client.flush(FLUSH_TIMEOUT_S)
    return code


def _start(ctx: RoleContext[LearnerRunConfig], ranks: Ranks) -> LearnerStart:
    """Load everything that can fail, before anything is requested from the buffer."""
    config, learner = ctx.config, ctx.config.learner
    found = checkpoint_to_resume(ctx.run_dir) if ctx.resume else None
    checkpoint = found.path if found else None
    if ctx.resume:
        log.info("resuming from %s", checkpoint or "step 0: there is no checkpoint yet")
    prompts = load_prompts(learner.tasks, config.environments)
    tokenizer = load_tokenizer(checkpoint or config.models.student)
    n_vocab = vocab_tokens(tokenizer.get_vocab())
    beginning = RanksBegin(None if checkpoint is None else str(checkpoint), n_vocab)
    ranks.announce("begin", lambda: msgspec.json.encode(beginning))
    trainer, state = first_trainer(config, checkpoint, vocab_tokens=n_vocab, ranks=ranks)
    members = find_engine(config.actor.engine).members(config.actor, config.weights, config.models.student)
    if members.kind == "servers":
        pieces = checkpoint_pieces(trainer.model, trainer.named_weights())
        members = replace(members, pieces=pieces)
    elif members.kind == "adapters":
        assert trainer.adapters is not None  # launch.checks.adapters
        trainer.sends_adapters = True
        members = replace(members, adapter_config=trainer.adapters.config_text())
    mixer = open_mixer(learner.offline, token_map_fingerprint(tokenizer), seed=config.seed)
    stream_kind = WrittenStream if _teacher_writes(config) and learner.tasks.has_privileged else TaskStream
    experts = None if _teacher_writes(config) else trainer.experts  # those of another model
    readers = {pool: load_tokenizer(model) for pool, model in models_of_other_tokenizers(config).items()}
    make_stream = stream_kind if state is None else partial(stream_kind.from_state, state=state.tasks)
    stream = make_stream(
        learner.tasks, tokenizer, prompts, seed=config.seed, top_ids=config.top_ids, experts=experts, readers=readers
    )
    version, average = None, dict[str, Tensor]()
    if state is not None:
        restore_rng(state.rng)
        if mixer is not None:
            mixer.load_state(state.offline)
        version, average = state.version, state.ema
    eval_prompts = render_eval_sets(learner, prompts.evaluation, tokenizer, config.environments, readers)
    return LearnerStart(ctx, tokenizer, trainer, members, stream, eval_prompts, version, average, mixer)


def first_version(
    checkpoint: WeightVersion | None, buffers: WeightVersion, noted_epoch: int | None, *, resume: bool
) -> WeightVersion:
    """The version that the loop starts with. A resumed learner opens a new epoch: above that of the checkpoint, of the
    versions that this buffer has seen, and of the metrics (`noted_epoch`). All three are needed, because an earlier
    learner may have died before its first checkpoint, or in its first step before it wrote any metrics."""
    if not resume and checkpoint is None and buffers == WeightVersion(0, 0):
        return buffers
    epoch = max(checkpoint.epoch if checkpoint else 0, buffers.epoch, noted_epoch or 0) + 1
    return WeightVersion(epoch, checkpoint.step if checkpoint else 0)


def _make_parts(
    start: LearnerStart,
    client: Client,
    version: WeightVersion,
    stack: ExitStack,
    stop: StopRequest,
    turn: Turn | None,
) -> LearnerParts:
    """The parts of the loop, which `stack` closes. Raises RecordError for a recording of another run."""
    ctx, config, learner = start.ctx, start.ctx.config, start.ctx.config.learner
    parent = start.version or WeightVersion(0, 0)
    resume = version if version.epoch else None
    metrics, progress = open_reports(config, ctx.run_dir, step=version.step, resume=resume, parent=parent)
    stack.callback(metrics.close)
    recorder = start.make_recorder(metrics, resume, parent)
    if recorder is not None:
        stack.callback(recorder.close)
    publisher = stack.enter_context(start.make_publisher(client, turn))
    file = AccountFile(ctx.run_dir, metrics.unwritten, resume=resume)
    account = AccountWriter(file, progress, publisher, ctx.run_dir / TENSORBOARD_FOLDER)
    ema = start.student_ema(client, account.average_failed)
    checkpoints = CheckpointWriter(
        partial(start.stage, ema, progress),
        progress,
        saved=partial(start.saved, progress, account),
        failed=account.write,
        keep_waiting=start.trainer.ranks.world_size == 1,
    )
    return LearnerParts(
        client=client,
        trainer=start.trainer,
        stream=start.stream,
        publisher=publisher,
        metrics=metrics,
        make_evaluation=start.evaluation,
        checkpoints=stack.enter_context(checkpoints),
        config=learner,
        version=version,
        parent=parent,
        steps=config.steps,
        account=account,
        stop=stop,
        ema=ema,
        mixer=start.mixer,
        recorder=recorder,
        group_rewards=start.group_rewards(),
        fetch_ahead=config.buffer.max_staleness > 0,
        max_equal_batches=config.buffer.dynamic_sampling,
        forward=forward_flops(Path(config.models.student)),
        decode=lambda ids, special: str(start.tokenizer.decode(ids, skip_special_tokens=not special)),
        turns=LearnerTurns(turn, start.trainer, publisher) if turn is not None else None,
    )


def _teacher_writes(config: LearnerRunConfig) -> bool:
    return config.models.student == config.models.teacher and config.learner.frozen
