"""One forward of the generation engine: a step's tokens in, logits of its rows out, keys and values left in the cache.

`ModuleDecoder` runs a Hugging Face causal LM through its own modules over the slot cache; `engines.torch.fused` has a
decoder for the Llama family; `engines.torch.model_caches` runs what has more state than keys and values. `build_slots`
chooses, and compares the choice with the model's plain forward before any token is sampled from it.

Legend: T tokens of a step, R rows that decode, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.engines.torch.fused import FusedDecoder, can_fuse
from stillhouse.engines.torch.kv_cache import IMPLEMENTATION, SlotCache, UnsupportedModelError
from stillhouse.engines.torch.model_caches import ModelCaches
from stillhouse.engines.torch.slot_experts import SlotExperts
from stillhouse.engines.torch.step import DecodeStep, Int64s, Prefill, plan_step
from stillhouse.models.packed import FAILURES, set_way, unpackable
from stillhouse.models.precision import full_float32, relative_tolerance, tf32_forced, tolerance_name
from stillhouse.models.rotary import moving_rope

log = logging.getLogger(__name__)


class Slots(Protocol):
    """A model with the state of all running sequences. Row r lives in slot r."""

    title: str
    """What it is, in messages."""

    shares_prompts: bool
    """Whether `copy_slots` can copy the beginning of a slot that goes on."""

    experts: SlotExperts | None
    """Where the routers' choices are recorded; None: they are not."""

    @property
    def memory_bytes(self) -> int: ...

    def run(self, ids_R: Int64s, positions_R: Int64s, prefills: Sequence[Prefill]) -> Tensor:
        """Logits [R, V] of rows 0 to R - 1 after `ids_R`, which are at `positions_R`. What is before them is in their
        slots, or comes with the `prefills`, which fill theirs first."""
        ...

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int], n_tokens: int) -> None: ...

    def clear_slot(self, slot: int) -> None: ...

    def drop(self) -> None:
        """Free the memory of all slots, of which none is in use."""
        ...

    def refresh(self) -> None:
        """Update what is derived from the model's parameters, after they were changed in place."""
        ...


class Decoder(Protocol):
    """A model as the engine runs it."""

    def forward(self, step: DecodeStep, cache: SlotCache) -> Tensor:
        """Logits of the step's rows, [R, V]. Call `cache.begin(step)` first."""
        ...

    def refresh(self) -> None:
        """Update what is derived from the model's parameters, after they were changed in place."""
        ...


class ModuleDecoder:
    """Any architecture that computes attention through transformers' attention interface."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model

    def forward(self, step: DecodeStep, cache: SlotCache) -> Tensor:
        output: Any = self._model(
            input_ids=step.ids_T[None],
            position_ids=step.positions_T[None],
            use_cache=False,
            logits_to_keep=torch.arange(step.n_rows, device=step.ids_T.device),
            slot_cache=cache,
        )
        return output.logits[0]

    def refresh(self) -> None:
        """Does nothing: no copies of parameters are kept."""


class CachedSlots:
    """`Slots` of a decoder over the slot cache."""

    title = "the slot cache"
    shares_prompts = True

    def __init__(self, decoder: Decoder, cache: SlotCache, device: torch.device) -> None:
        self.decoder, self._cache, self._device = decoder, cache, device
        self.clear_slot, self.drop, self.refresh = cache.clear_slot, cache.drop, decoder.refresh
        self.experts: SlotExperts | None = None

    @property
    def memory_bytes(self) -> int:
        return self._cache.memory_bytes

    def run(self, ids_R: Int64s, positions_R: Int64s, prefills: Sequence[Prefill]) -> Tensor:
        limit = self._cache.max_context
        step = plan_step(ids_R, positions_R, prefills, max_context=limit, device=self._device)
        self._cache.begin(step)
        if self.experts is None:
            return self.decoder.forward(step, self._cache)
        with self.experts.recording(step.cell_slots_W, step.cell_positions_W, step.cell_sources_W):
            return self.decoder.forward(step, self._cache)

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int], n_tokens: int) -> None:
        self._cache.copy_slots(sources, targets, n_tokens)
        if self.experts is not None:
            self.experts.copy(sources, targets, n_tokens)


def build_slots(model: PreTrainedModel, n_slots: int, max_context: int, *, fused: bool) -> Slots:
    """Prepare `model` (which the engine takes over) for decoding `n_slots` sequences, and probe it.

    Raises UnsupportedModelError, with the reason, when neither the slot cache nor transformers' own is exact."""
    _refuse_moving_rope(model)
    probe_ids = _probe_sequences(model, max_context)
    model.set_attn_implementation("eager")
    with torch.inference_mode(), full_float32():
        expected = [model(input_ids=ids_T[None], use_cache=False).logits[0, -2:].float() for ids_T in probe_ids]
    reason = unpackable(model.config)
    if not reason:
        try:
            decoder = _over_slots(model, max_context, fused=fused)
            few = SlotCache(len(probe_ids), min(max_context, 16), model.device)
            _compare(model, CachedSlots(decoder, few, model.device), probe_ids, expected)
            return CachedSlots(decoder, SlotCache(n_slots, max_context, model.device), model.device)
        except FAILURES as error:
            reason = str(error)
    set_way(model, "padded")  # attention is transformers' own
    for batched in (True, False):
        try:
            _compare(model, ModelCaches(model, batched=batched), probe_ids, expected)
        except FAILURES as error:
            reason += f"; {error}"
        else:
            how = "samples of one prompt together" if batched else "one sequence at a time"
            log.info("%s decodes over transformers' own cache, %s: %s", type(model).__name__, how, reason)
            return ModelCaches(model, batched=batched)
    raise UnsupportedModelError(f"{reason}; it cannot be generated with here: expected actor.engine = sglang")


