"""Divergence between the student's whole next-token distribution and a teacher's, from hidden states: the student's
logits are made, compared and differentiated `chunk_tokens` rows at a time, in one pass.

    loss = sum_t weight_t * D(p_t, q_t)          p_t = softmax(head(hidden_t)), at temperature 1

The weights are known before, which is what makes one pass enough (models.one_pass). Neither [T, V] logits nor [T, V]
softmax ever exist; no head product is done twice.

Legend: T positions, H hidden size, V tokens of the vocabulary, K tokens of a top-k set, C positions of one chunk.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from learner.objectives.distributions import PADDING, Between
from models.logprobs import DEFAULT_CHUNK_TOKENS, LmHead
from models.one_pass import one_pass_loss
from models.transfer import upload
from protocol.topk_codec import LOG_TAIL_FLOOR, TopK

MASS_ROUNDING = 1e-3
"""The probabilities of a top-k set may sum to this much more than 1."""


class Teacher(Protocol):
    """What is known of a teacher's distribution at the T positions."""

    def compare(self, z_CV: Tensor, place: slice, divergence: Between) -> tuple[Tensor, Tensor]:
        """(divergence [C], d divergence / d z [C, V]) for the student's logits of these positions. May overwrite z."""
        ...

    def check(self, n_tokens: int, vocab_tokens: int) -> None:
        """Raises ValueError when it does not belong to T positions and V tokens."""
        ...


@dataclass(frozen=True)
class WholeTeacher:
    """All of it, worked out chunk by chunk: the teacher's own hidden states and head."""

    hidden_TH: Tensor
    head: LmHead

    def check(self, n_tokens: int, vocab_tokens: int) -> None:
        rows = self.head.weight_VH.shape[0]
        if self.hidden_TH.shape[0] != n_tokens or rows < vocab_tokens:
            raise ValueError(
                f"teacher with {self.hidden_TH.shape[0]} positions and {rows} rows; expected {n_tokens} positions and "
                f"at least {vocab_tokens} rows"
            )

    def compare(self, z_CV: Tensor, place: slice, divergence: Between) -> tuple[Tensor, Tensor]:
        vocab_tokens = z_CV.shape[1]
        teacher_CV = cut_to_vocabulary(self.head, vocab_tokens).logits(self.hidden_TH[place])
        teacher_CV = teacher_CV.sub_(teacher_CV.logsumexp(dim=1, keepdim=True)).to(z_CV.dtype)
        student_CV = z_CV.sub_(z_CV.logsumexp(dim=1, keepdim=True))
        divergence_C, slope_CV = divergence(student_CV, teacher_CV)
        total_C1 = slope_CV.sum(dim=1, keepdim=True)
        return divergence_C, slope_CV.sub_(student_CV.exp_().mul_(total_C1))


