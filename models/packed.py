"""Packed forward of any Hugging Face causal LM: many sequences in one row, no padding in any linear layer.

    ids_T        a a a a a b b b c c          sequences one after another
    positions    0 1 2 3 4 0 1 2 0 1          each starts at 0
    everything   one [1, T, H] forward        embeddings, norms, MLPs, projections: no token of padding
    attention    per sequence                 our function, registered with transformers under IMPLEMENTATION

Attention works on buckets of sequences of similar length. A bucket of equal lengths is a view; others are padded on the
right, where a causal mask already hides the padding from real tokens, so that the fast kernels without an explicit mask
apply on every device. Sequences are sorted by length first, so that each bucket is one slice of T.

Legend: T tokens of all sequences, S tokens of a bucket, B sequences of a bucket, L its longest, H hidden size,
N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models.attention import attend
from models.logprobs import lm_head
from models.packed_layout import Bucket, Gather, Layout, make_layout, permutation
from models.precision import full_float32, relative_tolerance, tf32_forced, tolerance_name

IMPLEMENTATION = "stillhouse_packed"

_SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})


class PackingError(ValueError):
    """This architecture cannot be run packed; the message names the unsupported feature."""


def packed_hidden(model: PreTrainedModel, ids_T: Tensor, lengths: Sequence[int]) -> Tensor:
    """Hidden states before the LM head, [T, H], differentiable; row t belongs to ids_T[t].

    `model` must be loaded with attention="packed"; ids_T is int64 on its device; `lengths`: tokens of each sequence, in
    order, each at least 1. Raises ValueError for lengths that do not add up to T or exceed the context.
    """
    sizes = [int(length) for length in lengths]
    if ids_T.ndim != 1 or sum(sizes) != ids_T.shape[0] or not sizes or min(sizes) < 1:
        raise ValueError(
            f"ids have shape {tuple(ids_T.shape)}, lengths sum to {sum(sizes)} over {len(sizes)} sequences, the "
            f"shortest {min(sizes, default=0)}; expected ids [T] with T = sum(lengths) and every length at least 1"
        )
    if max(sizes) > (limit := context_window(model.config)):
        raise ValueError(f"a sequence of {max(sizes)} tokens; the context window of this model is {limit}")
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    if order == list(range(len(sizes))):
        return _forward(model, ids_T, make_layout(sizes, ids_T.device))
    to_sorted_T, to_given_T = permutation(sizes, order, ids_T.device)
    layout = make_layout([sizes[i] for i in order], ids_T.device)
    return cast(Tensor, Gather.apply(_forward(model, ids_T[to_sorted_T], layout), to_given_T, to_sorted_T, True))


def context_window(config: PreTrainedConfig) -> int:
    """Longest sequence the configuration allows, in tokens; a very large number where it sets no limit."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31 - 1)


# ------------------------------------------------------------------------------------- what cannot be packed


def refuse_unpackable(config: PreTrainedConfig) -> None:
    """Raise PackingError for architectures that, by their config.json, mix tokens outside of attention."""
    text: Any = config.get_text_config()
    layer_types = set(getattr(text, "layer_types", None) or ["full_attention"])
    if unknown := layer_types - _SUPPORTED_LAYERS:
        raise PackingError(
            f"model_type {config.model_type!r} has layers of type {sorted(unknown)}; packed forwards do "
            f"{sorted(_SUPPORTED_LAYERS)} only (a recurrent or chunked layer would leak between sequences)"
        )
    if getattr(text, "is_causal", True) is False:
        raise PackingError(
            f"model_type {config.model_type!r} is configured as bidirectional; expected causal attention"
        )


@torch.no_grad()
def probe(model: PreTrainedModel) -> None:
    """Run three short sequences packed, and each alone through the model's own eager path; compare the logits.

    Catches what the configuration does not show: ignored positions or keyword arguments, the architecture's own masks,
    a head that is more than one linear layer. Raises PackingError with the difference measured.
    """
    lengths = (5, 2, 7)
    vocab_rows = lm_head(model).weight_VH.shape[0]
    ids_T = ((torch.arange(sum(lengths)) * 37 + 11) % vocab_rows).to(model.device)
    with full_float32():
        packed_TV = lm_head(model).logits(packed_hidden(model, ids_T, lengths))
        model.set_attn_implementation("eager")
        try:
            alone = [model(input_ids=ids_L[None], use_cache=False).logits[0] for ids_L in ids_T.split(list(lengths))]
        finally:
            model.set_attn_implementation(IMPLEMENTATION)
    plain_TV = torch.cat(alone).to(packed_TV.dtype)
    difference = float((packed_TV - plain_TV).abs().max())
    tf32 = tf32_forced(model.device.type)
    allowed = relative_tolerance(model.dtype, tf32=tf32) * max(1.0, float(plain_TV.abs().max()))
    if not difference <= allowed:
        raise PackingError(
            f"{type(model).__name__}: packed logits differ from the plain forward by {difference:.3g} (allowed "
            f"{allowed:.3g} in {tolerance_name(model.dtype, tf32=tf32)}); this architecture mixes tokens outside of "
            "the attention interface or changes its logits after the head, and cannot be scored or trained packed"
        )


