"""A student with experts: its gradient against a slow reference, its memory-saving forms, and its adapters."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from stillhouse.learner.batch import TrainItem
from stillhouse.learner.config import LearnerConfig, LoraConfig
from stillhouse.learner.step.lora import Adapters, LoraError
from stillhouse.learner.step.train_step import Trainer
from stillhouse.models import packed
from tests.learner.conftest import VOCAB, make_item
from tests.learner.step.gradients import PLAIN, assert_close, slow_gradients, step_gradients

N_EXPERTS = 8
SHAPE: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64},
    **{"num_experts": N_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "initializer_range": 0.3},
}


def student(implementation: str = packed.IMPLEMENTATION, **more: Any) -> PreTrainedModel:
    """The same random Qwen3-MoE each time."""
    torch.manual_seed(0)
    model = cast(PreTrainedModel, Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **more)))
    model.set_attn_implementation(implementation)
    return model.eval()


def batch() -> list[TrainItem]:
    return [make_item("a", [0, 0, 1, 1, 1]), make_item("b", [0, 1, 1, 0, 0, 1]), make_item("c", [0] * 5 + [1] * 9)]


def routed(model: PreTrainedModel, items: list[TrainItem]) -> list[set[int]]:
    """The experts of each layer whose output reaches the loss. In the last layer, that of a token does only if the next
    token is trained."""
    asked = [set[int]() for _ in range(model.config.num_hidden_layers)]
    for item in items:
        ids_L = torch.from_numpy(item.tokens_L).long()[:-1]
        trained_next = torch.from_numpy(item.train_mask_L)[1:]
        for layer, scores_TE in enumerate(model(ids_L[None], output_router_logits=True).router_logits):
            chosen_TK = scores_TE.topk(2, dim=-1).indices
            asked[layer].update((chosen_TK[trained_next] if layer == len(asked) - 1 else chosen_TK).flatten().tolist())
    return asked


def test_gradient_equals_the_slow_reference_and_reaches_each_expert_that_was_asked() -> None:
    """The objective alone: a loss that balances the router's load is not part of it, whatever the model's configuration
    says."""
    config, items = LearnerConfig(**PLAIN, pack_tokens=16, logprob_chunk_tokens=5), batch()
    trainer = Trainer(student(output_router_logits=True, router_aux_loss_coef=10.0), config, total_steps=10)
    got = step_gradients(trainer, items)
    expected = slow_gradients(student("eager"), items, config)
    assert_close(got, expected, atol=1e-5, rtol=1e-4)
    for layer, used in enumerate(routed(student("eager"), items)):
        for part in ("gate_up_proj", "down_proj"):
            gradient_E = got[f"model.layers.{layer}.mlp.experts.{part}"].flatten(1).norm(dim=1)
            assert {expert for expert in range(N_EXPERTS) if gradient_E[expert] > 0} == used
        assert got[f"model.layers.{layer}.mlp.gate.weight"].norm() > 0
    assert trainer.step(items).grad_norm > 0


@pytest.mark.parametrize(
    ("settings", "cosine"),
    [({"recompute": 1.0}, 0.99999), ({"pack_tokens": 1}, 0.99999), ({"dtype": "bfloat16"}, 0.99)],
)
def test_settings_that_save_memory_keep_the_gradient(settings: dict[str, Any], cosine: float) -> None:
    def flat(config: LearnerConfig) -> Tensor:
        found = step_gradients(Trainer(student(), config, total_steps=10), batch())
        return torch.cat([found[name].flatten() for name in sorted(found)])

    plain, other = flat(LearnerConfig(**PLAIN)), flat(LearnerConfig(**PLAIN, **settings))
    assert torch.nn.functional.cosine_similarity(plain, other, dim=0) > cosine


def test_by_default_adapters_are_on_linear_layers_and_not_on_experts() -> None:
    model = student()
    adapters = Adapters(model, LoraConfig(rank=2), base="x")
    trained = {name.split(".lora_")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    layers = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(2) for part in "qkvo"]
    assert trained == set(layers) and adapters.n_trained > 0


@pytest.mark.filterwarnings("ignore:The following .* keys did not match:RuntimeWarning")  # peft, of its own pattern
@pytest.mark.parametrize("targets", [(), ("q_proj", "gate_proj", "up_proj")])
def test_targets_that_peft_takes_for_experts_too_are_refused(targets: tuple[str, ...]) -> None:
    """A layer without experts has linear layers of the same names."""
    with pytest.raises(LoraError, match="experts of Qwen3MoeForCausalLM too"):
        Adapters(student(mlp_only_layers=[1]), LoraConfig(rank=2, targets=targets), base="x")
