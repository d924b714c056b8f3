"""One training of the grid, in a process of its own: what it is, and how it is run.

An arm writes JSON lines: one per evaluation, with what was spent up to it, and a last one with `done`. The file appears
under its name only when the arm is complete, so one that was killed is made again.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from bench.claims.facts import Fact, documents, facts
from bench.claims.student import TOKENIZER, Rollout, Student, Teacher, Writer, document, flops_of, item_of
from stillhouse.builtin.tally import LONG_TERMS, TERMS, Tally, tallies
from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LearnerConfig
from stillhouse.learner.objectives.config import ObjectiveConfig, OfflineConfig
from stillhouse.learner.objectives.options import Capped, Distributions, Grpo, Jsd, LogRatio, Null
from stillhouse.protocol.settings import Member

Method: TypeAlias = Literal["reverse_kl", "forward_kl", "jsd", "k1", "null", "grpo", "seq_kd"]

EVAL_SEED: Final = 7
EVAL_PROMPTS: Final = 96
"""During an arm, sampled. At its end twice as many, and as many greedy."""
TEXTS_SEED: Final = 50
WARMUP_STEPS: Final = 5
LONG: Final = "long-"
"""Begins the names of models and texts of long tallies."""
OF_PAIR: Final = {name: f"pair-{name}" for name in ("teacher", "start", "small", "long-teacher", "long-start")}
"""Model of bench.claims.pair -> the arm that builds it."""
TEXTS_OF: Final = {"texts": "pair-teacher", "long-texts": "pair-long-teacher"}
"""Texts -> the arm that builds the teacher that writes them."""


@dataclass(frozen=True)
class Phase:
    """Some steps with one objective."""

    method: Method
    steps: int
    lr: float
    batch: int = 32
    """Rollouts or texts of a step."""
    own: float = 1.0
    """Share of the batch that the student writes; the rest is the teacher's text."""
    group_size: int = 1
    documents: float = 0.0
    """Share of the texts that are documents (bench.claims.facts); the others are the teacher's."""
    prompts: int = 0
    """Different prompts, in turn. 0: always new ones."""
    staleness: int = 0
    """Steps between the weights that write and those that are trained."""
    constant: bool = False
    """Learning rate constant; otherwise it falls to a tenth (cosine)."""
    eval_every: int = 0
    """Steps between two evaluations. 0: only at the end."""


@dataclass(frozen=True)
class Arm:
    claim: str
    row: str
    """What the page calls it."""
    seed: int
    phases: tuple[Phase, ...]
    start: str = "start"
    """Name of a model of the pair, or of an arm that keeps its model."""
    teacher: tuple[str, ...] = ("teacher",)
    """The same. Of several: that with the best last sampled accuracy. Empty: none."""
    keeps: bool = False
    """Its model is needed by another arm."""
    rate_of: tuple[str, ...] = ()
    """Arms of the same row: it has the learning rate of the one with the best last sampled accuracy."""
    asks_facts: bool = False
    """Each evaluation asks for the facts of the documents, too; the best last accuracy is then that of both summed."""

    @property
    def name(self) -> str:
        rate = "chosen" if self.rate_of else f"{self.phases[-1].lr:g}"
        words = f"{self.claim}-{self.row}-{rate}-s{self.seed}"
        return "".join(c if c.isalnum() or c in "-." else "_" for c in words)

    @property
    def kind(self) -> str:
        """Before the names of the teacher and of its texts."""
        return LONG if self.start.startswith(LONG) else ""

    @property
    def needs(self) -> set[str]:
        """Arms that must be done before."""
        texts = {f"{self.kind}texts"} if any(reads_texts(one) for one in self.phases) else set[str]()
        return texts | {OF_PAIR.get(name, name) for name in (self.start, *self.teacher, *self.rate_of)}


def reads_texts(phase: Phase) -> bool:
    return phase.own + phase.documents < 1.0


def objective_of(phase: Phase) -> ObjectiveConfig:
    """The loss of the student's own rollouts, or of texts alone."""
    weight = Member(name="none") if phase.own == 0.0 else Capped()
    match phase.method:
        case "grpo":
            return ObjectiveConfig(coef=0.0, advantage=Grpo())
        case "null":
            return ObjectiveConfig(divergence=Null())
        case "k1":
            return ObjectiveConfig(divergence=LogRatio())
        case "seq_kd":
            return ObjectiveConfig(divergence=Member(name="seq_kd"), importance=Member(name="none"))
        case "jsd":
            return ObjectiveConfig(divergence=Jsd(beta=0.5), importance=weight)
        case "reverse_kl" | "forward_kl":
            return ObjectiveConfig(divergence=Distributions(name=phase.method), importance=weight)


def config_of(phase: Phase) -> LearnerConfig:
    objective = objective_of(phase)
    return LearnerConfig(
        lr=phase.lr,
        warmup_steps=WARMUP_STEPS,
        schedule="constant" if phase.constant else "cosine",
        objective=objective,
        offline=OfflineConfig(divergence=objective.divergence) if 0.0 < phase.own < 1.0 else OfflineConfig(),
        device="cpu",
    )


