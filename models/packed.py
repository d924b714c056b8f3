"""Packed forward of any Hugging Face causal LM: many sequences in one row, no padding in any linear layer.

    ids_T        a a a a a b b b c c          sequences one after another
    positions    0 1 2 3 4 0 1 2 0 1          each starts at 0
    everything   one [1, T, H] forward        embeddings, norms, MLPs, projections: no token of padding
    attention    per sequence                 our function, registered with transformers under IMPLEMENTATION

Attention works on buckets of sequences of similar length. A bucket of equal lengths is a view; others are padded on the
right, where a causal mask already hides the padding from real tokens, so that the fast kernels without an explicit mask
apply on every device. Sequences are sorted by length first, so that each bucket is one slice of T.

A sequence may continue a past (`models.past`), whose keys and values an earlier forward kept. Only its new tokens are
in the row; in attention it is a bucket of its own. Or each process of a group has a part of every sequence
(`models.divided`).

Recurrent, convolutional, chunked and sparse layers mix tokens outside of our attention, so that a row would leak from
one sequence to the next. Such a model runs each bucket as one padded batch, through transformers' own attention
("padded"): in a causal model, padding on the right changes nothing before it. Where even that is not exact, it runs one
sequence at a time ("alone"). `choose_way` measures which is the fastest exact one.

Legend: T tokens of all sequences, S tokens of a bucket, B sequences of a bucket, L its longest, P tokens of a past,
M tokens attended to (P + L), H hidden size, N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stillhouse.models.attention import attend
from stillhouse.models.divided import DividedLayout, attend_divided
from stillhouse.models.logprobs import lm_head
from stillhouse.models.packed_layout import Bucket, Gather, RowLayout, layout_order, make_layout, permutation
from stillhouse.models.past import CacheUse, Cells, CellSpan, Past
from stillhouse.models.precision import full_float32, relative_tolerance, tf32_forced, tolerance_name
from stillhouse.models.rotary import depends_on_neighbours, moving_rope, turn_each_alone
from stillhouse.models.routing import Replay
from stillhouse.models.transfer import upload

IMPLEMENTATION = "stillhouse_packed"

Way: TypeAlias = Literal["packed", "padded", "alone"]
"""How the sequences of a row go through a model, the fastest first."""
WAYS: Final = cast("tuple[Way, ...]", get_args(Way))

_SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What an architecture raises that was not made for the arguments of a packed row."""

log = logging.getLogger(__name__)


class PackingError(ValueError):
    """This architecture cannot be run in the way asked for; the message names the unsupported feature."""


def packed_hidden(
    model: PreTrainedModel,
    ids_T: Tensor,
    lengths: Sequence[int],
    uses: Sequence[CacheUse | None] = (),
    experts: Replay | None = None,
) -> Tensor:
    """Hidden states before the LM head, [T, H], differentiable; row t belongs to ids_T[t].

    `model` must be loaded with attention="packed"; ids_T is int64 on its device; `lengths`: tokens of each sequence, in
    order, each at least 1; `uses`: what each sequence continues and what is kept of it (nothing, if left out);
    `experts`: what the routers of these T tokens choose. Raises ValueError for lengths that do not add up to T or
    exceed the context.
    """
    sizes = [int(length) for length in lengths]
    if ids_T.ndim != 1 or sum(sizes) != ids_T.shape[0] or not sizes or min(sizes) < 1:
        raise ValueError(
            f"ids have shape {tuple(ids_T.shape)}, lengths sum to {sum(sizes)} over {len(sizes)} sequences, the "
            f"shortest {min(sizes, default=0)}; expected ids [T] with T = sum(lengths) and every length at least 1"
        )
    pasts = [0 if one is None or one.past is None else one.past.n_tokens for one in uses] or [0] * len(sizes)
    longest = max(past + size for past, size in zip(pasts, sizes, strict=True))
    if longest > (limit := context_window(model.config)):
        raise ValueError(f"a sequence of {longest} tokens; the context window of this model is {limit}")
    order = layout_order(sizes, uses)
    sorted_around = [uses[i] for i in order] if uses else ()
    way = way_of(model)
    if way != "packed" and any(one is not None and (one.past is not None or one.cells is not None) for one in uses):
        raise PackingError(f"{type(model).__name__} runs {way}; only packed sequences continue a past")
    layout = make_layout([sizes[i] for i in order], ids_T.device, sorted_around, alone=way == "alone")
    if order == list(range(len(sizes))):
        return _forward(model, ids_T, layout.positions_T, layout, experts)
    to_sorted_T, to_given_T = permutation(sizes, order, ids_T.device)
    experts = None if experts is None else experts.permuted(to_sorted_T)
    sorted_TH = _forward(model, ids_T[to_sorted_T], layout.positions_T, layout, experts)
    return cast(Tensor, Gather.apply(sorted_TH, to_given_T, to_sorted_T, True))


