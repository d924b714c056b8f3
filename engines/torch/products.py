"""Products with weights that stay the same for many decode steps.

A decode step multiplies few rows by every weight of the model. On a CPU, the library behind `linear` rearranges a
weight for its registers in every call, which for a few rows costs as much as the product. `Product` has oneDNN
rearrange (*pack*) a large weight once per version.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear

PACKED_FROM_ELEMENTS: Final = 2**18
"""Weights with fewer elements stay in the processor's caches, where packing saves less than its call costs."""


class Product:
    """x @ weight.T + bias, with a weight [O, I] that may be changed in place if `refresh` is called afterwards."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight.detach()
        self._bias = None if bias is None else bias.detach()
        self._packs = packs(self._weight)
        self._packed: Tensor | None = None
        self.refresh()

    def refresh(self) -> None:
        """Pack the present values of the weight."""
        if not self._packs:
            return
        self._packed = None  # freed first, so that there is never a third copy
        self._packed = _ops().mkldnn._reorder_linear_weight(self._weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, I] -> [T, O]"""
        if self._packed is None:
            return linear(x, self._weight, self._bias)
        return _ops().mkldnn._linear_pointwise.default(x, self._packed, self._bias, "none", [], "")

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [T, O] + the product, in one call."""
        if self._packed is None:
            out = torch.addmm(residual, x, self._weight.t())
            return out if self._bias is None else out.add_(self._bias)
        return _ops().mkldnn._linear_pointwise.binary(x, residual, self._packed, self._bias, "add")


def packs(weight: Tensor) -> bool:
    """Whether a `Product` holds a packed copy of this weight beside the weight itself."""
    if weight.device.type != "cpu" or weight.numel() < PACKED_FROM_ELEMENTS or not torch.backends.mkldnn.is_available():
        return False
    # These are torch's own operators for compiled models; a build without them multiplies as usual.
    if not hasattr(_ops().mkldnn, "_linear_pointwise"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(_ops().mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _ops() -> Any:
    return torch.ops