@dataclass(frozen=True)
class TopKTeacher:
    """Its likeliest tokens and the mass of all the others. Rows may hold different numbers of tokens.

    Raises ValueError (trap: numbers from an engine are checked at the door, never averaged in)."""

    ids_TK: Tensor
    """int64, all different within a row's first `counts_T`; behind them any number."""
    logprobs_TK: Tensor
    tail_T: Tensor
    """log(1 - sum of the row's probabilities); -inf only where the row holds the whole vocabulary."""
    counts_T: Tensor
    """int64, at least 1."""

    def __post_init__(self) -> None:
        n_tokens, k = self.ids_TK.shape
        if self.logprobs_TK.shape != (n_tokens, k) or not self.tail_T.shape == self.counts_T.shape == (n_tokens,):
            raise ValueError(
                f"ids {tuple(self.ids_TK.shape)}, log-probs {tuple(self.logprobs_TK.shape)}, tail "
                f"{tuple(self.tail_T.shape)}, counts {tuple(self.counts_T.shape)}; expected [T, K] twice and [T] twice"
            )
        if n_tokens and not 1 <= int(self.counts_T.min()) <= int(self.counts_T.max()) <= k:
            raise ValueError(f"counts from {int(self.counts_T.min())} to {int(self.counts_T.max())}; expected 1 to {k}")
        mass_T = torch.where(self._valid(slice(None)), self.logprobs_TK, -torch.inf).double().exp().sum(dim=1)
        fine_T = torch.where(self._valid(slice(None)), self.logprobs_TK.isfinite(), True).all(dim=1)
        fine_T = fine_T & (mass_T <= 1.0 + MASS_ROUNDING) & (self.tail_T <= MASS_ROUNDING)
        if not bool(fine_T.all()):
            raise ValueError(
                f"the teacher's log-probs at {int((~fine_T).sum())} positions (first: {int((~fine_T).int().argmax())}) "
                "are not finite, or their probabilities sum to more than 1; they are not used"
            )

    @classmethod
    def of(cls, top: TopK, device: torch.device | str = "cpu") -> TopKTeacher:
        """From what came over the wire."""
        ids_TK, logprobs_TK = top.padded()
        arrays = (ids_TK, logprobs_TK, top.tail_T, top.counts_T)
        return cls(*(torch.from_numpy(np.require(array, requirements="W")).to(device) for array in arrays))

    def to(self, device: torch.device) -> TopKTeacher:
        """The same on `device`, not looked at again: on a GPU each look would make the host wait."""
        moved = copy.copy(self)  # without __post_init__
        for name in ("ids_TK", "logprobs_TK", "tail_T", "counts_T"):
            object.__setattr__(moved, name, upload(getattr(self, name), device))
        return moved

    def check(self, n_tokens: int, vocab_tokens: int) -> None:
        if self.ids_TK.shape[0] != n_tokens:
            raise ValueError(f"teacher with {self.ids_TK.shape[0]} positions; expected {n_tokens}")
        ids_TK = torch.where(self._valid(slice(None)), self.ids_TK, -1)
        if n_tokens and (int(ids_TK.max()) >= vocab_tokens or int(ids_TK[self._valid(slice(None))].min()) < 0):
            raise ValueError(
                f"a teacher's token id is outside the vocabulary of {vocab_tokens} tokens: got up to "
                f"{int(ids_TK.max())}; student and teacher need the same token-to-id map"
            )
        sorted_TK = ids_TK.sort(dim=1).values
        if bool(((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)).any()):
            raise ValueError("a teacher's top-k set names a token twice")
        no_tail_T = torch.isneginf(self.tail_T) & (self.counts_T < vocab_tokens)
        if bool(no_tail_T.any()):
            raise ValueError(
                f"{int(no_tail_T.sum())} positions have a tail of no mass, but not all {vocab_tokens} tokens; expected "
                f"the mass of the others, at least exp({LOG_TAIL_FLOOR:.1f})"
            )

    def compare(self, z_CV: Tensor, place: slice, divergence: Between) -> tuple[Tensor, Tensor]:
        valid_CK, first_C1 = self._valid(place), self.ids_TK[place, :1]
        ids_CK = torch.where(valid_CK, self.ids_TK[place], first_C1)  # naming a token twice does no harm below
        tail_C1 = self.tail_T[place, None].to(z_CV.dtype)
        has_tail_C1 = ~torch.isneginf(tail_C1)
        largest_C1 = z_CV.amax(dim=1, keepdim=True)
        top_z_CK = z_CV.gather(1, ids_CK)
        exp_CV = z_CV.sub_(largest_C1).exp_()
        total_C1 = exp_CV.sum(dim=1, keepdim=True)
        normaliser_C1 = largest_C1 + total_C1.log()
        outside_CV = exp_CV.scatter_(1, ids_CK, 0.0)  # so that the tail is a sum, and not 1 minus something near 1
        outside_C1 = outside_CV.sum(dim=1, keepdim=True).clamp(min=torch.finfo(z_CV.dtype).tiny)
        top_CK = top_z_CK - normaliser_C1
        student_CB = _padded(top_CK, outside_C1.log() - total_C1.log(), valid_CK, has_tail_C1)
        teacher_CB = _padded(self.logprobs_TK[place].to(z_CV.dtype), tail_C1, valid_CK, has_tail_C1)
        divergence_C, slope_CB = divergence(student_CB, teacher_CB)
        total_slope_C1 = slope_CB.sum(dim=1, keepdim=True)
        # of the others: p_v * (h_tail / p_tail - sum h), with p_v / p_tail = exp_v / outside
        slope_outside_C1 = slope_CB[:, -1:] / outside_C1 - total_slope_C1 / total_C1
        grad_CV = outside_CV.mul_(slope_outside_C1)
        own_CK = slope_CB[:, :-1] - top_CK.exp() * total_slope_C1
        return divergence_C, grad_CV.scatter_add_(1, ids_CK, torch.where(valid_CK, own_CK, 0.0))

    def _valid(self, place: slice) -> Tensor:
        columns_K = torch.arange(self.ids_TK.shape[1], device=self.ids_TK.device)
        return columns_K < self.counts_T[place, None]