def divided_hidden(
    model: PreTrainedModel, ids_P: Tensor, layout: DividedLayout, experts: Replay | None = None
) -> Tensor:
    """Hidden states of this process's tokens of a row that is divided among processes, [P, H]. `experts`: what the
    routers of these tokens choose. All processes must call it at the same time. Raises ValueError for sequences that
    exceed the context."""
    if layout.longest > (limit := context_window(model.config)):
        raise ValueError(f"a sequence of {layout.longest} tokens; the context window of this model is {limit}")
    if (way := way_of(model)) != "packed":
        raise PackingError(
            f"{type(model).__name__} runs {way}; sequences that are divided among ranks are packed: expected "
            "learner.context_parallel = 1"
        )
    return _forward(model, ids_P, upload(layout.positions, ids_P.device), layout, experts)


def context_window(config: PreTrainedConfig) -> int:
    """Longest sequence the configuration allows, in tokens; a very large number where it sets no limit."""
    return int(getattr(config.get_text_config(), "max_position_embeddings", None) or 2**31 - 1)


# ----------------------------------------------------------------------------------------------------- ways


def way_of(model: PreTrainedModel) -> Way:
    return cast(Way, getattr(model, "_stillhouse_way", "packed"))


def set_way(model: PreTrainedModel, way: Way, *, most: Callable[[int], int] | None = None) -> None:
    """Set the model, its attention function with it, for a way. `most`: of ranks that share parameters, the largest
    number that any gives; all make that many forward passes, because they gather parameters together."""
    cast(Any, model)._stillhouse_way = way
    cast(Any, model)._stillhouse_most = most
    if way == "packed":
        model.set_attn_implementation(IMPLEMENTATION)
        return
    try:
        model.set_attn_implementation("sdpa")
    except ValueError:  # this architecture has its own attention only
        model.set_attn_implementation("eager")


def choose_way(model: PreTrainedModel) -> None:
    """Set the model for the fastest way in which each sequence of a row gets the logits that it has alone.

    Raises PackingError, with what was measured, if there is none: the model is not causal, or its logits are not those
    of its LM head."""
    refuse_bidirectional(model.config)
    reasons = [said] if (said := unpackable(model.config)) else []
    possible = WAYS[len(reasons) :] if not moving_rope(model.config) else ("packed", "alone")[len(reasons) :]
    for way in possible:
        set_way(model, way)
        try:
            probe(model)
        except PackingError as error:
            reasons.append(str(error))
        except FAILURES as error:
            reasons.append(f"{way} rows fail ({type(error).__name__}: {error})")
        else:
            if reasons:
                log.info("%s runs its sequences %s: %s", type(model).__name__, way, "; ".join(reasons))
            return
    raise PackingError(
        f"{reasons[-1]}; it can be neither student nor embedded teacher here: expected another model, or, for a "
        "teacher, an SGLang server (teacher.engine = sglang)"
    )


def unpackable(config: PreTrainedConfig) -> str:
    """Why a row without padding would not be exact, as far as config.json says it and short sequences do not show it;
    else empty."""
    text: Any = config.get_text_config()
    if unknown := set(getattr(text, "layer_types", None) or ()) - _SUPPORTED_LAYERS:
        return f"model_type {config.model_type!r} has layers of type {sorted(unknown)}"
    if getattr(text, "attn_temperature_tuning", False):
        return f"model_type {config.model_type!r} scales queries by their place in the row (attn_temperature_tuning)"
    if getattr(text, "index_topk", None):
        return f"model_type {config.model_type!r} attends to index_topk = {text.index_topk} tokens that it selects"
    return ""