def terms_of(name: str) -> tuple[int, int]:
    """Fewest and most digits for a model, or for texts, of that name."""
    return LONG_TERMS if name.startswith(LONG) else TERMS


@cache
def eval_tasks(count: int, terms: tuple[int, int]) -> list[Tally]:
    return list(islice(tallies(EVAL_SEED, terms=terms), count))


def prompts_of(phase: Phase, seed: int, number: int, terms: tuple[int, int]) -> Iterator[Tally]:
    fresh = tallies(1_000 + 100 * number + seed, terms=terms)
    return cycle(list(islice(fresh, phase.prompts))) if phase.prompts else fresh


def told(seed: int) -> Iterator[Rollout]:
    known = facts(seed)
    return (document(text, known[0]) for text in documents(known, seed))


def mixed(texts: Iterator[Rollout], others: Iterator[Rollout], share: float) -> Iterator[Rollout]:
    """Evenly; `share` is that of `others`."""
    for n in count():
        yield next(others if int((n + 1) * (1 - share)) == int(n * (1 - share)) else texts)


class Run:
    """Runs an arm in `folder`, which has the models, the texts and the other arms."""

    def __init__(self, arm: Arm, folder: Path) -> None:
        self._arm, self._folder = at_chosen_rate(arm, folder), folder
        self._lines: list[dict[str, Any]] = []
        self._spent: dict[str, float] = {}
        self._began_s = time.process_time()
        self._eval_s = 0.0
        self._student: Student | None = None
        self._steps = 0

    def make(self, commit: str = "") -> None:
        """Write the file of the arm, which says the commit."""
        teacher, start = self._teacher(), model_folder(self._folder, self._arm.start)
        for number, phase in enumerate(self._arm.phases):
            self._phase(phase, number, start, teacher)
            start = self._folder / "models" / self._arm.name
            if number < len(self._arm.phases) - 1 or self._arm.keeps:
                assert self._student is not None
                self._student.trainer.model.save_pretrained(start)
                TOKENIZER.save_pretrained(start)
        self._evaluate(last=True)
        spent = {"cpu_s": self._cpu_s, "eval_cpu_s": self._eval_s}
        self._lines.append({"done": True, **spent, "commit": commit, "arm": asdict(self._arm)})
        write_lines(result_file(self._folder, self._arm.name), self._lines)

    @property
    def _cpu_s(self) -> float:
        return time.process_time() - self._began_s

    def _teacher(self) -> Teacher | None:
        if not self._arm.teacher:
            return None
        best = max(self._arm.teacher, key=lambda name: last_sampled(self._folder, name))
        return Teacher(model_folder(self._folder, best))

    def _phase(self, phase: Phase, number: int, start: Path, teacher: Teacher | None) -> None:
        grades = phase.method not in ("seq_kd", "grpo", "null")
        student = Student(
            start, config_of(phase), phase.steps, teacher if grades else None, 100 * number + self._arm.seed
        )
        if self._student is not None:
            student.flops, student.tokens = self._student.flops, self._student.tokens
        self._student = student
        if number == 0:
            self._evaluate()
        prompts, texts = prompts_of(phase, self._arm.seed, number, terms_of(self._arm.start)), self._texts(phase)
        behind: deque[list[tuple[str, Any]]] = deque([student.copied()], phase.staleness + 1)
        for step in range(1, phase.steps + 1):
            self._step(student, phase, prompts, texts)
            behind.append(student.copied() if phase.staleness else [])
            if phase.eval_every and step % phase.eval_every == 0 and step < phase.steps:
                self._evaluate()
            if phase.staleness:
                student.writer.take(behind[0])

    def _step(self, student: Student, phase: Phase, prompts: Iterator[Tally], texts: Iterator[Rollout]) -> None:
        n_own = round(phase.batch * phase.own)
        own, offline = list[TrainItem](), list[TrainItem]()
        if n_own:
            tasks = list(islice(prompts, n_own // phase.group_size))
            rollouts = student.write(tasks, group_size=phase.group_size)
            student.tokens["student"] += sum(one.written for one in rollouts)
            own = student.items(rollouts, group_size=phase.group_size)
        if n_own < phase.batch:
            read = [replace(one, group=n) for n, one in enumerate(islice(texts, phase.batch - n_own))]
            offline = self._text_items(student, read)
        student.train(own or offline, offline if own else ())
        self._steps += 1

    def _text_items(self, student: Student, read: Sequence[Rollout]) -> list[TrainItem]:
        """A teacher has the log-probs and states of what it writes, so their second computation is not counted."""
        if of_teacher := [one for one in read if not isinstance(one.task, Fact)]:
            student.tokens["teacher"] += sum(one.written for one in of_teacher)
            teacher = flops_of(model_folder(self._folder, f"{self._arm.kind}teacher"))
            student.flops["teacher"] += sum(teacher.of(0, len(one.ids_L)) for one in of_teacher)
        if student.teacher is not None:
            graded = student.teacher.grade(read)
        else:
            graded = [(one.logprobs_L[one.prompt_tokens :], b"") for one in read]
        return [
            item_of(one, 10**6 + n, group_size=1, graded=own)
            for n, (one, own) in enumerate(zip(read, graded, strict=True))
        ]

    def _texts(self, phase: Phase) -> Iterator[Rollout]:
        """Those of the file, each seed from another place, and documents of the seed's own facts among them."""
        texts: Iterator[Rollout] = iter(())
        if reads_texts(phase):
            all_texts = read_texts(self._folder / f"{self._arm.kind}texts.npz")
            first = len(all_texts) * self._arm.seed // 3
            rotated = all_texts[first:] + all_texts[:first]
            texts = cycle(rotated[: phase.prompts] if phase.prompts else rotated)
        if phase.documents:
            return mixed(texts, told(self._arm.seed), phase.documents)
        return texts

    def _evaluate(self, *, last: bool = False) -> None:
        student, began_s = self._student, time.process_time()
        assert student is not None
        student.writer.take((name, tensor.detach()) for name, tensor in student.trainer.model.named_parameters())
        tasks = eval_tasks(EVAL_PROMPTS * (1 + last), terms_of(self._arm.start))
        line: dict[str, Any] = {
            "step": self._steps,
            "sampled": student.writer.accuracy(tasks, greedy=False, seed=self._arm.seed),
            "prompts": len(tasks),
            "flops": dict(student.flops),
            "tokens": dict(student.tokens),
        }
        if last:
            line["greedy"] = student.writer.accuracy(tasks[:EVAL_PROMPTS], greedy=True)
        if self._arm.asks_facts:
            known = facts(self._arm.seed)
            line["facts"] = student.writer.accuracy(known * 2, greedy=False, seed=self._arm.seed)
            line["facts_greedy"] = student.writer.accuracy(known, greedy=True)
        self._eval_s += time.process_time() - began_s
        self._lines.append(line | {"cpu_s": self._cpu_s})


def at_chosen_rate(arm: Arm, folder: Path) -> Arm:
    """With the rate of the best of the arms that it is to follow; its name stays."""
    if not arm.rate_of:
        return arm
    best = read_arm(folder, max(arm.rate_of, key=lambda name: last_sampled(folder, name)))
    assert best is not None
    rate = float(best[-1]["arm"]["phases"][-1]["lr"])
    return replace(arm, phases=tuple(replace(phase, lr=rate) for phase in arm.phases))


def model_folder(folder: Path, name: str) -> Path:
    return folder / "models" / name


def result_file(folder: Path, name: str) -> Path:
    return folder / "arms" / f"{name}.jsonl"


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    draft.replace(path)


def read_arm(folder: Path, name: str) -> list[dict[str, Any]] | None:
    """Its evaluations, and the last line; None if it is not done."""
    path = result_file(folder, name)
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else None


def last_sampled(folder: Path, name: str) -> float:
    """Sampled accuracy at the end of an arm, with that of the facts where they are asked; 1 for a model of the pair."""
    lines = read_arm(folder, name)
    return 1.0 if lines is None else float(lines[-2]["sampled"] + lines[-2].get("facts", 0.0))


def write_texts(folder: Path, number: int, name: str = "texts") -> None:
    """What the teacher of the pair writes, sampled, right or wrong."""
    teacher = TEXTS_OF[name].removeprefix("pair-")
    writer, tasks = Writer(model_folder(folder, teacher)), tallies(TEXTS_SEED, terms=terms_of(name))
    began_s, parts = time.process_time(), list[Rollout]()
    for first in range(0, number, 256):
        some = list(islice(tasks, min(256, number - first)))
        parts += writer.write(some, [TEXTS_SEED * 10**6 + first + n for n in range(len(some))])
    draft = folder / f"{name}.draft.npz"
    np.savez(
        draft,
        ids=np.concatenate([one.ids_L for one in parts]),
        logprobs=np.concatenate([one.logprobs_L for one in parts]),
        lengths=np.array([len(one.ids_L) for one in parts]),
        prompts=np.array([one.prompt_tokens for one in parts]),
    )
    draft.replace(folder / f"{name}.npz")
    right = sum(one.reward for one in parts) / len(parts)
    cpu_s = time.process_time() - began_s
    write_lines(result_file(folder, name), [{"texts": number, "sampled": right}, {"done": True, "cpu_s": cpu_s}])


def read_texts(path: Path) -> list[Rollout]:
    with np.load(path) as file:
        ends = np.cumsum(file["lengths"])[:-1]
        ids, logprobs = (np.split(file[name], ends) for name in ("ids", "logprobs"))
        prompts = file["prompts"].tolist()
    tasks = islice(tallies(TEXTS_SEED, terms=terms_of(path.stem)), len(prompts))
    return [Rollout(task, n, own, mu, "stop") for task, n, own, mu in zip(tasks, prompts, ids, logprobs, strict=True)]
