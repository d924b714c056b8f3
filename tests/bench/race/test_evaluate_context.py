"""The evaluator of context distillation, on a tiny model, against a sum over the vocabulary token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from bench.race.evaluate_context import PRIVILEGED, prompt_ids, scores, write
from stillhouse.builtin import STUDENT_DIR

QUESTIONS = ["12+34=", "1+1="]
SEED, MAX_NEW_TOKENS = 3, 6


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(STUDENT_DIR)


def model(seed: int, vocab_size: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, initializer_range=0.5,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@torch.no_grad()
def test_the_reverse_kl_is_the_sum_over_the_vocabulary_at_each_token_that_the_student_wrote(tokenizer: Any) -> None:
    student, teacher = model(0, len(tokenizer)), model(1, len(tokenizer))
    found = scores(student, teacher, tokenizer, QUESTIONS, MAX_NEW_TOKENS, SEED)
    torch.manual_seed(SEED)
    answers = write(student, tokenizer, [prompt_ids(tokenizer, question) for question in QUESTIONS], MAX_NEW_TOKENS)
    total, n_tokens = 0.0, 0
    for question, answer in zip(QUESTIONS, answers, strict=True):
        for i in range(len(answer)):
            reads = prompt_ids(tokenizer, question) + answer[:i]
            teacher_reads = prompt_ids(tokenizer, PRIVILEGED + question) + answer[:i]
            ours = student(torch.tensor([reads])).logits[0, -1].double().softmax(0).tolist()
            theirs = teacher(torch.tensor([teacher_reads])).logits[0, -1].double().softmax(0).tolist()
            total += sum(p * (math.log(p) - math.log(q)) for p, q in zip(ours, theirs, strict=True))
            n_tokens += 1
    assert found["mean_tokens"] == n_tokens / len(QUESTIONS)
    assert found["reverse_kl"] == pytest.approx(total / n_tokens, rel=1e-4)


def test_a_student_that_is_the_teacher_still_differs_as_it_does_not_read_the_instruction(tokenizer: Any) -> None:
    one = model(0, len(tokenizer))
    assert scores(one, one, tokenizer, QUESTIONS, MAX_NEW_TOKENS, SEED)["reverse_kl"] > 1e-3


def test_an_answer_ends_with_its_first_end_token(tokenizer: Any) -> None:
    """A student for whom all tokens are equally likely."""
    one = model(0, len(tokenizer))
    with torch.no_grad():
        one.lm_head.weight.zero_()
        one.model.norm.weight.zero_()
    torch.manual_seed(0)
    answers = write(one, tokenizer, [prompt_ids(tokenizer, question) for question in QUESTIONS], 200)
    end = tokenizer.eos_token_id
    assert all(end not in answer[:-1] for answer in answers)
    assert all(len(answer) == 200 or answer[-1] == end for answer in answers)
