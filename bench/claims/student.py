"""One student trained in this process by parts of the product: the embedded engine writes, the embedded scorer grades,
`learner.step.Trainer` trains, and the engine gets the new weights before it writes again (staleness 0).

    write --> rollouts --score--> items --Trainer.step--> weights --stage_weights--> write

tests/bench/claims/test_student.py shows that its losses are those of a run of the launcher with max_staleness = 0.

Floating-point operations (models.flops) are counted as in a run: `actor` is what the student writes, `teacher` what a
teacher reads or writes, `learner` what is trained. Evaluations are not counted.

Legend: L tokens of a rollout, its prompt included.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from bench.claims.facts import Fact
from stillhouse.actors.rewards.answer import AnswerCheck
from stillhouse.builtin.tally import TERMS, Tally
from stillhouse.builtin.tokenizer import END_OF_TURN, build_tokenizer, prompt_token_ids
from stillhouse.engines.base import GenerationRequest, ScoreRequest
from stillhouse.engines.config import EngineConfig
from stillhouse.engines.torch.engine import TorchEngine
from stillhouse.engines.torch.scorer import TorchScorer
from stillhouse.learner.batch import TrainItem, train_items
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.reports.step_metrics import StepMetrics
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models.flops import ForwardFlops, forward_flops
from stillhouse.models.head_file import load_head
from stillhouse.models.loading import load_causal_lm
from stillhouse.protocol.messages import BatchItem, Sampling, VersionSpan, WeightVersion
from stillhouse.protocol.messages.learner import TopKPiece
from stillhouse.protocol.payloads.hidden import HiddenEncoder

MAX_NEW_TOKENS: Final = 200
"""And 5 more for each digit of a long tally above TERMS; its answer takes 7."""
MAX_CONTEXT: Final = 448
FACT_TOKENS: Final = 6
CONCURRENT: Final = 64
POOL: Final = "default"
TOKENIZER: Final = build_tokenizer()
END_ID: Final = cast(int, TOKENIZER.convert_tokens_to_ids(END_OF_TURN))
_CHECK: Final = AnswerCheck()


@dataclass(frozen=True)
class Rollout:
    """An answer to one prompt."""

    task: Tally | Fact
    prompt_tokens: int
    ids_L: npt.NDArray[np.int32]
    logprobs_L: npt.NDArray[np.float32]
    """Log-probs of the policy that wrote it; 0 at the prompt."""
    finish_reason: str
    group: int = 0
    sample: int = 0

    @property
    def written(self) -> int:
        return len(self.ids_L) - self.prompt_tokens

    @property
    def reward(self) -> float:
        text = cast(str, TOKENIZER.decode(self.ids_L[self.prompt_tokens :], skip_special_tokens=True))
        if isinstance(self.task, Fact):
            return float(text.strip().startswith(self.task.answer))
        return _CHECK.reward(text, self.task.answer) or 0.0


def flops_of(folder: Path) -> ForwardFlops:
    """Raises ValueError for a folder without a model."""
    found = forward_flops(folder)
    if found is None:
        raise ValueError(f"{folder}: the operations of its model are not known; expected safetensors and config.json")
    return found


class Writer:
    """Writes answers with a model of its own."""

    def __init__(self, folder: Path) -> None:
        model = load_causal_lm(folder, device="cpu", dtype="float32", attention="sdpa")
        config = EngineConfig(max_concurrent=CONCURRENT, max_context=MAX_CONTEXT, device="cpu")
        self._engine, self._requests = TorchEngine(model, config), 0
        self._step = 0
        self.flops = flops_of(folder)

    def take(self, weights: Iterable[tuple[str, Any]]) -> None:
        self._step += 1
        self._engine.stage_weights(WeightVersion(0, self._step), weights)

    def write(
        self, tasks: Sequence[Tally | Fact], seeds: Sequence[int], *, temperature: float = 1.0, group_size: int = 1
    ) -> list[Rollout]:
        """`group_size` answers to each task, in order. `seeds`: one per answer."""
        asked: dict[str, tuple[Tally | Fact, list[int], int, int]] = {}
        for at, seed in enumerate(seeds):
            group, sample = divmod(at, group_size)
            task, self._requests = tasks[group], self._requests + 1
            told = isinstance(task, Fact)
            prompt = TOKENIZER.encode(task.prompt) if told else prompt_token_ids(TOKENIZER, task.prompt)
            longest = FACT_TOKENS if told else MAX_NEW_TOKENS + 5 * max(0, len(task.prompt) // 2 - TERMS[1])
            asked[str(self._requests)] = task, prompt, group, sample
            self._engine.submit(
                GenerationRequest(
                    str(self._requests),
                    np.array(prompt, np.int32),
                    Sampling(temperature=temperature, max_new_tokens=longest, seed=seed),
                    longest,
                    (END_ID,),
                )
            )
        pieces: dict[str, list[Any]] = {name: [] for name in asked}
        reasons: dict[str, str] = {}
        while len(reasons) < len(asked):
            for delta in self._engine.poll(0.0):
                pieces[delta.request_id].append(delta)
                if delta.finish_reason is not None:
                    reasons[delta.request_id] = delta.finish_reason
        return [
            Rollout(
                task,
                len(prompt),
                np.concatenate([prompt, *(one.token_ids for one in pieces[name])]).astype(np.int32),
                np.concatenate([np.zeros(len(prompt)), *(one.logprobs for one in pieces[name])]).astype(np.float32),
                reasons[name],
                group,
                sample,
            )
            for name, (task, prompt, group, sample) in asked.items()
        ]

    def accuracy(self, tasks: Sequence[Tally | Fact], *, greedy: bool, seed: int = 0) -> float:
        """Share of right answers, one per task."""
        written = self.write(tasks, [seed * 100_003 + n for n in range(len(tasks))], temperature=0.0 if greedy else 1.0)
        return sum(rollout.reward for rollout in written) / len(written)


class Teacher:
    """Grades answers: log-probs of the tokens, and last hidden states for divergences over the whole vocabulary."""

    def __init__(self, folder: Path) -> None:
        self._scorer = TorchScorer(load_causal_lm(folder, device="cpu", dtype="float32", attention="packed"))
        self._encoder = HiddenEncoder(self._scorer)
        self.head = load_head(folder, device="cpu", dtype="float32")
        self.flops = flops_of(folder)

    def grade(self, rollouts: Sequence[Rollout]) -> list[tuple[npt.NDArray[np.float32], bytes]]:
        """(log-probs, payload) of the tokens behind each prompt."""
        asked = [ScoreRequest(one.ids_L, one.prompt_tokens) for one in rollouts]
        results = self._scorer.score(asked, self._encoder.options)
        return [(one.logprobs, self._encoder.encode(one, slice(0, len(one.logprobs)), None)) for one in results]


def item_of(
    rollout: Rollout, number: int, *, group_size: int, graded: tuple[npt.NDArray[np.float32], bytes] | None
) -> TrainItem:
    """What a learner gets of a rollout. `graded`: of a teacher, if one has a part in it."""
    end, start = len(rollout.ids_L), rollout.prompt_tokens
    logprobs, payload = graded or (None, b"")
    item = BatchItem(
        rollout_id=str(number),
        task_id=rollout.group,
        sample_index=rollout.sample,
        group_size=group_size,
        tag="tally",
        teachers=(POOL,) if graded else (),
        end=end,
        spans=(VersionSpan(WeightVersion(0, 0), 0, end),),
        final=True,
        finish_reason=rollout.finish_reason,
        reward=rollout.reward,
        n_turns=1,
        top_k=(TopKPiece(0, start, end, len(payload)),) if payload else (),
    )
    mask_L = (np.arange(end) >= start).astype(np.uint8)
    teacher_ML = np.zeros((int(logprobs is not None), end), np.float32)
    if logprobs is not None:
        teacher_ML[0, start:] = logprobs
    frames = [rollout.ids_L, rollout.logprobs_L, mask_L, teacher_ML]
    return train_items([item], [*frames, np.frombuffer(payload, np.uint8)] if payload else frames)[0]


@dataclass
class Student:
    """A student, its engine and its trainer, from the model in `folder`."""

    folder: Path
    config: LearnerConfig
    steps: int
    teacher: Teacher | None = None
    seed: int = 0
    flops: dict[str, float] = field(default_factory=lambda: {"actor": 0.0, "teacher": 0.0, "learner": 0.0})
    tokens: Counter[str] = field(default_factory=Counter[str])
    """student: it wrote and trained them; teacher: a teacher wrote them."""

    def __post_init__(self) -> None:
        model = load_causal_lm(self.folder, device="cpu", dtype="float32", attention="packed", train=True)
        heads = {} if self.teacher is None else {POOL: self.teacher.head}
        self.trainer = Trainer(
            model,
            self.config,
            total_steps=self.steps,
            vocab_tokens=len(TOKENIZER),
            seed=self.seed,
            head_of=heads.__getitem__,
        )
        self.writer = Writer(self.folder)
        self._number = 0

    def write(self, tasks: Sequence[Tally], *, group_size: int = 1) -> list[Rollout]:
        """Fresh answers under the present weights, to be trained."""
        seeds = [self._seed(n) for n in range(len(tasks) * group_size)]
        written = self.writer.write(tasks, seeds, group_size=group_size)
        self.flops["actor"] += sum(self.writer.flops.of(0, len(one.ids_L)) for one in written)
        return written

    def _seed(self, n: int) -> int:
        text = f"{self.seed}/{self.trainer.steps_done}/{n}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())

    def items(self, rollouts: Sequence[Rollout], *, group_size: int = 1) -> list[TrainItem]:
        """Graded, if there is a teacher."""
        graded: Sequence[Any] = [None] * len(rollouts)
        if self.teacher is not None:
            graded = self.teacher.grade(rollouts)
            self.flops["teacher"] += sum(self.teacher.flops.of(0, len(one.ids_L)) for one in rollouts)
        first, self._number = self._number, self._number + len(rollouts)
        return [
            item_of(one, first + n, group_size=group_size, graded=own)
            for n, (one, own) in enumerate(zip(rollouts, graded, strict=True))
        ]

    def copied(self) -> list[tuple[str, Any]]:
        """The present weights."""
        return [(name, tensor.detach().clone()) for name, tensor in self.trainer.model.named_parameters()]

    def train(self, items: Sequence[TrainItem], offline: Sequence[TrainItem] = ()) -> StepMetrics:
        """One step; the next answers are of the weights after it."""
        figures = self.trainer.step(items, offline)
        for one in (*items, *offline):
            self.flops["learner"] += self.config.updates_per_batch * self.writer.flops.training(
                len(one.tokens_L), frozen=False
            )
        self.writer.take((name, tensor.detach()) for name, tensor in self.trainer.model.named_parameters())
        return figures


def document(text: str, task: Fact) -> Rollout:
    """As `stillhouse write` renders it: the first token is not trained, the one that ends a text is. `task`: any."""
    ids = [*TOKENIZER.encode(text), END_ID]
    return Rollout(task, 1, np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop")
