"""A decoder of the Llama family (Llama, Qwen2, Qwen3), written out.

It does the arithmetic of the model's modules with a third of the Python, about 20 calls into torch per layer where the
modules make about 60: small models on a CPU are bound by Python. Large ones are bound by memory and arithmetic.

Legend: T tokens of a step, R rows that decode, H hidden size, N query heads, G key/value heads, D head size,
I MLP size, C positions, S tokens of a bucket of prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm
from transformers import PreTrainedModel

from stillhouse.engines.torch.kv_cache import SlotCache
from stillhouse.engines.torch.products import Product
from stillhouse.engines.torch.step import DecodeStep
from stillhouse.models.attention import attend
from stillhouse.models.packed import AttentionForm
from stillhouse.models.packed_layout import Bucket

_FAMILY = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


@dataclass(slots=True)
class _Layer:
    input_norm: Tensor
    qkv: Product
    """weight [(N + 2G) * D, H]"""
    qk_norm: Tensor | None
    """[N + G, D]; query and key norms side by side (Qwen3)."""
    output: Product
    mlp_norm: Tensor
    gate_up: Product
    """weight [2I, H]"""
    down: Product
    activation: Callable[[Tensor], Tensor]


def can_fuse(model: PreTrainedModel) -> bool:
    """True for the architectures of this decoder, without sliding windows."""
    layer_types: Sequence[str] = getattr(model.config, "layer_types", None) or ()
    return type(model).__name__ in _FAMILY and all(kind == "full_attention" for kind in layer_types)


class FusedDecoder:
    """Joins projections that read the same input into one product. The model's parameters become views into the joined
    weights, so that a weight swap (an in-place copy) reaches both. Only packed weights are held twice (`Product`)."""

    def __init__(self, model: PreTrainedModel, max_context: int) -> None:
        body: Any = model.model
        config: Any = model.config
        self._head_size = int(body.layers[0].self_attn.head_dim)
        self._n_heads = int(config.num_attention_heads)
        self._n_groups = int(config.num_key_value_heads)
        self._norm = RmsNorm(float(config.rms_norm_eps), body.norm.weight)
        self._embedding_VH = cast(Tensor, body.embed_tokens.weight)
        self._final_norm = cast(Tensor, body.norm.weight)
        self._head = Product(model.lm_head.weight, model.lm_head.bias)
        self._form = AttentionForm(float(body.layers[0].self_attn.scaling))
        self._modules = list(body.layers)
        with torch.no_grad():
            self._cos_CD, self._sin_CD = _rotary_tables(body, max_context)
            self._layers = [self._join(layer) for layer in self._modules]
            self._repeat_head_norms()

    def refresh(self) -> None:
        """Renew the copies that a swap does not reach by itself."""
        self._head.refresh()
        for layer in self._layers:
            for product in (layer.qkv, layer.output, layer.gate_up, layer.down):
                product.refresh()
        self._repeat_head_norms()

    def _repeat_head_norms(self) -> None:
        for layer, module in zip(self._layers, self._modules, strict=True):
            if layer.qk_norm is not None:
                layer.qk_norm[: self._n_heads] = module.self_attn.q_norm.weight.detach()
                layer.qk_norm[self._n_heads :] = module.self_attn.k_norm.weight.detach()

    def forward(self, step: DecodeStep, cache: SlotCache) -> Tensor:
        """Logits of the step's rows, [R, V]."""
        hidden_TH = embedding(step.ids_T, self._embedding_VH)
        cos_T1D = self._cos_CD.index_select(0, step.positions_T).unsqueeze(1)
        sin_T1D = self._sin_CD.index_select(0, step.positions_T).unsqueeze(1)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            mixed = self._attention(index, layer, hidden_TH, cos_T1D, sin_T1D, cache, rows_only=index == last)
            if index == last:  # nothing reads the last hidden state of prefilled tokens
                hidden_TH = hidden_TH[: step.n_rows]
            hidden_TH = layer.output.added_to(hidden_TH, mixed)
            gate_up = layer.gate_up(self._norm(hidden_TH, layer.mlp_norm))
            gate, up = gate_up.chunk(2, dim=-1)
            hidden_TH = layer.down.added_to(hidden_TH, layer.activation(gate).mul_(up))
        return self._head(self._norm(hidden_TH, self._final_norm))

    def _attention(
        self,
        index: int,
        layer: _Layer,
        hidden_TH: Tensor,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        cache: SlotCache,
        *,
        rows_only: bool,
    ) -> Tensor:
        """[T, N * D], or [R, N * D] with `rows_only`."""
        n_heads, n_both, size, step = self._n_heads, self._n_heads + self._n_groups, self._head_size, cache.step
        qkv = layer.qkv(self._norm(hidden_TH, layer.input_norm))
        qkv = qkv.view(len(hidden_TH), -1, size)
        qk, value_TGD = qkv[:, :n_both], qkv[:, n_both:]
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm)
        # rotate_half(x) * sin == roll(x) * sin with the first half of sin negated
        qk = torch.addcmul(qk * cos_T1D, qk.roll(size // 2, -1), sin_T1D)
        query_TND, key_TGD = qk[:, :n_heads], qk[:, n_heads:]
        cache.write(index, key_TGD, value_TGD)
        rows = cache.attend(index, query_TND[: step.n_rows], self._form).view(step.n_rows, n_heads * size)
        if rows_only or step.prefill is None:
            return rows
        prompts = [
            self._attend_prompts(query_TND, key_TGD, value_TGD, step.n_rows, bucket) for bucket in step.prefill.buckets
        ]
        return torch.cat((rows, *prompts))

    def _attend_prompts(
        self, query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, n_rows: int, bucket: Bucket
    ) -> Tensor:
        """Causal self-attention of the prompts of one bucket (all padded to one length), [S, N * D]."""
        tokens = slice(n_rows + bucket.start, n_rows + bucket.end)
        shape = (bucket.n_sequences, bucket.longest, -1, self._head_size)
        query, key, value = (x[tokens].view(shape).transpose(1, 2) for x in (query_TND, key_TGD, value_TGD))
        mixed = attend(query, key, value, mask_LM=None, scaling=self._form.scaling)
        return mixed.transpose(1, 2).reshape(bucket.end - bucket.start, -1)

    def _join(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        qk_norm: Tensor | None = None
        if hasattr(attention, "q_norm"):
            qk_norm = attention.q_norm.weight.new_empty(self._n_heads + self._n_groups, self._head_size)
        return _Layer(
            input_norm=layer.input_layernorm.weight,
            qkv=_joined(projections),
            qk_norm=qk_norm,
            output=Product(attention.o_proj.weight, attention.o_proj.bias),
            mlp_norm=layer.post_attention_layernorm.weight,
            gate_up=_joined((mlp.gate_proj, mlp.up_proj)),
            down=Product(mlp.down_proj.weight, mlp.down_proj.bias),
            activation=mlp.act_fn,
        )


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight, in float32 inside."""

    def __init__(self, eps: float, like: Tensor) -> None:
        self.eps = eps
        self._eps_1 = torch.tensor([eps], dtype=torch.float32, device=like.device)
        # On a CPU torch's own runs several kernels, including a slow mean; elsewhere it is one kernel.
        self._by_hand = like.device.type == "cpu" and like.dtype == torch.float32

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        """`weight` is as wide as a line of `x`, or as many lines as its last dimensions."""
        if not self._by_hand:
            return rms_norm(x, x.shape[-1:], None, self.eps) * weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps_1, length, length, value=1.0 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(weight)


def _joined(modules: Sequence[torch.nn.Linear]) -> Product:
    """One product for linear layers that read the same input."""
    has_bias = cast(Tensor | None, modules[0].bias) is not None
    return Product(
        _side_by_side([module.weight for module in modules]),
        _side_by_side([module.bias for module in modules]) if has_bias else None,
    )


def _side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """Lay parameters one after another along dim 0 and make each a view of its part."""
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


def _rotary_tables(body: Any, max_context: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, [C, D]; the first half of sin negated (see `_attention`)."""
    like = cast(Tensor, body.embed_tokens.weight)
    positions_1C = torch.arange(max_context, device=like.device)[None]
    cos_1CD, sin_1CD = body.rotary_emb(like, positions_1C)
    sin_CD = sin_1CD[0].clone()
    sin_CD[:, : sin_CD.shape[1] // 2].neg_()
    return cos_1CD[0].clone(), sin_CD
