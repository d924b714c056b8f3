"""Students are sent to servers by the names and shapes of their checkpoints, as `save_pretrained` writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from stillhouse.actors.config import ActorConfig
from stillhouse.engines.config import ServerConfig
from stillhouse.launch.config.run import ModelsConfig, RunConfig
from stillhouse.learner.config import LearnerConfig, LoraConfig
from stillhouse.learner.prompts.config import TaskConfig
from stillhouse.learner.step.lora import Adapters
from stillhouse.learner.worker import main
from stillhouse.models.loading import load_causal_lm, save_hf
from stillhouse.protocol.context import ExitCode, RoleContext
from stillhouse.protocol.messages import WeightVersion
from stillhouse.weights.buckets import PackedLayout, manifest_of
from stillhouse.weights.checkpoint_names import NamesError, checkpoint_pieces
from stillhouse.weights.roster import GroupMembers
from stillhouse.weights.staged_weights import StagedWeights, Weight

SERVERS = GroupMembers(kind="servers")
V1 = WeightVersion(0, 1)
TINY: Final[dict[str, Any]] = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 300, "pad_token_id": 0, "eos_token_id": 1},
}
MIXTURES: Final[dict[str, dict[str, Any]]] = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4},
    "glm4_moe": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


def tiny(model_type: str, **more: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **TINY, **MIXTURES.get(model_type, {}), **more)
    return AutoModelForCausalLM.from_config(config)


def loaded(folder: Path) -> PreTrainedModel:
    return load_causal_lm(folder, device="cpu", dtype="float32", attention="packed", train=True)


def saved(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def sent(model: PreTrainedModel, weights: Sequence[tuple[str, Weight]], **more: Any) -> dict[str, Tensor]:
    """The tensors that a broadcast to servers has, in buckets that cut through no tensor."""
    staged = StagedWeights(replace(SERVERS, pieces=checkpoint_pieces(model, weights)), bucket_bytes=1000, **more)
    staged.fill(V1, weights)
    assert PackedLayout(manifest_of(staged.named), 1000).run_of(staged.named) is not None, "they can be sent in place"
    return dict(staged.named)


def shake(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "gemma2", "phi3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_dense_student_has_the_names_of_its_checkpoint_already(model_type: str, tied: bool, tmp_path: Path) -> None:
    tiny(model_type, tie_word_embeddings=tied).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    assert checkpoint_pieces(model, model.named_parameters()) == {}
    assert {name for name, _ in model.named_parameters()} == saved(tmp_path).keys()


@pytest.mark.parametrize(
    ("model_type", "made"), [*((name, "loaded") for name in MIXTURES), ("qwen3_moe", "from its configuration")]
)
def test_a_mixture_of_experts_is_sent_as_the_tensors_of_its_checkpoint(
    model_type: str, made: str, tmp_path: Path
) -> None:
    model = tiny(model_type)
    if made == "loaded":
        model.save_pretrained(tmp_path / "first")
        model = loaded(tmp_path / "first")
    shake(model)
    model.save_pretrained(tmp_path / "trained")
    expected = saved(tmp_path / "trained")
    got = sent(model, list(model.named_parameters()))
    assert len(got) > len(list(model.parameters()))
    trained = {name for name in expected if "e_score_correction_bias" not in name}  # a buffer, which no gradient moves
    assert got.keys() == trained
    for name in trained:
        assert torch.equal(got[name], expected[name]), name


def test_they_are_cast_as_others_are_and_keep_their_places_between_other_dtypes() -> None:
    """Wide dtypes are sent first, so that pieces lie between tensors that the model has in another order."""
    model = tiny("qwen3_moe")
    model.lm_head.half()
    model.model.layers[0].mlp.experts.down_proj.data = model.model.layers[0].mlp.experts.down_proj.data.double()
    weights = list(model.named_parameters())
    got = sent(model, weights)
    experts = dict(weights)["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(got["model.layers.0.mlp.experts.3.down_proj.weight"], experts[3])
    assert torch.equal(got["lm_head.weight"], model.lm_head.weight)
    half = sent(model, weights, dtype="bfloat16")
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}
    gate = dict(weights)["model.layers.1.mlp.experts.gate_up_proj"][2, :8]
    assert torch.equal(half["model.layers.1.mlp.experts.2.gate_proj.weight"], gate.bfloat16())


@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_moe"])
def test_adapters_are_sent_merged_by_the_names_of_the_checkpoint(model_type: str, tmp_path: Path) -> None:
    tiny(model_type).save_pretrained(tmp_path / "base")
    model = loaded(tmp_path / "base")
    adapters = Adapters(model, LoraConfig(rank=2), base=str(tmp_path / "base"))
    shake(model)
    got = sent(model, list(adapters.published()))
    adapters.merge().save_pretrained(tmp_path / "merged")
    expected = saved(tmp_path / "merged")
    assert got.keys() == expected.keys()
    for name in got:
        torch.testing.assert_close(got[name], expected[name])


@pytest.mark.parametrize(
    ("model_type", "written"), [("hrm_text", "attn.gqkv_proj.weight"), ("inkling2_text", "experts.w13_weight")]
)
def test_a_student_whose_checkpoint_rearranges_elements_is_refused_by_name(model_type: str, written: str) -> None:
    """Joined from several parameters in the one, interleaved in the other: more than other names for the same bytes."""
    model = tiny(model_type)
    with pytest.raises(NamesError) as refused:
        checkpoint_pieces(model, model.named_parameters())
    words = str(refused.value)
    assert model_type in words and written in words and "--actor.engine torch" in words
    assert words.partition("otherwise in a checkpoint: ")[2].partition(",")[0] in dict(model.named_parameters())


def test_a_learner_whose_actors_are_on_servers_refuses_such_a_student_before_it_asks_for_anything(
    small_tokenizer: PreTrainedTokenizerFast,
    write_rows: Callable[[Sequence[dict[str, Any]]], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    save_hf(tiny("hrm_text"), small_tokenizer, tmp_path)
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
    assert "SGLang servers cannot be sent this student (hrm_text)" in caplog.text
