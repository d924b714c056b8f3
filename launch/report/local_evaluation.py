"""Evaluations without a run: the embedded engine writes and the embedded scorer scores, in this process.

Tasks, seeds, environments and figures are those of a run (`learner.evaluation.evaluation`), and so is the actor's
machinery (`actors.rollouts_running`). The differences: nothing crosses a wire, and nothing is tried a second time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from stillhouse.engines.base import ScoreRequest
from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.launch.config.pools import TeacherPool, teacher_pools
from stillhouse.launch.config.run import RunConfig
from stillhouse.launch.local_actor import LocalActor, local_ticket
from stillhouse.learner.evaluation.evaluation import EvaluationResult, EvaluationRun
from stillhouse.learner.prompts.tasks import TaskOffer
from stillhouse.models.description import resolve_dtype
from stillhouse.models.loading import resolve_device
from stillhouse.models.tokenizer import load_tokenizer
from stillhouse.protocol.branches import path_to
from stillhouse.protocol.messages import (
    BatchItem,
    Branch,
    EvalResult,
    WeightVersion,
)
from stillhouse.protocol.payloads.aligned import NOT_SCORED
from stillhouse.weights.staged_weights import Weight, tensor_of

Array = np.ndarray[Any, Any]


class LocalEvaluator:
    """A copy of the student that writes, and its teachers. Used from one thread; `close` when done."""

    def __init__(
        self,
        config: RunConfig,
        *,
        check: Callable[[], None],
        writer: TeacherPool | None = None,
        scores: bool = True,
    ) -> None:
        """Loads the models, which must be folders in `config`. `check` is called between two steps of the engine and
        may raise to end an evaluation. `writer`: a teacher that writes in the student's place; its answers are not
        scored. `scores`: False for tasks that name no teachers (routes = {})."""
        path = config.models.student if writer is None else writer.config.models.teacher
        settings = config.actor.torch if writer is None else _engine_settings(writer)
        self._check = check
        others = {pool.name for pool in teacher_pools(config) if pool.config.teacher.tokenizer == "other"}
        tokens = path if writer is not None and writer.name in others else config.models.student
        self._actor = LocalActor(path, settings, config, load_tokenizer(tokens))
        self._scorers = {
            pool.name: TorchScorer.load(pool.config.models.teacher, pool.config.teacher)
            for pool in (teacher_pools(config) if writer is None and scores else ())
            if pool.name not in others
        }
        self._failed: Counter[str] = Counter()
        """Failed rollouts by evaluation id."""
        self._offers: dict[str, TaskOffer] = {}
        self._samples: dict[str, int] = {}

    def run(
        self, evaluation: EvaluationRun, version: WeightVersion, weights: Iterable[tuple[str, Weight]] | None
    ) -> EvaluationResult:
        """Run `evaluation` with these weights, which belong to `version`; None: with the engine's present weights.
        Raises TimeoutError after `learner.stall_timeout_s`, and whatever `check` raises."""
        if weights is not None:
            self._actor.engine.stage_weights(version, ((name, tensor_of(weight)) for name, weight in weights))
        tickets = [
            (local_ticket(offer.task, version, sample), offer)
            for offer in evaluation.tasks()
            for sample in range(offer.task.group_size)
        ]
        self._offers = {ticket.rollout_id: offer for ticket, offer in tickets}
        self._samples = {ticket.rollout_id: ticket.sample_index for ticket, _ in tickets}
        self._actor.write(((ticket, offer.prompt_ids) for ticket, offer in tickets), self._check)
        self._failed = Counter(self._offers[rollout_id].task.eval_id for rollout_id in self._actor.failed)
        for eval_id in evaluation.eval_ids:
            done = [i for i, offer in self._offers.items() if offer.task.eval_id == eval_id and self._keeps(i)]
            scored = [self._scored(rollout_id) for rollout_id in done]
            result = EvalResult(eval_id, tuple(item for item, _ in scored), self._failed[eval_id], 0)
            evaluation.add(result, [array for _, arrays in scored for array in arrays])
        return evaluation.result()

    def close(self) -> None:
        self._actor.close()
        for scorer in self._scorers.values():
            scorer.close()

    def _keeps(self, rollout_id: str) -> bool:
        """Return True for a finished rollout that a buffer would not refuse."""
        if rollout_id in self._actor.failed:
            return False
        offer, first = self._offers[rollout_id], self._actor.segments[rollout_id][0][0]
        if first.own_prompt_tokens and len(offer.teacher_prompt_ids):
            self._failed[offer.task.eval_id] += 1
            return False
        return True

    def _scored(self, rollout_id: str) -> tuple[BatchItem, tuple[Array, ...]]:
        """A finished rollout with its scores, as the buffer would give it to the learner."""
        offer, segments = self._offers[rollout_id], self._actor.segments[rollout_id]
        task, n_prompt = offer.task, segments[0][0].own_prompt_tokens or len(offer.prompt_ids)
        ids, behaviour, mask = (np.concatenate([arrays[i] for _, arrays in segments]) for i in range(3))
        last = segments[-1][0]
        teacher = np.zeros((len(task.teachers), len(ids)), np.float32)
        branches = tuple(
            Branch(message.start, message.follows) for message, _ in segments if message.follows is not None
        )
        for one in last.dropped:
            mask[one.start : one.end] = 0
        before = offer.teacher_prompt_ids if len(offer.teacher_prompt_ids) else ids[:n_prompt]
        for start, end in pairwise([n_prompt, *(branch.start for branch in branches), len(ids)]):
            path = np.concatenate([ids[s:e] for s, e in path_to(branches, end)])
            read = (
                np.concatenate([before, path[n_prompt:]]) if np.array_equal(path[:n_prompt], ids[:n_prompt]) else path
            )
            first = max(1, len(read) - (end - start))  # nothing predicts the first token of a root
            for row, pool in enumerate(task.teachers):
                if pool not in self._scorers:  # it has another tokenizer
                    teacher[row, start:end] = NOT_SCORED
                    continue
                (scored,) = self._scorers[pool].score([ScoreRequest(read, first)])
                teacher[row, end - len(scored.logprobs) : end] = scored.logprobs
        item = BatchItem(
            rollout_id=rollout_id,
            task_id=task.task_id,
            sample_index=self._samples[rollout_id],
            group_size=task.group_size,
            tag=task.tag,
            teachers=task.teachers,
            end=len(ids),
            spans=tuple(span for message, _ in segments for span in message.spans),
            final=True,
            finish_reason=last.finish_reason,
            reward=last.reward,
            n_turns=last.n_turns,
            branches=branches,
            turn_rewards=last.turn_rewards,
        )
        return item, (ids, behaviour, mask, teacher)


def _engine_settings(writer: TeacherPool) -> EngineConfig:
    """The actors' engine settings, with the device and precision that the teacher scores with."""
    teacher = writer.config.teacher
    device = resolve_device(teacher.device)
    return msgspec.structs.replace(writer.config.actor.torch, device=device, dtype=resolve_dtype(teacher.dtype, device))
