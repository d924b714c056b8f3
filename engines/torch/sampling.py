"""Samples the next token of every row at once, and its log-prob under the distribution actually sampled from.

Order, as in transformers: temperature, the teacher's share, top-k, top-p over what top-k kept, min-p; the kept tokens
are renormalised. A row's token depends only on its own logits, settings and uniform number, never on other rows.

Legend: B rows (requests), V vocabulary, N blocks of K tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stillhouse.engines.base import check_top_ids_wanted
from stillhouse.protocol.messages import Sampling

_SEED_MASK = (1 << 64) - 1
_PHILOX_BLOCK = 4
"""Doubles that one step of numpy's Philox counter yields."""
_LARGEST_UNIFORM = 1.0 - 2.0**-50
"""Keeps u * total strictly under total after rounding, so that the inverse CDF never runs past the last token."""
_BLOCK = 256
"""Tokens per block of a large vocabulary."""


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Settings per row; None where every row has the neutral value, so that the step can skip that work."""

    inverse_temperature_B: Tensor | None
    """float32; 1 for greedy rows."""
    top_k_B: Tensor | None
    """int64; V or more = off."""
    top_p_B: Tensor | None
    """float64; 2 = off (1 could cut the tail by rounding). Given if and only if top_k_B is."""
    greedy_B: Tensor | None
    """bool."""
    min_p_B: Tensor | None = None
    """float32; 0 = off."""
    teacher_share_B: Tensor | None = None
    """float32; 0 = the student alone."""


def check_sampling(sampling: Sampling) -> None:
    """Raises ValueError for settings that define no distribution."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise ValueError(f"temperature = {sampling.temperature}; expected 0 (greedy) or a positive number")
    if not 0 < sampling.top_p <= 1:
        raise ValueError(f"top_p = {sampling.top_p}; expected a number in (0, 1], 1 = off")
    if sampling.top_k < 0:
        raise ValueError(f"top_k = {sampling.top_k}; expected 0 (off) or more")
    if not 0 <= sampling.min_p < 1:
        raise ValueError(f"min_p = {sampling.min_p}; expected a number in [0, 1), 0 = off")
    if not 0 <= sampling.teacher_share <= 1:
        raise ValueError(f"teacher_share = {sampling.teacher_share}; expected a number from 0 (off) to 1")
    check_top_ids_wanted(sampling)


