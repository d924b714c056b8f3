"""When servers prove that they have a version, and the learner's side of the canary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from stillhouse.learner.config import LoraConfig
from stillhouse.learner.step.lora import Adapters
from stillhouse.models.loading import load_causal_lm, save_hf
from stillhouse.weights.checks import Canary
from stillhouse.weights.roster import GroupMembers
from stillhouse.weights.server_checks import TOKENS, CheckSchedule, Due, LearnerCanary
from stillhouse.weights.staged_weights import tensor_of
from tests.learner.conftest import tiny_student

SERVERS = GroupMembers(kind="servers", check_by="reload")
NOTHING = Due("off", canary=False)
SONG = Due("off", canary=True)
WHOLE = Due("reload", canary=True)


def test_the_first_version_of_each_plan_is_checked_whole_until_it_was() -> None:
    schedule = CheckSchedule(SERVERS, 0)
    assert schedule.due(1) == WHOLE
    schedule.sent(1, checked=False)
    assert schedule.due(1) == WHOLE
    schedule.sent(1, checked=True)
    assert schedule.due(1) == NOTHING
    assert schedule.due(2) == WHOLE
    schedule.sent(2, checked=True)
    assert schedule.due(2) == NOTHING


def test_and_then_the_canary_sings_with_every_so_many() -> None:
    schedule = CheckSchedule(SERVERS, 3)
    due: list[Due] = []
    for plan in (1, 1, 1, 1, 1, 1, 1, 2, 2):
        due.append(schedule.due(plan))
        schedule.sent(plan, checked=due[-1] != NOTHING)
    assert due == [WHOLE, NOTHING, NOTHING, SONG, NOTHING, NOTHING, SONG, WHOLE, NOTHING]


def test_engines_are_never_asked_and_servers_not_when_it_is_off() -> None:
    assert CheckSchedule(GroupMembers(), 1).due(1) == NOTHING
    assert CheckSchedule(GroupMembers(kind="servers"), 1).due(1) == NOTHING


def plain(model: PreTrainedModel, canary: Canary) -> torch.Tensor:
    """The slow way."""
    with torch.no_grad():
        logits = model(torch.tensor([canary.token_ids])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(canary.token_ids[1:])[:, None])[:, 0]


def scored(canary: LearnerCanary) -> Canary:
    return canary.canary(canary.score())


@pytest.fixture
def folder(small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    save_hf(tiny_student(vocab=len(small_tokenizer)), small_tokenizer, tmp_path)
    return tmp_path


def test_it_is_what_a_plain_forward_says_under_the_weights_of_that_moment(folder: Path) -> None:
    model = load_causal_lm(folder, device="cpu", dtype="float32", attention="packed", train=True)
    canary = LearnerCanary(model, vocab_tokens=200, bfloat16=False, sent="keep")
    before = scored(canary)
    assert before.exact and len(before.token_ids) == TOKENS and max(before.token_ids) < 200
    assert len(set(before.token_ids)) > TOKENS // 2
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(torch.tensor(before.logprobs), plain(theirs, before), atol=1e-4, rtol=0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    assert scored(canary).logprobs != before.logprobs
    assert all(parameter.grad is None for parameter in model.parameters())


def test_with_adapters_it_is_that_of_the_merged_weights_that_are_sent(folder: Path) -> None:
    model = load_causal_lm(folder, device="cpu", dtype="float32", attention="packed", train=True)
    adapters = Adapters(model, LoraConfig(rank=2), base=str(folder))
    canary = LearnerCanary(model, vocab_tokens=200, bfloat16=False, sent="keep")
    before = scored(canary)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name:
                parameter.add_(0.3)
    after = scored(canary)
    merged = AutoModelForCausalLM.from_pretrained(folder)
    sent = {name: tensor_of(weight) for name, weight in adapters.published()}
    merged.load_state_dict(sent, strict=False)
    torch.testing.assert_close(torch.tensor(after.logprobs), plain(merged, after), atol=1e-4, rtol=0.0)
    assert (torch.tensor(after.logprobs) - torch.tensor(before.logprobs)).abs().mean() > 0.01


def test_rounded_products_or_weights_are_not_called_exact(folder: Path) -> None:
    model = load_causal_lm(folder, device="cpu", dtype="float32", attention="packed", train=True)
    exact = scored(LearnerCanary(model, vocab_tokens=200, bfloat16=False, sent="float32"))
    half = scored(LearnerCanary(model, vocab_tokens=200, bfloat16=True, sent="keep"))
    assert (exact.exact, half.exact) == (True, False)
    assert not scored(LearnerCanary(model, vocab_tokens=200, bfloat16=False, sent="bfloat16")).exact
    apart = (torch.tensor(exact.logprobs) - torch.tensor(half.logprobs)).abs().mean()
    assert 0 < apart < 0.1