class HeadDivergence(NamedTuple):
    loss: Tensor
    """Scalar, differentiable in hidden states, head weight and bias."""
    divergence_T: Tensor
    """Without gradient or weight."""


def head_divergence(
    head: LmHead,
    hidden_TH: Tensor,
    teacher: Teacher,
    weight_T: Tensor,
    divergence: Between,
    *,
    vocab_tokens: int | None = None,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
) -> HeadDivergence:
    """The formula above. `weight_T` has no gradient (importance weight, coefficient, 1 / tokens of the whole batch).

    `vocab_tokens`: ids that exist, where the embedding has been padded past them: rows behind are no tokens, and both
    distributions are those over the tokens alone. Raises ValueError for shapes that do not fit and for a teacher whose
    numbers cannot be."""
    rows = head.weight_VH.shape[0]
    vocab_tokens = rows if vocab_tokens is None else vocab_tokens
    if not 1 <= vocab_tokens <= rows:
        raise ValueError(f"vocab_tokens {vocab_tokens}; expected 1 to {rows}, the rows of the student's head")
    if weight_T.shape != hidden_TH.shape[:1]:
        raise ValueError(f"{tuple(weight_T.shape)} weights for {hidden_TH.shape[0]} hidden states; expected [T]")
    teacher.check(hidden_TH.shape[0], vocab_tokens)
    divergence_T = hidden_TH.new_zeros(hidden_TH.shape[0], dtype=torch.promote_types(hidden_TH.dtype, torch.float32))

    def chunk_loss(z_CV: Tensor, place: slice) -> tuple[Tensor, Tensor]:
        divergence_C, grad_CV = teacher.compare(z_CV, place, divergence)
        divergence_T[place] = divergence_C
        weight_C = weight_T[place].detach().to(grad_CV.dtype)
        return weight_C * divergence_C, grad_CV.mul_(weight_C[:, None])

    head = cut_to_vocabulary(head, vocab_tokens)
    return HeadDivergence(one_pass_loss(head, hidden_TH, chunk_loss, chunk_tokens=chunk_tokens), divergence_T)


def cut_to_vocabulary(head: LmHead, vocab_tokens: int) -> LmHead:
    """The head without rows that are no tokens."""
    if vocab_tokens == head.weight_VH.shape[0]:
        return head
    bias_V = None if head.bias_V is None else head.bias_V[:vocab_tokens]
    return LmHead(head.weight_VH[:vocab_tokens], bias_V, head.scale, head.softcap)


def _padded(top_CK: Tensor, tail_C1: Tensor, valid_CK: Tensor, has_tail_C1: Tensor) -> Tensor:
    """[C, K + 1] log-probs of the buckets, PADDING where there is none."""
    top_CK = torch.where(valid_CK, top_CK, PADDING)
    return torch.cat([top_CK, torch.where(has_tail_C1, tail_C1, PADDING)], dim=1)
