"""Which students servers can load, when they prove that they have a version, and the learner's side of the canary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from actors.config import ActorConfig
from engines.config import ServerConfig
from launch.config.run import ModelsConfig, RunConfig
from learner.config import LearnerConfig, LoraConfig
from learner.prompts.config import TaskConfig
from learner.step.lora import Adapters
from learner.worker import main
from models.loading import load_causal_lm, save_hf
from protocol.context import ExitCode, RoleContext
from weights.checks import Canary
from weights.roster import Members
from weights.server_checks import TOKENS, CheckSchedule, Due, LearnerCanary, NamesError, check_names
from weights.staged_weights import tensor_of

SERVERS = Members(kind="servers", check_by="reload")


TINY: Final[dict[str, Any]] = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 300, "pad_token_id": 0, "eos_token_id": 1},
}
MIXTURES: Final[dict[str, dict[str, Any]]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
}


def tiny(model_type: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **TINY, **more)
    return AutoModelForCausalLM.from_config(config)


def loaded(folder: Path) -> PreTrainedModel:
    return load_causal_lm(folder, device="cpu", dtype="float32", attention="packed", train=True)


def names_in(folder: Path) -> set[str]:
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        return set(opened.keys())


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "llama", "mistral", "gemma2", "phi3", "olmo2"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_student_is_sent_by_the_names_of_its_checkpoint(model_type: str, tied: bool, tmp_path: Path) -> None:
    tiny(model_type, tie_word_embeddings=tied).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    check_names(model, model.named_parameters())
    assert {name for name, _ in model.named_parameters()} == names_in(tmp_path)


@pytest.mark.parametrize("model_type", MIXTURES)
def test_a_mixture_of_experts_is_refused_by_the_names_that_a_server_would_pass_over(
    model_type: str, tmp_path: Path
) -> None:
    tiny(model_type, **MIXTURES[model_type]).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    with pytest.raises(NamesError) as refused:
        check_names(model, model.named_parameters())
    words = str(refused.value)
    assert model_type in words and "model.layers.0.mlp.experts.gate_up_proj" in words and "--actor.engine" in words
    written = words.partition("a checkpoint has ")[2].partition(",")[0]
    assert written in names_in(tmp_path)


def test_a_student_that_was_made_and_not_loaded_is_judged_alike() -> None:
    model = tiny("qwen3_moe", **MIXTURES["qwen3_moe"])
    with pytest.raises(NamesError, match=r"experts\.gate_up_proj"):
        check_names(model, model.named_parameters())


def test_adapters_are_sent_merged_by_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    tiny("qwen3").save_pretrained(tmp_path)
    model = loaded(tmp_path)
    adapters = Adapters(model, LoraConfig(rank=2), base=str(tmp_path))
    check_names(model, adapters.published())
    assert {name for name, _ in adapters.published()} == names_in(tmp_path)


def test_a_learner_whose_actors_are_on_servers_refuses_such_a_student_before_it_asks_for_anything(
    small_tokenizer: PreTrainedTokenizerFast,
    write_rows: Callable[[Sequence[dict[str, Any]]], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_hf(tiny("qwen3_moe", **MIXTURES["qwen3_moe"]), small_tokenizer, tmp_path)
    prompts = write_rows([{"prompt": f"{n} + 1"} for n in range(4)])
    config = RunConfig(
        models=ModelsConfig(student=str(tmp_path)),
        actor=ActorConfig(engine="sglang", server=ServerConfig(device="cpu")),
        learner=LearnerConfig(tasks=TaskConfig(prompts=str(prompts)), device="cpu"),
    )
    ctx = RoleContext(
        role="learner", index=0, name="learner-0", incarnation="first", run_id="run", run_dir=tmp_path,
        buffer_address="tcp://127.0.0.1:1", resume=False, config=config,
    )  # fmt: skip
    assert main(ctx) == ExitCode.USELESS
    assert "experts.gate_up_proj" in caplog.text


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
    assert CheckSchedule(Members(), 1).due(1) == NOTHING
    assert CheckSchedule(Members(kind="servers"), 1).due(1) == NOTHING


Student = Callable[..., PreTrainedModel]


def plain(model: PreTrainedModel, canary: Canary) -> torch.Tensor:
    """The slow way."""
    with torch.no_grad():
        logits = model(torch.tensor([canary.token_ids])).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(canary.token_ids[1:])[:, None])[:, 0]


def scored(canary: LearnerCanary) -> Canary:
    return canary.canary(canary.score())


@pytest.fixture
def folder(tiny_student: Student, small_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
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