# ------------------------------------------------------------------------------------------------ attention


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    packed_layout: Layout | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls in each layer. query [1, N, T, D], key and value [1, G, T, D];
    returns [1, T, N, D]. `sliding_window`, `softcap` and `s_aux` (sinks) mean what they mean in transformers."""
    if packed_layout is None:
        raise PackingError(
            "a model loaded with attention='packed' was called directly; use models.packed.packed_hidden, or load it "
            "with attention='sdpa' (a plain call would let all sequences of a row see one another)"
        )
    if attention_mask is not None or dropout or rest.get("position_bias") is not None or query.shape[0] != 1:
        raise PackingError(
            f"{type(module).__name__} passes an attention mask, dropout {dropout}, a position bias or a batch of "
            f"{query.shape[0]}; packed attention has none of these"
        )
    if reason := unseen_window(module, sliding_window, packed_layout.buckets[0].longest):
        raise PackingError(reason)
    form = AttentionForm(scaling or query.shape[-1] ** -0.5, sliding_window, softcap, s_aux)
    parts = [
        _attend(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), bucket, form)
        for bucket in packed_layout.buckets
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """One layer's variant of attention beyond softmax(q k^T)."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks_N: Tensor | None = None


def _attend(query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, bucket: Bucket, form: AttentionForm) -> Tensor:
    """Causal self-attention within each sequence of one bucket, [S, N, D]."""
    query, key, value = (_to_rows(x, bucket) for x in (query_TND, key_TGD, value_TGD))
    longest = bucket.longest
    mask_LL: Tensor | None = None
    if form.sliding_window is not None and longest > form.sliding_window:
        ones_LL = torch.ones((longest, longest), dtype=torch.bool, device=query.device)
        mask_LL = ones_LL.tril() & ones_LL.triu(1 - form.sliding_window)
    if form.softcap is not None or form.sinks_N is not None:
        rows = _plain_attention(query, key, value, mask_LL, form)
    else:
        rows = attend(query, key, value, mask_LL=mask_LL, scaling=form.scaling)
    rows_BLND = rows.transpose(1, 2)
    flat_ND = rows_BLND.reshape(-1, *rows_BLND.shape[2:])
    if bucket.real_S is None:
        return flat_ND
    return cast(Tensor, Gather.apply(flat_ND, bucket.real_S, bucket.source_BL, False))


def _to_rows(x_TND: Tensor, bucket: Bucket) -> Tensor:
    """Tokens of a bucket as padded rows, [B, N, L, D]."""
    x_SND = x_TND[bucket.start : bucket.end]
    if bucket.source_BL is not None:
        x_SND = cast(Tensor, Gather.apply(x_SND, bucket.source_BL, bucket.real_S, True))
    return x_SND.reshape(bucket.n_sequences, bucket.longest, *x_TND.shape[1:]).transpose(1, 2)


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, mask_LL: Tensor | None, form: AttentionForm) -> Tensor:
    """Attention that the fused kernels lack: capped scores (Gemma 2) and attention sinks (gpt-oss). [B, N, L, D]."""
    longest, groups = query.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * form.scaling
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    if mask_LL is None:
        mask_LL = torch.ones((longest, longest), dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~mask_LL, float("-inf"))
    if form.sinks_N is not None:
        sinks = form.sinks_N.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return weights[..., :longest] @ value


def unseen_window(module: torch.nn.Module, sliding_window: int | None, longest: int) -> str:
    """The reason why `longest` tokens cannot be run, else empty: some architectures put their sliding window only into
    the mask, which our attention functions never see."""
    config: Any = getattr(module, "config", None)
    window: int | None = getattr(config, "sliding_window", None)
    kind = getattr(module, "layer_type", None)
    windowed = kind == "sliding_attention" or (kind is None and getattr(config, "layer_types", None) is None)
    if sliding_window is not None or not windowed or window is None or longest <= window:
        return ""
    return (
        f"{type(module).__name__} has a sliding window of {window} tokens that it does not pass to its attention "
        f"function; {longest} tokens cannot be run, {window} could"
    )


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
# No mask function is registered under this name on purpose: transformers then builds no mask at all.


# ------------------------------------------------------------------------------------------------- plumbing


def _forward(model: PreTrainedModel, ids_T: Tensor, layout: Layout) -> Tensor:
    output = model.base_model(
        input_ids=ids_T[None],
        position_ids=layout.positions_T[None],
        use_cache=False,
        packed_layout=layout,
    )
    return cast(Tensor, output.last_hidden_state)[0]
