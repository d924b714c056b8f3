"""Facts about a checkpoint: names of dtypes, sizes of its vocabulary and hidden states. No torch, no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

from stillhouse.protocol.messages import ExpertShape

DtypeName: TypeAlias = Literal["float32", "bfloat16", "float16"]
LoadDtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
"""auto: bfloat16 on a GPU, float32 elsewhere (`resolve_dtype`)."""
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN_EXPERTS: Final = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
    "top_k_experts",
)
"""What architectures call them in config.json."""
Quantized: TypeAlias = Literal["none", "nf4"]
"""nf4: linear layers in 4 bits, by bitsandbytes."""
NF4_BYTES: Final = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Per number: 4 bits, one byte of scale for 64 of them, and 4 bytes for 256 scales (QLoRA's double quantization)."""
BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


def resolve_dtype(dtype: LoadDtype, device: str) -> DtypeName:
    """ "auto" -> bfloat16 on CUDA, float32 elsewhere; anything else as it is."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if device.startswith("cuda") else "float32"


def vocabulary_size(model_path: str | Path) -> int:
    """Rows of a checkpoint's embedding; every token id is below this. Raises ValueError where config.json does not say.

    A model of several parts (vision and text) has it in `text_config`, which takes precedence over a number at the top,
    because token ids index the text model's embedding."""
    return _size(Path(model_path) / "config.json", "vocab_size")


def known_hidden_size(model_path: str | Path) -> int | None:
    """Size of a checkpoint's hidden states; None where there is no model or its config.json does not say."""
    try:
        return _size(Path(model_path) / "config.json", "hidden_size")
    except ValueError:
        return None


def known_expert_shape(model_path: str | Path) -> ExpertShape | None:
    """The routers of a checkpoint, as if each of its layers had one; None where config.json names no experts."""
    sizes: list[int] = []
    for names in (EXPERTS, CHOSEN_EXPERTS, ("num_hidden_layers",)):
        for name in names:
            try:
                sizes.append(_size(Path(model_path) / "config.json", name))
                break
            except ValueError:
                continue
    if len(sizes) < 3 or sizes[0] < 2:
        return None
    return ExpertShape(tuple(range(sizes[2])), sizes[0], sizes[1])


def _size(path: Path, name: str) -> int:
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}; expected the config.json of a checkpoint folder") from error
    if isinstance(found, Mapping):
        config = cast(Mapping[str, object], found)
        nested = config.get("text_config")
        for section in (nested, config):
            size = cast(Mapping[str, object], section).get(name) if isinstance(section, Mapping) else None
            if isinstance(size, int) and not isinstance(size, bool):
                return size
    raise ValueError(f"{path} has no {name}; expected one at its top or in text_config")


def known_vocabulary_size(model_path: str | Path | None) -> int | None:
    """Like `vocabulary_size`, but None where there is no model or its config.json does not say."""
    try:
        return None if model_path is None else vocabulary_size(model_path)
    except ValueError:
        return None
