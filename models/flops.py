"""Floating-point operations (FLOPs) of a causal LM, from its checkpoint's headers and config.json. No torch.

A product of a token with a weight matrix costs 2 operations per weight (Kaplan et al. 2020, arXiv 2001.08361, section
2.1). Attention costs 2 per query, key and width of a head for the scores, and 2 for the weighted sum. Norms,
activations, rotary embeddings and the recurrences of linear attention are left out: less than 1 % of a model of use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from stillhouse.models.description import CHOSEN_EXPERTS, EXPERTS
from stillhouse.models.safetensors_header import EMBEDDINGS, HEADS, read_headers

_LOOKED_UP: Final = (*EMBEDDINGS, "wpe.weight", "embed_positions.weight")
_ROUTED: Final = re.compile(r"\.experts\.")
_OTHER_TOWERS: Final = re.compile(r"(^|\.)(visual|vision_\w+|audio_\w+|mtp)\.")
"""Parts that text does not run through."""


class ForwardFlops(NamedTuple):
    """What tokens cost, in operations."""

    per_token: float
    """In products with weights."""
    per_pair: float
    """In attention, per token that is read, over the layers that read all of them."""
    per_window_pair: float = 0.0
    """The same, over the layers that read the last `window` tokens."""
    window: int = 0

    def of(self, start: int, end: int) -> float:
        """Tokens [start, end) of a text, each read once; those before `start` are in the KV cache."""
        near = _pairs(min(end, self.window)) - _pairs(min(start, self.window))
        near += self.window * (max(end, self.window) - max(start, self.window))
        all_pairs = _pairs(end) - _pairs(start)
        return self.per_token * (end - start) + self.per_pair * all_pairs + self.per_window_pair * near

    def training(self, length: int, *, frozen: bool) -> float:
        """A text of `length` tokens forward and backward. A backward pass costs two forward ones: the gradients of the
        inputs and of the weights. `frozen`: the weights get none, as with LoRA. Recomputing is not counted."""
        forward = self.of(0, length)
        return 3 * forward - (self.per_token * length if frozen else 0.0)


def forward_flops(folder: Path) -> ForwardFlops | None:
    """Those of the model in a Hugging Face folder. None if they are not known: no safetensors files, weights packed
    into integers (AWQ, GPTQ), a config.json that lacks what is needed, a model of an API."""
    try:
        config: Mapping[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        text = {**config, **cast(dict[str, Any], config.get("text_config") or {})}
        entries = {name: one for file in read_headers(folder).values() for name, one in file.tensors.items()}
        matrices = {n: one for n, one in entries.items() if len(one.shape) > 1 and not _OTHER_TOWERS.search(n)}
        if not matrices or any(one.dtype.startswith(("I", "U")) for one in matrices.values()):
            return None
        return _of(text, {name: one.numbers for name, one in matrices.items()})
    except (OSError, KeyError, TypeError, ValueError, AttributeError, StopIteration):
        return None


def _of(text: Mapping[str, Any], weights: Mapping[str, int]) -> ForwardFlops:
    experts = next((int(text[name]) for name in EXPERTS if text.get(name)), 0)
    share = next(int(text[name]) for name in CHOSEN_EXPERTS if text.get(name)) / experts if experts else 1.0
    multiplied = sum(
        number * (share if _ROUTED.search(name) else 1.0)
        for name, number in weights.items()
        if not name.endswith(_LOOKED_UP)
    )
    if not any(name.endswith(HEADS) for name in weights):  # tied: the embedding is the output head, too
        multiplied += next((number for name, number in weights.items() if name.endswith(EMBEDDINGS)), 0)
    heads = int(text.get("num_attention_heads") or text["n_head"])
    head = int(text.get("head_dim") or (text.get("hidden_size") or text["n_embd"]) // heads)
    if "qk_nope_head_dim" in text:  # multi-head latent attention: keys and values of different widths
        widths = int(text["qk_nope_head_dim"]) + int(text["qk_rope_head_dim"]) + int(text["v_head_dim"])
    else:
        widths = 2 * head
    kinds = text.get("layer_types") or ["full_attention"] * int(text.get("num_hidden_layers") or text["n_layer"])
    window = int(text.get("sliding_window") or 0)
    near = kinds.count("sliding_attention") if window else 0
    full = kinds.count("full_attention") + (0 if window else kinds.count("sliding_attention"))
    return ForwardFlops(2.0 * multiplied, 2.0 * heads * widths * full, 2.0 * heads * widths * near, window)


def _pairs(length: int) -> int:
    return length * (length + 1) // 2
