"""Evaluation rollouts: the tasks of one evaluation, their results, and the figures.

One evaluation has two halves, each known to the buffer by its own eval id:
    "000040-greedy"    the first `eval_greedy` prompts of the evaluation set at temperature 0
    "000040-sampled"   the first `eval_sampled` at temperature 1, without top-p and top-k
(after a restart of the learner, with the weight epoch in front: "e1-000040-greedy"; on another set than the run's own
with its name: "000040-NAME-greedy"). A prompt of the sampled half may have several answers, the samples of its task. No
sockets here: the evaluation desk offers `tasks()`, repeats `wanted()` until `done`, and passes every EvalResult to
`add`.

The same prompt has the same seed in every evaluation of a run, which takes part of the sampling noise out of the
difference between two of them. Suffix N: tokens of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from stillhouse.engines.base import Int32s
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.evaluation.figures import EvalPoint, EvalRollout, figures_by, figures_of, mean, ratio
from stillhouse.learner.prompts.config import MAX_EVAL_PROMPTS, TaskConfig
from stillhouse.learner.prompts.records import ColumnsFault, PromptRecord
from stillhouse.learner.prompts.rendering import NO_READERS, NONE, Readers, for_actors, render, teacher_prompt
from stillhouse.learner.prompts.tasks import TaskOffer, derive_seed
from stillhouse.models.tokenizer import TokenizerError
from stillhouse.protocol.messages import EvalResult, EvalWanted, Sampling, Task, WeightVersion

Half: TypeAlias = Literal["greedy", "sampled"]
HALVES: tuple[Half, ...] = ("greedy", "sampled")
SAMPLES_SHOWN: Final = 4
"""Generations of each half to write out as text."""
_MAX_STEPS = 10_000_000


class EvalSample(msgspec.Struct, frozen=True):
    """One generation, as text."""

    half: Half
    task_id: int
    prompt: str
    completion: str
    ground_truth: str | None
    reward: float | None
    finish_reason: str | None
    name: str = ""
    """Name of its set, as in EvalPoint."""
    turn_rewards: tuple[tuple[int, float], ...] = ()
    """(turn, from 1; its reward), if there are several turns."""


class EvaluationResult(EvalPoint, frozen=True, kw_only=True):
    """All figures of one evaluation."""

    mean_length_greedy: float | None
    """Sampled tokens per rollout."""
    mean_length_sampled: float | None
    no_reward: int
    """Rollouts received without a reward; not part of the accuracies."""
    duplicates: int
    """Repeated results, which were ignored."""
    version_min: WeightVersion | None
    """Oldest weights that sampled any token."""
    version_mean_step: float | None
    """Mean over the tokens of the step of the weights that sampled them."""
    samples: tuple[EvalSample, ...] = ()

    @property
    def point(self) -> EvalPoint:
        """The figures for the account."""
        return EvalPoint(**{name: getattr(self, name) for name in EvalPoint.__struct_fields__})


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    """A prompt of an evaluation set."""

    ids: Int32s
    tag: str
    ground_truth: str | None
    teacher_ids: Int32s = field(default_factory=lambda: NONE)
    """Prompt for the teachers; empty: the same as the student's."""
    env: str = ""
    """Name of its environment; empty: `learner.tasks.env`."""
    row: bytes = b""
    """All columns of its row, as one JSON object."""


class EvalSet(NamedTuple):
    """Evaluation prompts in order, and how many were left out (prompt or row too long, or no privileged context)."""

    prompts: tuple[EvalPrompt, ...]
    dropped: int


def render_eval_set(
    records: Sequence[PromptRecord],
    tokenizer: PreTrainedTokenizerBase,
    config: TaskConfig,
    readers: Readers = NO_READERS,
) -> EvalSet:
    """Prompt ids of an evaluation set. Raises TokenizerError naming the row that cannot be rendered."""
    prompts: list[EvalPrompt] = []
    for record in records:
        try:
            ids = render(record, tokenizer, config)
            teachers = teacher_prompt(record, tokenizer, config, readers)
        except TokenizerError as error:
            raise TokenizerError(f"evaluation prompt, row {record.row}: {error}") from error
        made = for_actors(record, config)
        if len(ids) <= config.max_prompt_tokens and not teachers.drop_reason and not isinstance(made, ColumnsFault):
            prompts.append(EvalPrompt(ids, record.tag, record.ground_truth, teachers.ids, record.env, made.columns))
    return EvalSet(tuple(prompts), len(records) - len(prompts))


