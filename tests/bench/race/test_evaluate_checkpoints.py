"""The evaluator of bench/race/against_trl.py against a loop that writes token by token and reads the answer itself."""

from __future__ import annotations

import json
import statistics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.race.evaluate_checkpoints import scores
from stillhouse.builtin import EVAL_JSONL, STUDENT_DIR, TEACHER_DIR
from stillhouse.builtin.addition import read_problems
from stillhouse.builtin.measure import MAX_NEW_TOKENS

N = 12


@torch.no_grad()
def greedy_share() -> float:
    """Of the first N problems, how many the student solves if it always takes the likeliest token."""
    model = AutoModelForCausalLM.from_pretrained(STUDENT_DIR, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(STUDENT_DIR)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    right = 0
    for line in EVAL_JSONL.read_text().splitlines()[:N]:
        row = json.loads(line)
        text = f"<|im_start|>user\n{row['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(text, add_special_tokens=False)
        n_prompt = len(ids)
        while len(ids) < n_prompt + MAX_NEW_TOKENS and ids[-1] != end:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        written = tokenizer.decode([token for token in ids[n_prompt:] if token != end])
        right += written.rsplit("#", 1)[-1].strip() == row["ground_truth"]
    return right / N


def test_the_greedy_accuracy_is_that_of_a_plain_loop() -> None:
    tasks = read_problems(EVAL_JSONL)[:N]
    expected = greedy_share()
    assert 0.1 < expected < 0.9, "choose other problems: all right or all wrong shows nothing"
    assert scores(STUDENT_DIR, tasks, answers=1, seed=0)["accuracy_greedy"] == expected


def test_the_sampled_accuracy_is_the_mean_over_answers_and_the_same_for_the_same_seed() -> None:
    tasks = read_problems(EVAL_JSONL)[:64]
    singly = [scores(STUDENT_DIR, tasks, answers=1, seed=seed)["accuracy_sampled"] for seed in (5, 6, 7)]
    assert scores(STUDENT_DIR, tasks, answers=3, seed=5)["accuracy_sampled"] == statistics.mean(singly)
    assert len(set(singly)) > 1


def test_a_better_model_scores_better() -> None:
    tasks = read_problems(EVAL_JSONL)[:64]
    teacher, student = (scores(folder, tasks, answers=1, seed=0) for folder in (TEACHER_DIR, STUDENT_DIR))
    assert teacher["accuracy_sampled"] > 0.9 > 0.6 > student["accuracy_sampled"]
