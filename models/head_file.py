"""Loads the output head of a checkpoint, without its layers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.models.description import DtypeName
from stillhouse.models.loading import ModelError, load_causal_lm, load_config, outline, resolve_path
from stillhouse.models.logprobs import LmHead, lm_head
from stillhouse.models.safetensors_header import read_headers

log = logging.getLogger(__name__)


def load_head(path: str | Path, *, device: str, dtype: DtypeName) -> LmHead:
    """The head of a causal LM in a folder, or of a hub name. Only its tensors are read from safetensors files, under
    the names that the architecture gives them; for other files the whole model is loaded and dropped. Raises
    models.loading.ModelError, and ValueError for a head that is not one linear layer."""
    name = resolve_path(path)
    with torch.device("meta"):
        empty = outline(load_config(name))
    shape = lm_head(empty)
    tensors = _read(Path(name), empty)
    if tensors is None:
        log.warning("%s has its output head in no safetensors file under the usual name; loading the whole model", name)
        whole = lm_head(load_causal_lm(name, device="cpu", dtype=dtype, attention="packed"))
        tensors = [one.detach().clone() for one in (whole.weight_VH, whole.bias_V) if one is not None]
    wanted: torch.dtype = getattr(torch, dtype)
    weight_VH, *bias = (tensor.to(device=device, dtype=wanted) for tensor in tensors)
    return LmHead(weight_VH, bias[0] if bias else None, shape.scale, shape.softcap)


def _read(folder: Path, empty: PreTrainedModel) -> list[Tensor] | None:
    """Weight and bias of the head of a model on the meta device, as transformers would load them; None where names do
    not say which they are. A head that is in the files counts, also if config.json ties it to the embedding; without
    one the embedding is the head."""
    files, head = _files(folder), empty.get_output_embeddings()
    prefix = next(name for name, module in empty.named_modules() if module is head)
    known = dict(empty.named_parameters(remove_duplicate=False))
    found: list[Tensor] = []
    for part, parameter in cast("torch.nn.Module", head).named_parameters():
        names = [f"{prefix}.{part}", *(name for name, one in known.items() if one is parameter)]
        name = next((name for name in names if name in files), None)
        if name is None or (name != names[0] and _unknown_of_shape(files, known, parameter)):
            return None
        found.append(_tensor(files[name], name))
        if found[-1].shape != parameter.shape:
            raise ModelError(f"{folder}: {name} is {list(found[-1].shape)}, config.json says {list(parameter.shape)}")
    return found


def _unknown_of_shape(files: Mapping[str, Path], known: Collection[str], parameter: Tensor) -> bool:
    """Whether a tensor of this shape is there under a name that the architecture does not have: transformers may know
    it by a former name of the head."""
    for name in files.keys() - known:
        with safe_open(files[name], framework="pt") as file:  # pyright: ignore[reportUnknownVariableType]
            if list(file.get_slice(name).get_shape()) == list(parameter.shape):
                return True
    return False


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:  # pyright: ignore[reportUnknownVariableType]
        return cast(Tensor, opened.get_tensor(name))


def _files(folder: Path) -> dict[str, Path]:
    return {name: file for file, header in read_headers(folder).items() for name in header.tensors}
