"""One forward of the generation engine: a step's tokens in, logits of its rows out, keys and values left in the cache.

`ModuleDecoder` runs any Hugging Face causal LM through its own modules; `engines.torch.fused` has a decoder for the
Llama family. `build_decoder` chooses, and compares the choice with the model's plain forward before any token is
sampled from it.

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

from stillhouse.engines.config import UseKernels
from stillhouse.engines.torch.fused import FusedDecoder, can_fuse
from stillhouse.engines.torch.kernels import Kernels, KernelsUnavailableError, compiled_kernels
from stillhouse.engines.torch.kv_cache import IMPLEMENTATION, SlotCache, UnsupportedModelError
from stillhouse.engines.torch.products import packs
from stillhouse.engines.torch.step import DecodeStep, Prefill, plan_step
from stillhouse.models.packed import unpackable
from stillhouse.models.precision import full_float32, relative_tolerance, tf32_forced, tolerance_name
from stillhouse.models.rotary import moving_rope

log = logging.getLogger(__name__)


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


def build_decoder(model: PreTrainedModel, max_context: int, *, fused: bool, kernels: UseKernels = "off") -> Decoder:
    """Prepare `model` (which the engine takes over) for decoding, and probe it.

    Raises UnsupportedModelError, with the reason, when the architecture cannot be run over the slot cache."""
    _refuse_moving_rope(model)
    if reason := unpackable(model.config):
        raise UnsupportedModelError(f"{reason}; the slot cache does full and sliding attention only")
    probe_ids = _probe_sequences(model, max_context)
    model.set_attn_implementation("eager")
    with torch.inference_mode(), full_float32():
        expected = [model(input_ids=ids_T[None], use_cache=False).logits[0, -2:].float() for ids_T in probe_ids]
    model.set_attn_implementation(IMPLEMENTATION)
    decoder: Decoder = ModuleDecoder(model)
    if fused and can_fuse(model):
        decoder = FusedDecoder(model, max_context, kernels_for(model, kernels))
    elif kernels == "on":
        raise UnsupportedModelError(f"kernels = on: {type(model).__name__} has no hand-written decoder to use them in")
    with torch.inference_mode(), full_float32():
        _compare(model, _decode_last_two(decoder, probe_ids, max_context), expected)
    return decoder


def kernels_for(model: PreTrainedModel, wanted: UseKernels) -> Kernels | None:
    """What computes the fused decoder's products. With auto, models whose weights fit the processor's caches go without
    kernels: they are bound by Python. Raises UnsupportedModelError where `on` is impossible."""
    fits = model.device.type == "cpu" and model.dtype == torch.float32
    if wanted == "on" and not fits:
        raise UnsupportedModelError(f"kernels = on: they are for float32 on a CPU, not {model.dtype} on {model.device}")
    if wanted == "off" or not fits or (wanted == "auto" and not any(map(packs, model.parameters()))):
        return None
    try:
        return compiled_kernels()
    except KernelsUnavailableError as error:
        if wanted == "on":
            raise UnsupportedModelError(f"kernels = on: {error}") from error
        log.warning("actor.torch.kernels: decoding with torch alone, which is slower for this model: %s", error)
        return None


def vocabulary_rows(model: PreTrainedModel) -> int:
    """Number of ids with an embedding row."""
    return cast(Tensor, model.get_input_embeddings().weight).shape[0]


# --------------------------------------------------------------------------------------------------- probe


def _probe_sequences(model: PreTrainedModel, max_context: int) -> list[Tensor]:
    n_ids = vocabulary_rows(model)
    lengths = [min(n, max_context) for n in (9, 4)]
    return [((torch.arange(n) * 37 + 11 * n) % n_ids).to(model.device) for n in lengths]


def _decode_last_two(decoder: Decoder, sequences: Sequence[Tensor], max_context: int) -> list[Tensor]:
    """Logits after the last two tokens of each sequence, from two steps: one with prefill, one that only decodes."""
    device = sequences[0].device
    cache = SlotCache(len(sequences), min(max_context, 16), device)
    arrays = [ids_T.cpu().numpy() for ids_T in sequences]
    found: list[Tensor] = []
    for back in (2, 1):
        ids = np.array([ids_T[-back] for ids_T in arrays])
        positions = np.array([len(ids_T) - back for ids_T in arrays])
        fills = [Prefill(ids_T[:-2], [slot]) for slot, ids_T in enumerate(arrays) if back == 2 and len(ids_T) > 2]
        step = plan_step(ids, positions, fills, max_context=cache.max_context, device=device)
        cache.begin(step)
        found.append(decoder.forward(step, cache).float())
    return list(torch.stack(found, dim=1))


def _compare(model: PreTrainedModel, found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    difference = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    tf32 = tf32_forced(model.device.type)
    relative = max(1e-4, relative_tolerance(model.dtype, tf32=tf32))  # this path always computes its softmax in float32
    allowed = relative * max(1.0, max(float(b.abs().max()) for b in expected))
    if not difference <= allowed:
        raise UnsupportedModelError(
            f"{type(model).__name__}: decoding over the slot cache gives logits that differ from the plain forward by "
            f"{difference:.3g} (allowed {allowed:.3g} in {tolerance_name(model.dtype, tf32=tf32)}); this architecture "
            "mixes tokens outside of the attention interface, and cannot be generated with here"
        )


def _refuse_moving_rope(model: PreTrainedModel) -> None:
    """Refuse rotary frequencies that depend on the longest position of the batch: a row would depend on the others."""
    if kind := moving_rope(model.config):
        raise UnsupportedModelError(
            f"{type(model).__name__} has rope_type {kind!r}, whose frequencies change with the length of "
            "the batch; choose a checkpoint with static ones (default, linear, yarn, llama3)"
        )