class EvalPlan(NamedTuple):
    """What distinguishes an evaluation set from the others, besides its TaskConfig."""

    name: str = ""
    """Empty: the run's own set."""
    first: int = 0
    """Number of its first prompt, in all sets of the run together."""
    max_turns: int = 0

    @classmethod
    def of(cls, config: LearnerConfig, name: str) -> EvalPlan:
        max_turns = config.eval_sets[name].max_turns if name else 0
        return cls(name, config.first_eval_prompt(name), max_turns)


OWN_SET: Final = EvalPlan()


class EvaluationRun:
    """One evaluation at one version. Owned by one thread of the learner."""

    def __init__(
        self,
        config: TaskConfig,
        prompts: Sequence[EvalPrompt],
        tokenizer: PreTrainedTokenizerBase,
        *,
        version: WeightVersion,
        seed: int,
        plan: EvalPlan = OWN_SET,
    ) -> None:
        """`config`: that of its set (`LearnerConfig.eval_tasks`). `seed` is the run's. An evaluation without prompts is
        done immediately; its figures are None."""
        if version.step >= _MAX_STEPS:
            raise ValueError(f"step {version.step} does not fit into evaluation task ids, expected < {_MAX_STEPS}")
        self._config = config
        self._tokenizer = tokenizer
        self._version = version
        self._plan = plan
        epoch = f"e{version.epoch}-" if version.epoch else ""
        name = f"{plan.name}-" if plan.name else ""
        self._half_of: dict[str, Half] = {f"{epoch}{version.step:06d}-{name}{half}": half for half in HALVES}
        wanted = {"greedy": config.eval_greedy, "sampled": config.eval_sampled}
        self._offers = {
            eval_id: tuple(self._offer(eval_id, i, prompt, seed) for i, prompt in enumerate(prompts[: wanted[half]]))
            for eval_id, half in self._half_of.items()
        }
        self._task_of = {offer.task.task_id: offer.task for offers in self._offers.values() for offer in offers}
        self._received: dict[str, dict[tuple[int, int], EvalRollout]] = {eval_id: {} for eval_id in self._offers}
        """By task and sample."""
        self._failed = dict.fromkeys(self._offers, 0)
        self._duplicates = 0

    @property
    def eval_ids(self) -> tuple[str, ...]:
        """Eval ids of the halves that have tasks."""
        return tuple(eval_id for eval_id, offers in self._offers.items() if offers)

    def tasks(self) -> list[TaskOffer]:
        """All tasks of both halves, greedy first; ids are unique among all evaluations of a run."""
        return [offer for offers in self._offers.values() for offer in offers]

    def wanted(self) -> list[EvalWanted]:
        """Requests for the buffer: one per incomplete half."""
        return [self._asking(eval_id) for eval_id in self.eval_ids if not self._complete(eval_id)]

    def confirmed(self) -> list[EvalWanted]:
        """What tells the buffer that it may let go of all results that have come."""
        return [self._asking(eval_id) for eval_id in self.eval_ids]

    def _asking(self, eval_id: str) -> EvalWanted:
        return EvalWanted(eval_id=eval_id, have=tuple(r.rollout_id for r in self._received[eval_id].values()))

    @property
    def done(self) -> bool:
        """True once every rollout was received or given up."""
        return all(self._complete(eval_id) for eval_id in self.eval_ids)

    def add(self, result: EvalResult, arrays: Sequence[np.ndarray]) -> None:
        """Add an EvalResult with its frames, four per item (`protocol.messages.BatchItem`). Repeated rollouts are
        counted and ignored. Raises ValueError for an eval id or a task of another evaluation."""
        if result.eval_id not in self._offers:
            raise ValueError(f"result of evaluation {result.eval_id!r}, expected one of {list(self._offers)}")
        if len(arrays) != 4 * len(result.items):
            raise ValueError(f"{len(result.items)} items need {4 * len(result.items)} frames, got {len(arrays)}")
        received = self._received[result.eval_id]
        for i, item in enumerate(result.items):
            task = self._task_of.get(item.task_id)
            if task is None or task.eval_id != result.eval_id:
                raise ValueError(f"task {item.task_id} is not one of evaluation {result.eval_id!r}")
            sample = item.task_id, item.sample_index
            if sample in received:
                self._duplicates += 1
            else:
                received[sample] = EvalRollout.of(item, arrays[4 * i : 4 * i + 4], task.env)
        self._failed[result.eval_id] = max(self._failed[result.eval_id], result.failed)

    def result(self) -> EvaluationResult:
        """Figures of the rollouts received so far; `missing` counts the rest."""
        greedy, sampled = ([*self._received[eval_id].values()] for eval_id in self._half_of)
        both = [*greedy, *sampled]
        failed = sum(self._failed.values())
        tasks = self._task_of.values()
        tags, envs = {task.tag for task in tasks}, {task.env for task in tasks}
        same = len({(task.tag, task.env) for task in tasks}) == len(tags) == len(envs)
        return EvaluationResult(
            step=self._version.step,
            name=self._plan.name,
            **msgspec.structs.asdict(figures_of(greedy, sampled)),
            mean_length_greedy=mean([len(r.behaviour_N) for r in greedy]),
            mean_length_sampled=mean([len(r.behaviour_N) for r in sampled]),
            no_reward=sum(r.reward is None for r in both),
            failed=failed,
            missing=max(0, sum(self._asked(eval_id) for eval_id in self._offers) - len(both) - failed),
            duplicates=self._duplicates,
            version_min=min((r.version_min for r in both if r.version_min is not None), default=None),
            version_mean_step=ratio(sum(r.version_steps for r in both), sum(r.version_tokens for r in both)),
            samples=self._samples(),
            tags=figures_by("tag", tags, greedy, sampled),
            environments={} if same else figures_by("env", envs, greedy, sampled),
        )

    def _offer(self, eval_id: str, i: int, prompt: EvalPrompt, seed: int) -> TaskOffer:
        half = self._half_of[eval_id]
        # The reverse KL is measured on sampled tokens; scores of greedy ones are not needed.
        teachers = self._config.teachers_for(prompt.tag) if half == "sampled" else ()
        teacher_ids = prompt.teacher_ids if teachers else NONE
        block = (self._version.epoch * _MAX_STEPS + self._version.step) * len(HALVES) + HALVES.index(half)
        task = Task(
            task_id=block * MAX_EVAL_PROMPTS + self._plan.first + i,
            kind="eval",
            group_size=self._config.eval_samples if half == "sampled" else 1,
            sampling=Sampling(
                temperature=0.0 if half == "greedy" else 1.0,
                max_new_tokens=self._config.max_new_tokens,
                max_turns=self._plan.max_turns,
                seed=derive_seed(seed, "eval", i),
            ),
            env=prompt.env or self._config.env,
            tag=prompt.tag,
            teachers=teachers,
            ground_truth=prompt.ground_truth,
            teacher_prompt_tokens=len(teacher_ids),
            eval_id=eval_id,
            row=prompt.row,
        )
        return TaskOffer(task, prompt.ids, teacher_ids)

    def _asked(self, eval_id: str) -> int:
        return sum(offer.task.group_size for offer in self._offers[eval_id])

    def _complete(self, eval_id: str) -> bool:
        return len(self._received[eval_id]) + self._failed[eval_id] >= self._asked(eval_id)

    def _samples(self) -> tuple[EvalSample, ...]:
        """The first answered prompts of each half, so that every evaluation shows the same ones."""
        shown: list[EvalSample] = []
        for eval_id, half in self._half_of.items():
            received = self._received[eval_id]
            for sample_index, task_id in sorted((index, task_id) for task_id, index in received)[:SAMPLES_SHOWN]:
                rollout = received[task_id, sample_index]
                shown.append(
                    EvalSample(
                        half=half,
                        task_id=task_id,
                        prompt=self._text(rollout.ids_N[: rollout.n_read]),
                        completion=self._text(rollout.ids_N[rollout.n_read :]),
                        ground_truth=self._task_of[task_id].ground_truth,
                        reward=rollout.reward,
                        finish_reason=rollout.finish_reason,
                        name=self._plan.name,
                        turn_rewards=rollout.turn_rewards,
                    )
                )
        return tuple(shown)

    def _text(self, ids_N: npt.NDArray[np.int32]) -> str:
        return str(self._tokenizer.decode(ids_N.tolist(), skip_special_tokens=False))
