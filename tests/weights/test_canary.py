"""The learner's own part of the canary: what it says is what the student that is sent thinks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from learner.step.lora import Adapters
from learner.step.lora_config import LoraConfig
from models.loading import load_causal_lm, save_hf
from weights.canary import TOKENS, LearnerCanary
from weights.checks import Canary
from weights.staged_weights import tensor_of

Student = Callable[..., PreTrainedModel]


def plain(model: PreTrainedModel, canary: Canary) -> torch.Tensor:
    """The slow way."""
    with torch.no_grad():
        logits = model(torch.tensor([canary.token_ids])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(canary.token_ids[1:])[:, None])[:, 0]


def told(canary: LearnerCanary) -> Canary:
    return canary.told(canary.score())


@pytest.fixture
def folder(tiny_student: Student, small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    save_hf(tiny_student(vocab=len(small_tokenizer)), small_tokenizer, tmp_path)
    return tmp_path


def test_it_is_what_a_plain_forward_says_under_the_weights_of_that_moment(folder: Path) -> None:
    model = load_causal_lm(folder, device="cpu", dtype="float32", attention="packed", train=True)
    canary = LearnerCanary(model, vocab_tokens=200, bfloat16=False, sent="keep")
    before = told(canary)
    assert before.exact and len(before.token_ids) == TOKENS and max(before.token_ids) < 200
    assert len(set(before.token_ids)) > TOKENS // 2
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(torch.tensor(before.logprobs), plain(theirs, before), atol=1e-4, rtol=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert told(canary).logprobs != before.logprobs
    assert all(parameter.grad is None for parameter in model.parameters())


def test_with_adapters_it_is_that_of_the_merged_weights_that_are_sent(folder: Path) -> None:
    model = load_causal_lm(folder, device="cpu", dtype="float32", attention="packed", train=True)
    adapters = Adapters(model, LoraConfig(rank=2), base=str(folder))
    canary = LearnerCanary(model, vocab_tokens=200, bfloat16=False, sent="keep")
    before = told(canary)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.add_(0.3)
    after = told(canary)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    sent = {name: tensor_of(weight) for name, weight in adapters.published()}
    merged.load_state_dict(sent, strict=False)
    torch.testing.assert_close(torch.tensor(after.logprobs), plain(merged, after), atol=1e-4, rtol=0.0)
    assert (torch.tensor(after.logprobs) - torch.tensor(before.logprobs)).abs().mean() > 0.01


def test_rounded_products_or_weights_are_not_called_exact(folder: Path) -> None:
    model = load_causal_lm(folder, device="cpu", dtype="float32", attention="packed", train=True)
    exact = told(LearnerCanary(model, vocab_tokens=200, bfloat16=False, sent="float32"))
    half = told(LearnerCanary(model, vocab_tokens=200, bfloat16=True, sent="keep"))
    assert (exact.exact, half.exact) == (True, False)
    assert not told(LearnerCanary(model, vocab_tokens=200, bfloat16=False, sent="bfloat16")).exact
    apart = (torch.tensor(exact.logprobs) - torch.tensor(half.logprobs)).abs().mean()
    assert 0 < apart < 0.1