def _over_slots(model: PreTrainedModel, max_context: int, *, fused: bool) -> Decoder:
    model.set_attn_implementation(IMPLEMENTATION)
    return FusedDecoder(model, max_context) if fused and can_fuse(model) else ModuleDecoder(model)


def vocabulary_rows(model: PreTrainedModel) -> int:
    """Number of ids with an embedding row."""
    return cast(Tensor, model.get_input_embeddings().weight).shape[0]


# --------------------------------------------------------------------------------------------------- probe


def _probe_sequences(model: PreTrainedModel, max_context: int) -> list[Tensor]:
    """Two of them have one length."""
    n_ids = vocabulary_rows(model)
    lengths = [min(n, max_context) for n in (9, 4, 9)]
    return [((torch.arange(n) * 37 + 11 * (n + i)) % n_ids).to(model.device) for i, n in enumerate(lengths)]


def _decode_last_two(slots: Slots, sequences: Sequence[Tensor]) -> list[Tensor]:
    """Logits after the last two tokens of each sequence, from two steps: one with prefill, one that only decodes."""
    arrays = [ids_T.cpu().numpy() for ids_T in sequences]
    found: list[Tensor] = []
    for back in (2, 1):
        ids = np.array([ids_T[-back] for ids_T in arrays])
        positions = np.array([len(ids_T) - back for ids_T in arrays])
        fills = [Prefill(ids_T[:-2], [slot]) for slot, ids_T in enumerate(arrays) if back == 2 and len(ids_T) > 2]
        found.append(slots.run(ids, positions, fills).float())
    return list(torch.stack(found, dim=1))


def _compare(model: PreTrainedModel, slots: Slots, sequences: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    with torch.inference_mode(), full_float32():
        found = _decode_last_two(slots, sequences)
    difference = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    tf32 = tf32_forced(model.device.type)
    relative = max(1e-4, relative_tolerance(model.dtype, tf32=tf32))  # this path always computes its softmax in float32
    allowed = relative * max(1.0, max(float(b.abs().max()) for b in expected))
    if not difference <= allowed:
        raise UnsupportedModelError(
            f"{type(model).__name__}: decoding over {slots.title} gives logits that differ from the plain "
            f"forward by {difference:.3g} (allowed {allowed:.3g} in {tolerance_name(model.dtype, tf32=tf32)})"
        )


def _refuse_moving_rope(model: PreTrainedModel) -> None:
    """Refuse rotary frequencies that depend on the longest position of the batch: a row would depend on the others."""
    if kind := moving_rope(model.config):
        raise UnsupportedModelError(
            f"{type(model).__name__} has rope_type {kind!r}, whose frequencies change with the length of "
            "the batch; choose a checkpoint with static ones (default, linear, yarn, llama3)"
        )