def draw_uniforms(seed: int, offset: int, n: int) -> npt.NDArray[np.float64]:
    """Numbers offset .. offset + n - 1 of the stream of `seed`, [n] in [0, 1); any offset costs the same."""
    skipped = offset % _PHILOX_BLOCK
    bits = np.random.Philox(key=seed & _SEED_MASK, counter=offset // _PHILOX_BLOCK)
    return np.minimum(np.random.Generator(bits).random(skipped + n)[skipped:], _LARGEST_UNIFORM)


class NextToken:
    """The distribution from which each row takes its next token."""

    def __init__(self, logits_BV: Tensor, rows: RowSampling, teacher_BV: Tensor | None = None) -> None:
        """`teacher_BV`: the teacher's logits; needed where rows have a share of it."""
        logits_BV = logits_BV.float()
        if rows.inverse_temperature_B is not None:
            logits_BV = logits_BV * rows.inverse_temperature_B[:, None]
        self._logits_BV, self._greedy_B = logits_BV, rows.greedy_B
        self._probs_BV = torch.softmax(logits_BV, dim=-1)
        """0 where a token is cut off; those of a row are not renormalised."""
        if rows.teacher_share_B is not None and teacher_BV is not None:
            self._probs_BV = _mixed(self._probs_BV, teacher_BV, rows.inverse_temperature_B, rows.teacher_share_B)
        if rows.top_k_B is not None and rows.top_p_B is not None:
            self._probs_BV = _truncate(self._probs_BV, rows.top_k_B, rows.top_p_B, rows.min_p_B)

    def sample(self, uniforms_B: Tensor) -> tuple[Tensor, Tensor]:
        """Returns ids_B (int64) and logprobs_B (float32). `uniforms_B` is float64 in [0, 1).

        Inverse CDF over the vocabulary in id order. NaN logits give a NaN log-prob.
        """
        logits_BV, probs_BV = self._logits_BV, self._probs_BV
        ids_B1, total_B1 = _invert(probs_BV, uniforms_B[:, None])
        if self._greedy_B is not None:
            ids_B1 = torch.where(self._greedy_B[:, None], logits_BV.argmax(dim=-1, keepdim=True), ids_B1)
        ids_B1 = ids_B1.clamp_max_(logits_BV.shape[1] - 1)  # only NaN rows reach past the end
        logprobs_B1 = (probs_BV.gather(1, ids_B1) / total_B1).log_()
        return ids_B1.squeeze(1), logprobs_B1.squeeze(1).float()

    def likeliest(self, k: int) -> tuple[Tensor, Tensor]:
        """Returns ids_BK (int64) of the K = min(k, V) likeliest tokens, likeliest first, and probs_BK (float32), where
        nothing is cut off."""
        top_BK, ids_BK = self._logits_BV.topk(min(k, self._logits_BV.shape[1]), dim=-1)
        return ids_BK, (top_BK - self._logits_BV.logsumexp(dim=-1, keepdim=True)).exp_()

    def kept(self) -> list[npt.NDArray[np.int32]]:
        """For each row the ids that are not cut off, ascending."""
        kept_BV = self._probs_BV > 0
        ids = kept_BV.nonzero()[:, 1].int().cpu().numpy()
        return np.split(ids, np.cumsum(kept_BV.sum(dim=1).cpu().numpy())[:-1])


def _invert(probs_BV: Tensor, uniforms_B1: Tensor) -> tuple[Tensor, Tensor]:
    """ids_B1 of the first tokens whose running sum of probabilities is above u * total, and total_B1 (float64).

    Running sums are float64: over a large vocabulary a float32 one would be off by more than the probability of most
    tokens. They cost more than the softmax there, so they go over blocks of tokens first, and then over the tokens of
    the block that was found. The sum of one block may be float32: like the softmax itself, it changes no token's share
    by more than a few parts in 10^7."""
    n_ids = probs_BV.shape[1]
    if n_ids <= 8 * _BLOCK:
        cdf_BV = torch.cumsum(probs_BV, dim=-1, dtype=torch.float64)
        total_B1 = cdf_BV[:, -1:]
        return torch.searchsorted(cdf_BV, uniforms_B1 * total_B1, right=True), total_B1
    blocks_BNK = torch.nn.functional.pad(probs_BV, (0, -n_ids % _BLOCK)).unflatten(1, (-1, _BLOCK))
    sums_BN = blocks_BNK.sum(dim=-1).double()
    cdf_BN = torch.cumsum(sums_BN, dim=-1)
    total_B1 = cdf_BN[:, -1:]
    targets_B1 = uniforms_B1 * total_B1
    block_B1 = torch.searchsorted(cdf_BN, targets_B1, right=True).clamp_max_(cdf_BN.shape[1] - 1)
    sum_B1 = sums_BN.gather(1, block_B1)
    share_B1 = (targets_B1 - (cdf_BN.gather(1, block_B1) - sum_B1)) / sum_B1
    inside_BK = blocks_BNK.gather(1, block_B1[:, :, None].expand(-1, 1, _BLOCK)).squeeze(1)
    cdf_BK = torch.cumsum(inside_BK, dim=-1, dtype=torch.float64)
    inside_B1 = share_B1.clamp(0.0, _LARGEST_UNIFORM) * cdf_BK[:, -1:]
    return block_B1 * _BLOCK + torch.searchsorted(cdf_BK, inside_B1, right=True), total_B1


def _mixed(probs_BV: Tensor, teacher_BV: Tensor, inverse_temperature_B: Tensor | None, share_B: Tensor) -> Tensor:
    """(1 - share) of the student's probabilities and share of the teacher's at the same temperature. Rows without a
    share stay as they are, bit for bit."""
    if inverse_temperature_B is not None:
        teacher_BV = teacher_BV * inverse_temperature_B[:, None]
    mixed_BV = torch.lerp(probs_BV, torch.softmax(teacher_BV, dim=-1), share_B[:, None])
    return torch.where(share_B[:, None] > 0, mixed_BV, probs_BV)


def _truncate(probs_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor | None) -> Tensor:
    """Set tokens outside top-k, top-p and min-p to zero, without renormalising. Always keeps the likeliest token."""
    sorted_BV, order_BV = cast(tuple[Tensor, Tensor], torch.sort(probs_BV, dim=-1, descending=True, stable=True))
    ranks_V = torch.arange(probs_BV.shape[1], device=probs_BV.device)
    within_k_BV = ranks_V < top_k_B[:, None]
    top_BV = torch.where(within_k_BV, sorted_BV, 0.0).to(torch.float64)
    before_BV = torch.cumsum(top_BV, dim=-1) - top_BV
    keep_BV = within_k_BV & (before_BV < top_p_B[:, None] * top_BV.sum(dim=-1, keepdim=True))
    if min_p_B is not None:
        keep_BV &= sorted_BV >= min_p_B[:, None] * sorted_BV[:, :1]
    keep_BV[:, 0] = True
    return torch.where(torch.zeros_like(keep_BV).scatter_(1, order_BV, keep_BV), probs_BV, 0.0)
