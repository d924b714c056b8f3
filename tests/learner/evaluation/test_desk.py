"""Evaluations under way: what is offered, asked for again, handed out once complete, and given up."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

import stillhouse.learner.evaluation.desk
from stillhouse.learner.evaluation.desk import EvaluationDesk
from stillhouse.learner.evaluation.evaluation import EvalPlan, EvalPrompt, EvaluationResult, EvaluationRun
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.protocol.messages import (
    BatchItem,
    EvalResult,
    EvalWanted,
    Message,
    Task,
    TasksOffered,
    VersionSpan,
    WeightVersion,
)

V0, V20 = WeightVersion(0, 0), WeightVersion(0, 20)


class World:
    """A desk, what it sent, and the figures it handed out."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, n_prompts: int = 3) -> None:
        config = TaskConfig(eval_greedy=n_prompts, eval_sampled=n_prompts)
        prompts = [EvalPrompt(np.array([65 + i % 20, 66], np.int32), "t", "1") for i in range(n_prompts)]
        self.sent: list[Message] = []
        self.frames = 0
        self.figures: list[EvaluationResult] = []
        self.desk = EvaluationDesk(
            lambda version, name: EvaluationRun(
                config, prompts, tokenizer, version=version, seed=1, plan=EvalPlan(name, 100 if name else 0)
            ),
            self._send,
            self._note,
        )

    def _send(self, message: Message, arrays: object) -> None:
        self.sent.append(message)

    def _note(self, result: EvaluationResult) -> None:
        self.figures.append(result)

    @property
    def tasks(self) -> list[Task]:
        return [task for message in self.sent if isinstance(message, TasksOffered) for task in message.tasks]

    @property
    def wanted(self) -> list[tuple[str, int]]:
        """Evaluation, and how many results were there already, for each time it was asked for."""
        return [(msg.eval_id, len(msg.have)) for msg in self.sent if isinstance(msg, EvalWanted)]

    def answer(self, *tasks: Task, failed: int = 0, eval_id: str = "") -> None:
        arrays: list[np.ndarray] = []
        items: list[BatchItem] = []
        for task in tasks:
            spans = (VersionSpan(V0, 2, 4),)
            rollout_id = f"eval-{task.task_id}-0-0"
            items.append(BatchItem(rollout_id, task.task_id, 0, 1, "t", (), 4, spans, True, "stop", 1.0, 1))
            arrays += [
                np.array([65, 66, 67, 68], np.int32),
                np.full(4, -0.5, np.float32),
                np.array([0, 0, 1, 1], np.uint8),
                np.zeros((0, 4), np.float32),
            ]
        self.desk.add(EvalResult(eval_id or tasks[0].eval_id, tuple(items), failed, 0), tuple(arrays))


@pytest.fixture
def world(small_tokenizer: PreTrainedTokenizerFast) -> World:
    return World(small_tokenizer)


def halves(tasks: list[Task]) -> list[list[Task]]:
    return [[task for task in tasks if task.eval_id == eval_id] for eval_id in sorted({t.eval_id for t in tasks})]


def test_several_sets_are_evaluated_at_once_and_come_back_one_by_one(world: World) -> None:
    world.desk.start(V0, ("", "hard"))
    assert (world.desk.active, len({task.task_id for task in world.tasks})) == (2, 12)
    by_half = {half[0].eval_id: half for half in halves(world.tasks)}
    assert by_half.keys() == {"000000-greedy", "000000-sampled", "000000-hard-greedy", "000000-hard-sampled"}
    world.answer(*by_half["000000-hard-greedy"])
    world.answer(*by_half["000000-hard-sampled"])
    assert ([figures.name for figures in world.figures], world.desk.active) == (["hard"], 1)
    world.answer(*by_half["000000-greedy"])
    world.answer(*by_half["000000-sampled"])
    assert [(figures.name, figures.n_sampled) for figures in world.figures] == [("hard", 3), ("", 3)]


def test_a_version_is_evaluated_once(world: World) -> None:
    """The buffer would not give its results again, so a second evaluation would never be complete."""
    world.desk.start(V0)
    world.desk.start(V0)
    assert (world.desk.active, len(world.tasks)) == (1, 6)
    for half in halves(world.tasks):
        world.answer(*half)
    world.desk.start(V0, ("", "hard"))
    assert (world.desk.active, len(world.tasks), len(world.figures)) == (1, 12, 1), "of the other set only"
    world.desk.start(V20)
    assert world.desk.active == 2


def test_an_evaluation_goes_out_as_tasks_and_comes_back_as_figures(world: World) -> None:
    world.desk.start(V0)
    assert (world.desk.active, len(world.tasks), {task.kind for task in world.tasks}) == (1, 6, {"eval"})
    for half in halves(world.tasks):
        assert world.figures == [] and world.wanted == []
        world.answer(*half)
    assert world.desk.active == 0
    assert world.wanted == [("000000-greedy", 3), ("000000-sampled", 3)], "the buffer may let go of them"
    (figures,) = world.figures
    assert (figures.step, figures.n_greedy, figures.n_sampled, figures.missing) == (0, 3, 3, 0)


def test_what_is_missing_is_asked_for_again_but_not_all_the_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.desk.ask()
    assert world.wanted == []
    monkeypatch.setattr(stillhouse.learner.evaluation.desk, "REPEAT_S", 3600.0)
    world.desk.start(V0)
    world.desk.ask()
    world.desk.ask()
    assert world.wanted == [("000000-greedy", 0), ("000000-sampled", 0)]
    monkeypatch.setattr(stillhouse.learner.evaluation.desk, "REPEAT_S", 0.0)
    greedy, _ = halves(world.tasks)
    world.answer(*greedy[:2])
    world.desk.ask()
    assert world.wanted[2:] == [("000000-greedy", 2), ("000000-sampled", 0)]
    world.answer(greedy[2])
    world.desk.ask()
    assert world.wanted[4:] == [("000000-sampled", 0)]


def test_given_up_it_hands_out_what_is_there_and_says_what_is_missing(world: World) -> None:
    world.desk.start(V0)
    greedy, sampled = halves(world.tasks)
    world.answer(*greedy)
    world.answer(sampled[0], failed=1)
    world.desk.give_up()
    (figures,) = world.figures
    assert (figures.n_greedy, figures.n_sampled, figures.failed, figures.missing) == (3, 1, 1, 1)
    assert world.wanted == [("000000-greedy", 3), ("000000-sampled", 1)]
    assert world.desk.active == 0
    world.answer(sampled[1])
    assert len(world.figures) == 1, "too late"


def test_a_repeat_of_a_complete_evaluation_changes_nothing(world: World) -> None:
    world.desk.start(V0)
    for half in halves(world.tasks):
        world.answer(*half)
    world.answer(*halves(world.tasks)[0])
    assert len(world.figures) == 1
