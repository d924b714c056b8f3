"""The KV cache of the generation engine, and attention over it: one fixed slot per running request.

    rows attend to their own slot: rows are slots 0..R-1, so their keys are a view of the cache
    prompts   attend to themselves (models.packed)
    both      write their keys and values to their slots first

No keys are gathered or concatenated, and the only mask is one bias per step. See `engines.torch.step`.

Legend: T tokens of a step, R rows that decode, N query heads, G key/value heads, D head size, C cells (tokens) of a
slot, L window of a block of rows (the cells they attend to), W cache cells written, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from stillhouse.engines.torch.slots import RowWindow
from stillhouse.engines.torch.step import DecodeStep
from stillhouse.models.packed import AttentionForm, packed_attention, unseen_window

IMPLEMENTATION = "stillhouse_decode"


class UnsupportedModelError(ValueError):
    """This architecture cannot be run over the slot cache; the message names the unsupported feature."""


_FIRST_CELLS = 64
_CELLS_MULTIPLE = 16


class SlotCache:
    """Keys and values of `n_slots` requests of up to `max_context` tokens, for every layer that writes any.

    On a CPU slots start small and grow by half when a request needs it, so that rows stay close together in the
    processor's caches, and memory follows the longest request seen. On other devices slots have their full size from
    the first step, so that a run cannot exhaust memory later."""

    def __init__(self, n_slots: int, max_context: int, device: torch.device) -> None:
        self.n_slots = n_slots
        self.max_context = max_context
        self.cells = min(_FIRST_CELLS, max_context) if device.type == "cpu" else max_context
        """C: current capacity of a slot, in tokens."""
        self._layers: dict[int, Tensor] = {}
        """[2 (key, value), S, G, C, D] each, made when the layer first writes: only then is its shape known."""
        self._views: dict[tuple[int, int], tuple[RowWindow, Tensor, Tensor]] = {}
        self._offsets: dict[int, Tensor] = {}
        self._step: DecodeStep | None = None
        self._cells: dict[int, Tensor] = {}
        self._bias: dict[tuple[int, int | None, int], Tensor] = {}

    @property
    def step(self) -> DecodeStep:
        if self._step is None:
            raise RuntimeError("the slot cache has no step; begin() comes before the forward")
        return self._step

    @property
    def memory_bytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers.values())

    def begin(self, step: DecodeStep) -> None:
        """Start a step; call it once before each forward. Tensors shared by layers of one shape are cached until the
        next call."""
        self._step = step
        self._cells.clear()
        self._bias.clear()
        if step.n_cells > self.cells:
            self._grow(step.n_cells)

    def _store(self, layer: int, n_groups: int, size: int, like: Tensor) -> Tensor:
        """Keys and values of a layer, [2, S, G, C, D]; valid until the next `begin`."""
        store = self._layers.get(layer)
        if store is None:
            store = self._layers[layer] = like.new_zeros((2, self.n_slots, n_groups, self.cells, size))
        return store

    def write(self, layer: int, key_TGD: Tensor, value_TGD: Tensor) -> None:
        """Put the step's keys and values in their cells. A value narrower than its key (MLA) is padded."""
        n_groups, size = key_TGD.shape[1:]
        store = self._store(layer, n_groups, size, key_TGD)
        if value_TGD.shape[2] != key_TGD.shape[2]:
            value_TGD = torch.nn.functional.pad(value_TGD, (0, key_TGD.shape[2] - value_TGD.shape[2]))
        both = torch.cat((key_TGD, value_TGD), dim=1)
        if self.step.cell_sources_W is not None:
            both = both.index_select(0, self.step.cell_sources_W)
        size = both.shape[2]
        store.view(-1, size).index_copy_(0, self._cell_index(key_TGD.shape[1]), both.view(-1, size))

    def attend(self, layer: int, query_RND: Tensor, form: AttentionForm) -> Tensor:
        """Attention of the rows over their slots, [R, N, D]."""
        blocks = [
            self._attend_block(layer, query_RND[block.start : block.stop], block, form)
            for block in self.step.row_windows
        ]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _attend_block(self, layer: int, query_RND: Tensor, block: RowWindow, form: AttentionForm) -> Tensor:
        n_rows, n_heads, size = query_RND.shape
        n_groups = self._layers[layer].shape[2]
        query = query_RND.reshape(n_rows * n_groups, n_heads // n_groups, size)
        keys_DL, values_LD = self._views_of(layer, block)
        bias = self._bias_of(n_groups, form.sliding_window, block, query)
        if form.softcap is None:
            scores = torch.baddbmm(bias, query, keys_DL, alpha=form.scaling)
        else:
            scores = torch.bmm(query, keys_DL).mul_(form.scaling / form.softcap)
            scores = scores.tanh_().mul_(form.softcap).add_(bias)
        if form.sinks_N is not None:
            sinks = form.sinks_N.to(scores.dtype).view(1, n_groups, -1, 1).expand(n_rows, -1, -1, -1)
            scores = torch.cat((scores, sinks.reshape(*query.shape[:2], 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
        if form.sinks_N is not None:
            weights = weights[..., :-1]
        return torch.bmm(weights, values_LD).view(n_rows, n_heads, size)

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int], n_tokens: int) -> None:
        """Copy the first `n_tokens` cells of slots onto others, all at once: a slot may be both source and target."""
        for store in self._layers.values():
            used = store[:, :, :, :n_tokens]
            parts = [used.select(1, source).clone() for source in sources]
            for part, target in zip(parts, targets, strict=True):
                used.select(1, target).copy_(part)

    def clear_slot(self, slot: int) -> None:
        """Zero a slot whose values may be NaN: masked cells have weight 0, but 0 * NaN would corrupt a later
        request."""
        for store in self._layers.values():
            store[:, slot] = 0

    def drop(self) -> None:
        """Free the memory of all slots. It is taken again when a step writes."""
        self._layers.clear()
        self._views.clear()
        self._cells.clear()
        self._bias.clear()
        self._step = None

    def _grow(self, needed: int) -> None:
        cells = min(max(needed, self.cells + self.cells // 2), self.max_context)
        cells = min(-(-cells // _CELLS_MULTIPLE) * _CELLS_MULTIPLE, self.max_context)
        for layer, store in self._layers.items():
            wider = store.new_zeros((*store.shape[:3], cells, store.shape[4]))
            wider[:, :, :, : self.cells] = store
            self._layers[layer] = wider
        self._views.clear()
        self._offsets.clear()
        self.cells = cells

    def _views_of(self, layer: int, block: RowWindow) -> tuple[Tensor, Tensor]:
        """Keys [R * G, D, L] and values [R * G, L, D] of a block, cached because most steps repeat the same block."""
        known = self._views.get((layer, block.start))
        if known is not None and known[0] == block:
            return known[1:]
        store = self._layers[layer]
        n_groups, size = store.shape[2], store.shape[4]
        rows = slice(block.start * n_groups, block.stop * n_groups)
        keys, values = (half.view(-1, self.cells, size)[rows, : block.window] for half in store)
        self._views[layer, block.start] = (block, keys.transpose(1, 2), values)
        return keys.transpose(1, 2), values

    def _cell_index(self, n_groups: int) -> Tensor:
        """Rows of the flat [2 * S * G * C, D] store that `write` fills, in the order of cat((key, value), dim=1)."""
        if n_groups not in self._cells:
            step = self.step
            cells_W = torch.add(step.cell_positions_W, step.cell_slots_W, alpha=n_groups * self.cells)
            self._cells[n_groups] = (cells_W[:, None] + self._head_offsets(n_groups)).view(-1)
        return self._cells[n_groups]

    def _head_offsets(self, n_groups: int) -> Tensor:
        """Offsets of the heads of slot 0 in the flat store: keys, then values. [2 * G]"""
        if n_groups not in self._offsets:
            heads_G = torch.arange(n_groups, device=self.step.ids_T.device) * self.cells
            self._offsets[n_groups] = torch.cat((heads_G, heads_G + self.n_slots * n_groups * self.cells))
        return self._offsets[n_groups]

    def _bias_of(self, n_groups: int, sliding_window: int | None, block: RowWindow, like: Tensor) -> Tensor:
        """[R * G, 1, L]: 0 for cells that a row may attend to, -inf for later ones and ones outside its sliding
        window."""
        key = (n_groups, sliding_window, block.start)
        if key not in self._bias:
            last_R1 = self.step.positions_T[block.start : block.stop, None]
            cells_L = torch.arange(block.window, device=last_R1.device)
            hidden_RL = cells_L > last_R1
            if sliding_window is not None:
                hidden_RL |= cells_L <= last_R1 - sliding_window
            bias_RL = like.new_zeros(hidden_RL.shape).masked_fill_(hidden_RL, float("-inf"))
            self._bias[key] = bias_RL[:, None].expand(-1, n_groups, -1).reshape(-1, 1, block.window)
        return self._bias[key]


def decode_attention(
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
    slot_cache: SlotCache | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls in each layer. query [1, N, T, D], key and value [1, G, T, D];
    returns [1, T, N, D]. `sliding_window`, `softcap` and `s_aux` (sinks) mean what they mean in transformers."""
    if slot_cache is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} was called without a slot cache: the model is loaded with attention='decode' and "
            "runs in engines/torch/engine.py only, or its forward does not hand keyword arguments to its attention"
        )
    if attention_mask is not None or dropout or rest.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes an attention mask, dropout {dropout} or a position bias; attention over "
            "the slot cache has none of these"
        )
    if reason := unseen_window(module, sliding_window, slot_cache.max_context):
        raise UnsupportedModelError(f"max_context: {reason}")
    layer, step = _layer_index(module), slot_cache.step
    slot_cache.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    parts: list[Tensor] = []
    if step.n_rows:
        form = AttentionForm(scaling or query.shape[-1] ** -0.5, sliding_window, softcap, s_aux)
        rows_RND = slot_cache.attend(layer, query[0, :, : step.n_rows].transpose(0, 1), form)
        parts.append(rows_RND[None, :, :, : value.shape[3]])
    if step.prefill is not None:
        parts.append(
            packed_attention(
                module,
                query[:, :, step.n_rows :],
                key[:, :, step.n_rows :],
                value[:, :, step.n_rows :],
                None,
                scaling=scaling,
                sliding_window=sliding_window,
                softcap=softcap,
                s_aux=s_aux,
                packed_layout=step.prefill,
            )[0]
        )
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def _layer_index(module: torch.nn.Module) -> int:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedModelError(f"{type(module).__name__}.layer_idx is {layer!r}; expected the layer's number")
    return layer


ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, decode_attention)
# No mask function is registered under this name on purpose: transformers then builds no mask at all.
