"""Try the causal language models of transformers, each as a tiny random model, and print the table of docs/models.md.

    .venv/bin/python scripts/models.py [MODEL_TYPE ...]        all of them take some minutes

student, teacher: how sequences run together, after a comparison with each alone (`models.packed.choose_way`)
engine: slots (the slot cache) or own (transformers' cache), after a comparison with the plain forward pass
LoRA: a gradient reaches each adapter; ranks: the layers that ranks share out are known
SGLang: the release in .venv-sglang names the class (it was not started)
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from stillhouse.engines.torch.decoders import build_slots
from stillhouse.engines.torch.kv_cache import UnsupportedModelError
from stillhouse.engines.torch.model_caches import ModelCaches
from stillhouse.learner.config import LoraConfig
from stillhouse.learner.step.lora import Adapters
from stillhouse.models.layers import layers
from stillhouse.models.logprobs import lm_head
from stillhouse.models.packed import FAILURES, PackingError, choose_way, packed_hidden, way_of

ROOT: Final = Path(__file__).resolve().parent.parent
LIMIT_S: Final = 60
MOST_PARAMETERS: Final = 7_000_000
_SIZES: Final[tuple[tuple[int, str], ...]] = (
    (64, "vocab_size mamba_d_ssm vocab_size_per_layer_input"),
    (32, "hidden_size n_embd d_model dim conv_dim conv_dim_out lru_width block_dim embedding_size"),
    (32, "word_embed_proj_dim emb_dim pronunciation_embed_dim shape_embed_dim vision_output_dim projection_dim"),
    (64, "pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab output_dim"),
    (
        48,
        "intermediate_size ffn_dim n_inner ffn_hidden_size intermediate_size_mlp block_ff_dim dense_intermediate_size",
    ),
    (24, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    (24, "shared_intermediate_size expert_ffn_hidden_size"),
    (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads rotary_dim"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads mamba_dt_rank"),
    (4, "time_step_rank"),
    (
        2,
        "num_key_value_heads n_head_kv num_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk moe_top_k",
    ),
    (2, "linear_num_key_heads index_n_heads mamba_expand expand n_mamba_heads"),
    (8, "head_dim attention_head_dim kv_channels global_head_dim swa_head_dim qk_nope_head_dim qk_rope_head_dim"),
    (8, "v_head_dim linear_key_head_dim linear_value_head_dim mamba_n_heads mamba_num_heads mamba_d_head index_topk"),
    (8, "mamba_head_dim mamba_d_state ssm_state_size state_size mamba_chunk_size chunk_size mamba_headdim"),
    (8, "hidden_size_per_layer_input"),
    (16, "q_lora_rank kv_lora_rank o_lora_rank index_head_dim qk_head_dim attention_chunk_size sliding_window"),
    (16, "attention_window_size"),
    (512, "max_position_embeddings n_positions n_ctx max_seq_len"),
    (1, "n_group topk_group n_shared_experts mamba_n_groups n_groups mamba_ngroups"),
)
SIZES: Final = {name: size for size, names in _SIZES for name in names.split()}
_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_MORE: Final[Mapping[str, Mapping[str, Any]]] = {
    "bailing_hybrid": {"linear_head_dim": 8, "linear_num_heads": 4, "num_expert_group": 1, "qk_head_dim": 16},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {
            name: {"rope_type": "default", "rope_theta": 1e4} for name in ("full_attention", "sliding_attention")
        }
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {
        **{
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        **{"intermediate_size": [48] * 4, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0], "laurel_rank": 8},
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "ministral": {"head_dim": 8},
    "dots3_note_text": {
        **{"head_dim": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8, "swa_q_lora_rank": 16},
        **{"swa_kv_lora_rank": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 8},
    "dots3_note_vision_encoder": {"adapter_in_dim": 32, "adapter_out_dim": 32, "pyramid_num_routed": [-1, 4]},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        **{"hc_lowrank": 8, "ple_embed_dim": 32, "ngram_vocab_size_base": 64, "split_ngram_parts": 1},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16},
        "indexer_compress_ratio": 4,
    },
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zamba2": {"mamba_headdim": 8, "n_mamba_heads": 8, "attention_hidden_size": 64, "attention_head_dim": 16},
}
"""What the defaults leave out (layers of each kind, experts, heads) or what these sizes do not divide."""
NEVER: Final[Mapping[str, str]] = {
    "gemma3n": "its image tower needs the package timm; its text model is gemma3n_text",
    "gemma4_assistant": "it drafts for another model, whose keys and values it reads",
    "gemma4_unified_assistant": "it drafts for another model, whose keys and values it reads",
    "musicgen": "transformers gives its class the whole configuration, and it reads that of its decoder",
    "musicgen_melody": "transformers gives its class the whole configuration, and it reads that of its decoder",
}
"""Why a tiny model of these cannot be made."""
_IDS: Final = ("pad_token_id", "bos_token_id", "eos_token_id")


class Row(NamedTuple):
    """A line of the table."""

    model_type: str
    student: str
    engine: str
    lora: str
    ranks: str
    sglang: str


def tiny(model_type: str) -> PreTrainedModel:
    """A random model of this type with each of its kinds of layers. Raises what its class raises for such sizes."""
    torch.manual_seed(0)
    kind = CONFIG_MAPPING[model_type]
    said = kind().to_dict()
    small = _small(said)
    for name, part in said.items():  # of text, and towers for what is no text
        if name.endswith("_config") and isinstance(part, dict):
            kept = {"model_type": part["model_type"]} if "model_type" in part else {}
            more = _MORE.get(part.get("model_type", ""), {})
            small[name] = {**_small(cast("dict[str, Any]", part)), **kept, **more}
    config = kind(**{**small, **_MORE.get(model_type, {})})
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size:,} parameters: its configuration has sizes that this script does not know")
    model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=torch.float32)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2)
    return model


def _small(said: Mapping[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {name: 1 for name in _IDS if said.get(name) is not None}
    for name, size in SIZES.items():
        if isinstance(value := said.get(name), int) and not isinstance(value, bool) and value > 0:
            small[name] = min(value, size)
    if said.get("kv_lora_rank") and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    n_layers = next((said[name] for name in _LAYERS if isinstance(said.get(name), int)), 0)
    by_layer = {name: value for name, value in said.items() if isinstance(value, list) and len(value) == n_layers > 0}
    kinds = {name: list(dict.fromkeys(map(str, value))) for name, value in by_layer.items()}
    wanted = max(2, *(len(one) for one in kinds.values())) if kinds else 2
    for name, value in by_layer.items():
        distinct = [value[list(map(str, value)).index(kind)] for kind in kinds[name]]
        small[name] = (distinct * wanted)[:wanted]
    return small | {name: wanted for name in _LAYERS if name in said}


def try_model(model_type: str, sglang: Collection[str] | None) -> Row:
    """What works for a model type. Raises what making the tiny model raises."""
    model = tiny(model_type)
    known = "?" if sglang is None else _yes(type(model).__name__ in sglang)
    try:
        layers(model)
        shared = "yes"
    except ValueError:
        shared = "no"
    try:
        choose_way(model)
    except PackingError as error:
        return Row(model_type, f"no: {_short(str(error))}", "", "", "", known)
    way = way_of(model)
    try:
        lora = _yes(_adapts(model))
    except FAILURES as error:
        lora = f"no: {_short(str(error))}"
    try:
        engine = "own" if isinstance(build_slots(tiny(model_type), 2, 64, fused=True), ModelCaches) else "slots"
    except UnsupportedModelError as error:
        engine = f"no: {_short(str(error).split('; ')[-2])}"
    return Row(model_type, way, engine, lora, shared, known)


def _adapts(model: PreTrainedModel) -> bool:
    adapters = Adapters(model, LoraConfig(rank=2, alpha=4.0), base="tiny")
    ids_T = torch.arange(9)
    lm_head(model).logits(packed_hidden(model, ids_T, (4, 5))).square().sum().backward()
    # The second matrix of an adapter begins at 0, so that only its own gradient is not 0.
    seconds = [p.grad for name, p in model.named_parameters() if "lora_B" in name]
    return bool(adapters.tensors()) and all(grad is not None and bool(grad.any()) for grad in seconds)


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"


def _short(text: str) -> str:
    return text.split("; ")[0].replace("|", "/").replace("\n", " ")[:110]


def sglang_classes(environment: Path = ROOT / ".venv-sglang") -> set[str] | None:
    """Names of the model classes of an installed SGLang; None if there is none. They are read, not imported."""
    files = list(environment.glob("lib/python3*/site-packages/sglang/srt/models/*.py"))
    named = (
        re.findall(r"^EntryClass\s*=\s*(\[[^\]]*\]|\w+)", file.read_text(encoding="utf-8"), re.M) for file in files
    )
    return {name for found in named for one in found for name in re.findall(r"\w+", one)} or None


def table(model_types: Sequence[str]) -> list[str]:
    known = sglang_classes()
    rows: list[Row] = []
    left: list[str] = []
    for model_type in model_types:
        signal.alarm(LIMIT_S)
        try:
            rows.append(try_model(model_type, known))
        except Exception as error:  # whatever a class of transformers raises for sizes that it was not made for
            left.append(f"`{model_type}` ({NEVER.get(model_type, type(error).__name__)})")
        finally:
            signal.alarm(0)
    lines = ["| model type | student, teacher | engine | LoRA | ranks | SGLang |", "|---|---|---|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    if left:
        lines += ["", f"No tiny model of these could be made or tried, so nothing is known: {'; '.join(left)}."]
    return lines


def _too_long(_signal: int, _frame: object) -> None:
    raise TimeoutError(f"no result after {LIMIT_S} s")


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    signal.signal(signal.SIGALRM, _too_long)
    print("\n".join(table(sys.argv[1:] or list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))))
