"""Tasks of the real package reasoning_gym, answered by scripts."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from typing import Any

import pytest

from stillhouse.actors.envs.registry import check_options
from tests.actors.adapters.conftest import MADE_BY, Play

SUMS: dict[str, object] = {"dataset": "chain_sum", "config": {"max_terms": 2, "seed": 7}}


@pytest.fixture(scope="module", autouse=True)
def package() -> Any:
    """Imported where these tests run, and not wherever they are collected: it takes long."""
    return pytest.importorskip("reasoning_gym", reason=MADE_BY)


def entry(index: int) -> dict[str, Any]:
    return importlib.import_module("reasoning_gym").create_dataset("chain_sum", max_terms=2, seed=7)[index]


def test_the_question_of_the_rows_index_is_asked_and_its_checker_scores(play: Play) -> None:
    row, task = {"prompt": "Think.", "index": 3}, entry(3)
    right = play("reasoning_gym", [f"<answer>0</answer>, no: <answer> {task['answer']} </answer>"], SUMS, row=row)
    assert f"user\nThink.\n\n{task['question']}\n\nWrite the final answer between <answer>" in right.prompt
    assert (right.end.finish_reason, right.end.reward) == ("stop", 1.0)
    wrong = play("reasoning_gym", ["<answer>nothing</answer>"], SUMS, row=row)
    assert (wrong.end.reward, dict(wrong.end.info)) == (0.0, {})


def test_an_answer_that_is_not_marked_is_none(play: Play) -> None:
    played = play("reasoning_gym", [entry(3)["answer"]], SUMS, row={"index": 3})
    assert (played.end.reward, played.total("reasoning_gym_unanswered")) == (0.0, 1.0)


def test_question_and_answer_in_a_form_that_a_model_knows(play: Play) -> None:
    form: dict[str, object] = {
        "instructions": "",
        "rewrite": [["^.*: ", ""], [" ", ""]],
        "answer_pattern": r"#\s*(-?\d+)",
    }
    task = entry(4)
    played = play("reasoning_gym", [f"so #{task['answer']}"], SUMS | form, row={"prompt": "{question}", "index": 4})
    asked = task["metadata"]["expression"].replace(" ", "") + "="
    assert played.prompt == f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    assert played.end.reward == 1.0


def test_without_an_index_the_seed_chooses(play: Play) -> None:
    def asked(row: dict[str, object], more: dict[str, object] | None = None) -> str:
        return play("reasoning_gym", [], SUMS | (more or {}), row=row).prompt

    assert asked({"seed": 503}, {"size": 500}) == asked({"index": 3})
    assert asked({}) == asked({"index": 5})  # the task's seed
    with pytest.raises(ValueError, match="index = 500, expected one below the size 500"):
        asked({"index": 500})


def test_the_seed_of_a_data_set_is_fixed(package: Any, play: Play) -> None:
    """Else two actors would ask different questions for the same row."""
    plain = {"dataset": "chain_sum"}
    zero = package.create_dataset("chain_sum", seed=0)[1]["question"]
    assert zero in play("reasoning_gym", [], plain, row={"index": 1}).prompt


def test_a_checker_that_fails_on_an_answer_is_counted(play: Play) -> None:
    played = play("reasoning_gym", ["<answer>none</answer>"], {"dataset": "prime_factorization"}, row={"index": 0})
    assert (played.end.reward, played.total("reasoning_gym_checker_errors")) == (0.0, 1.0)


def test_data_sets_whose_checker_runs_the_answer_are_known_by_name(package: Any) -> None:
    """What `eval` or `parse_expr` of sympy is given is a program. The names are compared with the package's sources."""
    from stillhouse.actors.envs.adapters.reasoning_gym import EVALUATES_ANSWERS

    running: set[str] = set()
    for name, (made, _) in package.factory.DATASETS.items():
        source = inspect.getsource(made.score_answer)
        helpers = [getattr(made, method, None) for method in re.findall(r"self\.(\w+)\(", source)]
        helpers += [getattr(sys.modules[made.__module__], method, None) for method in re.findall(r"\b(\w+)\(", source)]
        ours = [f for f in helpers if inspect.isroutine(f) and "reasoning_gym" in str(getattr(f, "__module__", ""))]
        text = source + "".join(inspect.getsource(f) for f in ours if inspect.isfunction(f))
        if re.search(r"\b(eval|exec|parse_expr|sympify)\(", text):
            running.add(name)
    evaluate_what_they_made = {"bitwise_arithmetic", "number_sorting"}
    own_parser = {"propositional_logic"}
    assert running - evaluate_what_they_made - own_parser == EVALUATES_ANSWERS


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"dataset": "chain_sums"}, "unknown data set 'chain_sums'; did you mean 'chain_sum'"),
        ({"dataset": "zzz"}, "Known: ab, acre"),
        ({"dataset": "chain_sum", "config": {"terms": 2}}, "cannot be made with .*terms"),
        ({"dataset": "chain_sum", "size": 0}, "size must be positive"),
        ({"dataset": "chain_sum", "answer_pattern": "x"}, "0 groups"),
        ({"dataset": "chain_sum", "rewrite": ["ab"]}, "expected pairs"),
        ({"dataset": "chain_sum", "rewrite": [["(", ""]]}, "not a regular expression"),
        ({"dataset": "countdown"}, "countdown runs the student's answer as Python code .*allow_eval = true"),
        ({"dataset": "composite", "config": {"datasets": [{"name": "n_queens"}]}}, "n_queens runs the student's"),
        ({}, "missing a required .*argument: 'dataset'"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        check_options("reasoning_gym", options)


def test_what_runs_answers_is_allowed_by_name() -> None:
    check_options("reasoning_gym", {"dataset": "countdown", "allow_eval": True})
