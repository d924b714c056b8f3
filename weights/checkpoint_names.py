"""The names under which servers are sent a student's weights: those of its checkpoint.

    transformers    mlp.experts.gate_up_proj [E, 2I, H]      one parameter for all experts of a layer
    checkpoint      mlp.experts.0.gate_proj.weight [I, H]    its bytes, in this order
                    mlp.experts.0.up_proj.weight   [I, H]
                    mlp.experts.1.gate_proj.weight [I, H] ...

transformers 5 joins or renames tensors when it loads some checkpoints (mixtures of experts, above all), and
`save_pretrained` reverses that. A server loads weights by the names of checkpoints, and silently ignores all others.
Where the tensors of a checkpoint are the parameter's own bytes in another division, only the names and shapes differ,
and nothing is computed or copied for it. Every other student is refused.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from stillhouse.weights.manifest import Pieces, TensorPiece
from stillhouse.weights.staged_weights import Merged, Weight

_NAMES_IN_ERROR: Final = 4


class NamesError(ValueError):
    """Servers would not recognise the names under which this student's weights can be sent."""


def checkpoint_pieces(model: PreTrainedModel, weights: Iterable[tuple[str, Weight]]) -> Pieces:
    """The tensors of a checkpoint that make up a weight, in the order of their bytes; only for weights whose name or
    shape is another there. They are what `save_pretrained` would write, by transformers' own conversion on tensors
    without memory. Raises NamesError unless the tensors of a checkpoint divide each weight into contiguous pieces."""
    ours: dict[str, Tensor] = {}
    for name, weight in weights:
        tensor = weight.base if isinstance(weight, Merged) else weight
        ours[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    with torch.no_grad(), _ViewsStayViews():
        saved = revert_weight_conversion(model, dict(ours))
    parts = _parts(ours, saved)
    wrong = [name for name, tensor in ours.items() if not _tiles(tensor, parts[name])]
    if wrong:
        of_wrong = {piece for name in wrong for piece, _ in parts[name]}
        known = {piece for pieces in parts.values() for piece, _ in pieces}
        raise NamesError(
            f"SGLang servers cannot be sent this student ({model.config.model_type}): {len(wrong)} of its {len(ours)} "
            f"weights are arranged otherwise in a checkpoint: {_some(wrong)}; a checkpoint has "
            f"{_some([name for name in saved if name in of_wrong or name not in known])}. A server would ignore the "
            "names that it does not know, and keep its old weights. Use actors with the embedded engine: "
            "--actor.engine torch"
        )
    return {
        name: tuple(TensorPiece(piece, tuple(tensor.shape)) for piece, tensor in parts[name])
        for name in ours
        if parts[name] != [(name, ours[name])]
    }


class _ViewsStayViews(TorchFunctionMode):
    """Conversions make the tensors that they cut out contiguous, because files need that. Without those copies, every
    tensor cut out of a parameter says where it lies in it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _parts(ours: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> dict[str, list[tuple[str, Tensor]]]:
    """The tensors of a checkpoint that are views of each of our weights, by their offset."""
    names = {id(tensor): name for name, tensor in ours.items()}
    parts: dict[str, list[tuple[str, Tensor]]] = defaultdict(list)
    for piece, tensor in saved.items():
        name = names.get(id(tensor if tensor._base is None else tensor._base))  # pyright: ignore[reportPrivateUsage]
        if name is not None:
            parts[name].append((piece, tensor))
    for pieces in parts.values():
        pieces.sort(key=lambda piece: piece[1].storage_offset())
    return parts


def _tiles(tensor: Tensor, parts: Sequence[tuple[str, Tensor]]) -> bool:
    """Whether the parts, in this order, are the tensor's elements in memory, each once."""
    end = 0
    for _, part in parts:
        if part.storage_offset() != end or not part.is_contiguous() or part.dtype != tensor.dtype:
            return False
        end += math.prod(part.shape)
    return end == tensor.numel()


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_IN_ERROR
    return ", ".join(names[:_NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")