def refuse_bidirectional(config: PreTrainedConfig) -> None:
    """Raise PackingError for models that, by their config.json, see what comes after a token."""
    if getattr(config.get_text_config(), "is_causal", True) is False:
        raise PackingError(
            f"model_type {config.model_type!r} is configured as bidirectional; expected causal attention"
        )


def refuse_undividable(config: PreTrainedConfig) -> None:
    """Raise PackingError for architectures that, by their config.json, have layers that cannot be computed by processes
    which have a part of each sequence (`models.divided`)."""
    text: Any = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    if getattr(text, "layer_types", None) is None and getattr(text, "sliding_window", None):
        kinds = {"sliding_attention"}  # Mistral says it so
    reason = f"layers of type {sorted(kinds)}" if kinds else unpackable(config)
    if getattr(text, "attn_logit_softcapping", None) is not None:
        reason = reason or "a cap on attention scores (attn_logit_softcapping)"
    if kind := moving_rope(config):
        reason = reason or f"rotary frequencies that depend on the longest position of a process ({kind})"
    if reason:
        raise PackingError(
            f"model_type {config.model_type!r} has {reason}; sequences that are divided among ranks have full "
            "attention and fixed frequencies only: expected learner.context_parallel = 1"
        )


@torch.no_grad()
def probe(model: PreTrainedModel) -> None:
    """Run three short sequences in the way that the model is set for, and each alone through its own eager path;
    compare the logits. Packed, also compare the rotations of a short sequence alone and beside the longest one.

    Catches what the configuration does not show: ignored positions or keyword arguments, the architecture's own masks,
    a head that is more than one linear layer. Raises PackingError with the difference measured.
    """
    lengths, way = (5, 2, 7), way_of(model)
    vocab_rows = lm_head(model).weight_VH.shape[0]
    ids_T = ((torch.arange(sum(lengths)) * 37 + 11) % vocab_rows).to(model.device)
    with full_float32():
        found_TV = lm_head(model).logits(packed_hidden(model, ids_T, lengths))
        model.set_attn_implementation("eager")
        try:
            alone = [model(input_ids=ids_L[None], use_cache=False).logits[0] for ids_L in ids_T.split(list(lengths))]
            begun_LV = model(input_ids=ids_T[None, -7:-3], use_cache=False).logits[0]
        finally:
            set_way(model, way)
    plain_TV = torch.cat(alone).to(found_TV.dtype)
    tf32 = tf32_forced(model.device.type)
    allowed = relative_tolerance(model.dtype, tf32=tf32) * max(1.0, float(plain_TV.abs().max()))
    named = f"(allowed {allowed:.3g} in {tolerance_name(model.dtype, tf32=tf32)})"
    seen = float((plain_TV[-7:-3] - begun_LV.to(plain_TV.dtype)).abs().max())
    if not seen <= allowed:
        raise PackingError(
            f"{type(model).__name__} is not causal: tokens change logits before them by {seen:.3g} {named}"
        )
    difference = float((found_TV - plain_TV).abs().max())
    if not difference <= allowed:
        mixes = "" if way == "alone" else "mixes tokens outside of the attention interface or "
        raise PackingError(
            f"{type(model).__name__}: {way} logits differ from the plain forward by {difference:.3g} {named}; this "
            f"architecture {mixes}changes its logits after the head"
        )
    if way == "packed" and (name := depends_on_neighbours(model)):
        raise PackingError(f"{name} turns a short sequence otherwise beside a long one; it cannot be run packed")


