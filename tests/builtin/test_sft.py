"""Training examples say exactly what the model has to write, the loop learns, and the shipped models are what they
are said to be."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from stillhouse.builtin import EVAL_JSONL, STUDENT_DIR, TEACHER_DIR, build
from stillhouse.builtin.addition import Chain, Problem, read_problems
from stillhouse.builtin.build import draw_problem_sets
from stillhouse.builtin.measure import Accuracy, accuracy, calculator_accuracy
from stillhouse.builtin.sft import IGNORED, HeldOut, Recipe, encode_example, example_stream, new_model, train

TINY = Recipe(hidden=32, mlp=64, steps=12, learning_rate=3e-3, seed=5, init_std=0.08, warmup_steps=2)
NOTHING_HELD_OUT = HeldOut(frozenset(), frozenset())


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return cast(PreTrainedTokenizerFast, AutoTokenizer.from_pretrained(STUDENT_DIR))


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def trained_text(tokenizer: PreTrainedTokenizerFast, task: Problem | Chain) -> list[str]:
    """The runs of tokens that carry loss, as text."""
    example = encode_example(tokenizer, task, "compact")
    assert len(example.token_ids) == len(example.labels)
    assert all(label in (IGNORED, i) for i, label in zip(example.token_ids, example.labels, strict=True))
    runs = itertools.groupby(example.labels, key=lambda label: label != IGNORED)
    return [cast(str, tokenizer.decode(list(run))) for trained, run in runs if trained]


def test_loss_is_on_the_completion_and_its_end_of_turn_only(tokenizer: PreTrainedTokenizerFast) -> None:
    assert trained_text(tokenizer, Problem(28, 37)) == ["8+7+0=15;2+3+1=6 #65<|im_end|>"]


def test_results_of_the_calculator_carry_no_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    runs = trained_text(tokenizer, Chain((12, 34, 56)))
    assert runs == ["<calc>12+34</calc>", "<calc>46+56</calc>", " #102<|im_end|>"]


@pytest.mark.parametrize("hybrid", [False, True])
def test_training_lowers_the_loss_and_stops_when_told(tokenizer: PreTrainedTokenizerFast, hybrid: bool) -> None:
    torch.manual_seed(0)
    losses: list[float] = []

    def after_step(step: int, loss: float) -> bool:
        losses.append(loss)
        return step == 10

    examples = example_stream(tokenizer, TINY, NOTHING_HELD_OUT)
    model = new_model(replace(TINY, hybrid=hybrid), tokenizer)
    assert model.config.model_type == ("qwen3_5_text" if hybrid else "qwen3")
    assert 2 * cast(Any, model).model.rotary_emb.inv_freq.numel() == TINY.head_dim  # the whole head is turned
    steps = train(model, examples, TINY, cast(int, tokenizer.pad_token_id), after_step)
    assert steps == len(losses) == 10
    assert losses[-1] < 0.8 * losses[0]


def test_the_problem_sets_do_not_overlap() -> None:
    sets = draw_problem_sets()
    assert len({*sets.train, *sets.eval, *sets.probe}) == len(sets.train) + len(sets.eval) + len(sets.probe)
    assert set(sets.calculator_train).isdisjoint(sets.calculator_eval)
    assert sets.held_out.problems == {*sets.eval, *sets.probe}


def test_the_shipped_teacher_is_right_and_the_student_is_not_yet(tokenizer: PreTrainedTokenizerFast) -> None:
    tasks = read_problems(EVAL_JSONL)[:96]
    assert accuracy(load(TEACHER_DIR), tokenizer, tasks, temperature=1.0) >= 0.85
    assert 0.1 <= accuracy(load(STUDENT_DIR), tokenizer, tasks, temperature=1.0) <= 0.4


def test_the_shipped_teacher_uses_the_calculator(tokenizer: PreTrainedTokenizerFast) -> None:
    tasks = [Chain((12, 34)), Chain((123, 45, 678)), Chain((99, 11)), Chain((55, 12, 310))]
    assert calculator_accuracy(load(TEACHER_DIR), tokenizer, tasks) >= 0.5


@pytest.mark.parametrize("option", ["--hybrid", "--pairs"])
def test_one_model_in_a_folder_of_its_own_leaves_the_packages_problems_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    writes, saves = Mock(), Mock()
    monkeypatch.setattr(build, "write_problems", writes)
    monkeypatch.setattr(build, "build_model", Mock())
    monkeypatch.setattr(build, "save", saves)
    monkeypatch.setattr(build, "measure", Mock(return_value=Accuracy(0.0, 0.0, 0.0)))
    build.main([option, str(tmp_path)])
    assert saves.call_args.args[-1] == tmp_path and not writes.called
