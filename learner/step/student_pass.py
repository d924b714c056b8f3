"""One packed forward pass of the student over a microbatch: the hidden states that its trained tokens are predicted
from, and the head as products take it.

Legend: T input tokens of a microbatch, N trained tokens of it, H hidden size, V rows of the head.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from learner.batch.packing import Microbatch
from models.logprobs import LmHead, lm_head
from models.packed import packed_hidden
from models.precision import products
from models.transfer import upload


class States(NamedTuple):
    head: LmHead
    """In bfloat16 where products are."""
    hidden_NH: Tensor
    """For a product with `head`."""
    exact_NH: Tensor
    """The same, not rounded to the dtype of products."""


def predictor_states(model: PreTrainedModel, microbatch: Microbatch, *, bfloat16: bool) -> States:
    """`bfloat16`: of matrix products; parameters stay as they are. Differentiable unless gradients are off."""
    head = lm_head(model)
    device = head.weight_VH.device
    with products(device.type, bfloat16=bfloat16):
        hidden_TH = packed_hidden(model, upload(microbatch.ids_T, device), microbatch.lengths)
    exact_NH = hidden_TH.index_select(0, upload(microbatch.predictor_N, device))
    if not bfloat16:
        return States(head, exact_NH, exact_NH)
    bias_V = None if head.bias_V is None else head.bias_V.bfloat16()
    head = LmHead(head.weight_VH.bfloat16(), bias_V, head.scale, head.softcap)
    return States(head, exact_NH.bfloat16(), exact_NH)