@torch.no_grad()
def probe_past(model: PreTrainedModel) -> int:
    """Run a short sequence in one piece, and in two of which the second continues the first; compare the results.

    Returns the bytes that keys and values take per token. Raises PackingError where a past cannot be continued."""
    if moving_rope(model.config):
        raise PackingError(
            f"{type(model).__name__} has rotary frequencies that change with the length of the batch; kept keys would "
            "have been turned by others"
        )
    if (way := way_of(model)) != "packed":
        raise PackingError(f"{type(model).__name__} runs {way}, and its state is more than keys and values")
    n_first, n_tokens = 9, 14
    vocab_rows = lm_head(model).weight_VH.shape[0]
    ids_T = ((torch.arange(n_tokens) * 37 + 11) % vocab_rows).to(model.device)
    cells = Cells()
    with full_float32():
        whole_TH = packed_hidden(model, ids_T, [n_tokens])
        first_TH = packed_hidden(model, ids_T[:n_first], [n_first], [CacheUse(cells=cells, keep_last=n_first)])
        rest = CacheUse(Past((CellSpan(cells, n_first),)))
        rest_TH = packed_hidden(model, ids_T[n_first:], [n_tokens - n_first], [rest])
    difference = float((torch.cat([first_TH, rest_TH]) - whole_TH).abs().max())
    allowed = relative_tolerance(model.dtype, tf32=tf32_forced(model.device.type))
    allowed *= max(1.0, float(whole_TH.abs().max()))
    if not difference <= allowed:
        raise PackingError(
            f"{type(model).__name__}: hidden states in two pieces differ from those in one by {difference:.3g} "
            f"(allowed {allowed:.3g}); this architecture cannot continue from kept keys and values"
        )
    return cells.nbytes // n_first


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
    packed_layout: RowLayout | DividedLayout | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls in each layer. query [1, N, T, D], key and value [1, G, T, D];
    returns [1, T, N, D]. `sliding_window`, `softcap` and `s_aux` (sinks) mean what they mean in transformers."""
    if packed_layout is None:
        raise PackingError(
            "a model loaded with attention='packed' was called directly; use packed_hidden, or load it "
            "with attention='sdpa' (a plain call would let all sequences of a row see one another)"
        )
    if attention_mask is not None or dropout or rest.get("position_bias") is not None or query.shape[0] != 1:
        raise PackingError(
            f"{type(module).__name__} passes an attention mask, dropout {dropout}, a position bias or a batch of "
            f"{query.shape[0]}; packed attention has none of these"
        )
    if reason := unseen_window(module, sliding_window):
        raise PackingError(reason)
    if isinstance(packed_layout, DividedLayout):
        if (
            softcap is not None
            or s_aux is not None
            or (sliding_window or packed_layout.longest) < packed_layout.longest
        ):
            raise PackingError(
                f"{type(module).__name__} has a sliding window of {sliding_window} tokens, a cap {softcap} or sinks; "
                "sequences that are divided among ranks have none of these: expected learner.context_parallel = 1"
            )
        return attend_divided(query, key, value, packed_layout, scaling or query.shape[-1] ** -0.5), None
    layer = _layer_index(module) if packed_layout.with_cells else -1
    for kept in packed_layout.kept:
        kept.cells.fill(layer, key[0, :, kept.start : kept.end], value[0, :, kept.start : kept.end])
    form = AttentionForm(scaling or query.shape[-1] ** -0.5, sliding_window, softcap, s_aux)
    parts = [
        _attend(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), bucket, form, layer)
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


def _attend(
    query_TND: Tensor, key_TGD: Tensor, value_TGD: Tensor, bucket: Bucket, form: AttentionForm, layer: int
) -> Tensor:
    """Causal self-attention within each sequence of one bucket, [S, N, D]."""
    query, key, value = (_to_rows(x, bucket) for x in (query_TND, key_TGD, value_TGD))
    if bucket.past is not None:
        key, value = (x[None] for x in bucket.past.before(layer, key[0], value[0]))
    n_past, window = bucket.n_past, form.sliding_window
    seen = n_past + bucket.longest
    mask_LM: Tensor | None = None
    if n_past or (window is not None and seen > window):
        mask_LM = torch.ones((bucket.longest, seen), dtype=torch.bool, device=query.device).tril(n_past)
        if window is not None:
            mask_LM = mask_LM.triu(n_past + 1 - window)
    if form.softcap is not None or form.sinks_N is not None:
        rows = _plain_attention(query, key, value, mask_LM, form)
    else:
        rows = attend(query, key, value, mask_LM=mask_LM, scaling=form.scaling)
    rows_BLND = rows.transpose(1, 2)
    flat_ND = rows_BLND.reshape(-1, *rows_BLND.shape[2:])
    if bucket.real_S is None:
        return flat_ND
    return cast(Tensor, Gather.apply(flat_ND, bucket.real_S, bucket.source_BL, False))


def _to_rows(x_TND: Tensor, bucket: Bucket) -> Tensor:
    x_SND = x_TND[bucket.start : bucket.end]
    if bucket.source_BL is not None:
        x_SND = cast(Tensor, Gather.apply(x_SND, bucket.source_BL, bucket.real_S, True))
    return x_SND.reshape(bucket.n_sequences, bucket.longest, *x_TND.shape[1:]).transpose(1, 2)


def _plain_attention(query: Tensor, key: Tensor, value: Tensor, mask_LM: Tensor | None, form: AttentionForm) -> Tensor:
    """Attention that the fused kernels lack: capped scores (Gemma 2) and attention sinks (gpt-oss). [B, N, L, D]."""
    seen, groups = key.shape[2], query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * form.scaling
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    if mask_LM is None:
        mask_LM = torch.ones((seen, seen), dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~mask_LM, float("-inf"))
    if form.sinks_N is not None:
        sinks = form.sinks_N.to(scores.dtype).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)
    return weights[..., :seen] @ value


def unseen_window(module: torch.nn.Module, sliding_window: int | None, longest: int | None = None) -> str:
    """The reason why `longest` tokens (all that the model takes) cannot be run, else empty: some architectures put
    their sliding window only into the mask, which our attention functions never see."""
    config: Any = getattr(module, "config", None)
    window: int | None = getattr(config, "sliding_window", None)
    kinds: list[str] | None = getattr(config, "layer_types", None)
    kind = getattr(module, "layer_type", None) or (kinds[_layer_index(module)] if kinds else "sliding_attention")
    windowed = kind == "sliding_attention"
    if sliding_window is not None or not windowed or window is None:
        return ""
    if (longest := longest or context_window(config)) <= window:
        return ""
    return (
        f"{type(module).__name__} has a sliding window of {window} tokens that it does not pass to its attention "
        f"function; {longest} tokens cannot be run, {window} could"
    )


def _layer_index(module: torch.nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise PackingError(f"{type(module).__name__}.layer_idx is {layer!r}; expected the layer's number")
    return layer


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, packed_attention)
# No mask function is registered under this name on purpose: transformers then builds no mask at all.


# ------------------------------------------------------------------------------------------------- plumbing


def _forward(
    model: PreTrainedModel,
    ids_T: Tensor,
    positions_T: Tensor,
    layout: RowLayout | DividedLayout,
    experts: Replay | None,
) -> Tensor:
    if isinstance(layout, RowLayout) and way_of(model) != "packed":
        return _forward_padded(model, ids_T, layout, experts)
    turn_each_alone(model)
    with nullcontext() if experts is None else experts.over(slice(None)):
        output = trunk(model)(
            input_ids=ids_T[None],
            position_ids=positions_T[None],
            use_cache=False,
            packed_layout=layout,
        )
    return cast(Tensor, output.last_hidden_state)[0]


def _forward_padded(model: PreTrainedModel, ids_T: Tensor, layout: RowLayout, experts: Replay | None) -> Tensor:
    """Each bucket as a batch. No mask is needed: what is behind a causal sequence does not change it."""
    run = trunk(model)

    def states(ids_BL: Tensor) -> Tensor:
        return cast(Tensor, run(input_ids=ids_BL, use_cache=False).last_hidden_state).flatten(0, 1)

    parts: list[Tensor] = []
    for bucket in layout.buckets:
        ids_S, rows = ids_T[bucket.start : bucket.end], slice(bucket.start, bucket.end)
        if bucket.source_BL is not None:
            ids_S, rows = ids_S[bucket.source_BL], bucket.source_BL + bucket.start
        with nullcontext() if experts is None else experts.over(rows, bucket.real_S):
            padded_H = states(ids_S.view(bucket.n_sequences, -1))
        if bucket.source_BL is None:
            parts.append(padded_H)
        else:
            parts.append(cast(Tensor, Gather.apply(padded_H, bucket.real_S, bucket.source_BL, False)))
    hidden_TH = parts[0] if len(parts) == 1 else torch.cat(parts)
    most = cast("Callable[[int], int] | None", getattr(model, "_stillhouse_most", None))
    for _ in range(0 if most is None else most(len(parts)) - len(parts)):
        hidden_TH = hidden_TH + 0.0 * states(ids_T[:2][None])[:1]  # in the graph, so that its backward pass is made too
    return hidden_TH


def trunk(model: PreTrainedModel) -> Any:
    """All of a model but its head. Llama 4's says that it is called `language_model`, and is not."""
    return model.base_model if model.base_model is not model else cast(Any, model).model
