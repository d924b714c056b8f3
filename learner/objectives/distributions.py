"""Divergences between two distributions, given as log-probs of buckets: every token of the vocabulary, or the teacher's
top k tokens and one tail bucket for all others. On both sides all probability mass is in the buckets; without the tail,
a divergence could be made smaller by moving mass out of the top-k set.

A member gives the divergence and its *slope* h_b = p_b * dD/dp_b. With softmax logits z below, and v in bucket b(v),

    dD/dz_v = (p_v / p_b) * h_b - p_v * sum over all buckets of h           (a single token's bucket: p_v = p_b)

which holds for every divergence, bucketed or not, so `TopKTeacher.compare` is the same for all of them.

Buckets that are padding hold PADDING on both sides: their probability is exactly 0 and their log-ratio 0.

Legend: C positions of a chunk, T positions of a microbatch, B buckets, K tokens of the teacher's top-k set, V tokens of
the vocabulary, S draws per position; p student, q teacher.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stillhouse.learner.objectives.options import Distributions, Jsd, Mixed, MultiSample
from stillhouse.learner.objectives.sampled import CostFn
from stillhouse.models.logprobs import LmHead
from stillhouse.models.transfer import upload
from stillhouse.protocol.payloads.hidden import HiddenRows
from stillhouse.protocol.payloads.top_k import TopRows
from stillhouse.protocol.topk_codec import LOG_TAIL_FLOOR

PADDING = -1e4
"""A log-prob whose exp is 0 in float32 and float64, and whose differences are 0 and not NaN."""
LIKELIEST = 16
"""Number of the student's likeliest tokens that are sought in a teacher's set, for the metrics."""
MASS_ROUNDING = 1e-3
"""The probabilities of a top-k set may exceed a sum of 1 by this much."""


class Bucketed(NamedTuple):
    divergence_C: Tensor
    slope_CB: Tensor
    """p_b * dD/dp_b, up to a constant times p_b (which does not change the gradient)."""


DistributionFn: TypeAlias = Callable[[Tensor, Tensor, Any], Bucketed]
"""(student log-probs, teacher log-probs, the member's own options: `learner.objectives.options`), both log-probs
[C, B], each row's probabilities summing to 1 -> Bucketed. One whose options are a `MultiSample` also takes the keyword
`uniform_CS`: independent numbers in [0, 1) of these positions, one per draw."""
Between: TypeAlias = Callable[[Tensor, Tensor], Bucketed]
"""A `DistributionFn` with its options and draws bound."""


class Buckets(NamedTuple):
    """Log-probs of the same buckets on both sides."""

    student_CB: Tensor
    teacher_CB: Tensor


def forward_kl(student_CB: Tensor, teacher_CB: Tensor, options: Distributions) -> Bucketed:
    """KL(teacher || student) = sum q (log q - log p). Slope -q."""
    q_CB = teacher_CB.exp()
    divergence_C = (q_CB * (teacher_CB - student_CB)).sum(dim=1)
    return Bucketed(divergence_C, q_CB.neg_())


def reverse_kl(student_CB: Tensor, teacher_CB: Tensor, options: Distributions) -> Bucketed:
    """KL(student || teacher) = sum p (log p - log q). Slope p (log p - log q)."""
    slope_CB = student_CB.exp().mul_(student_CB - teacher_CB)
    return Bucketed(slope_CB.sum(dim=1), slope_CB)


def mixed(student_CB: Tensor, teacher_CB: Tensor, options: Mixed) -> Bucketed:
    """weight * forward KL + (1 - weight) * reverse KL."""
    forward = forward_kl(student_CB, teacher_CB, options)
    reverse = reverse_kl(student_CB, teacher_CB, options)
    weight = options.weight
    return Bucketed(
        weight * forward.divergence_C + (1.0 - weight) * reverse.divergence_C,
        forward.slope_CB.mul_(weight).add_(reverse.slope_CB, alpha=1.0 - weight),
    )


def jsd(student_CB: Tensor, teacher_CB: Tensor, options: Jsd) -> Bucketed:
    """beta KL(q || m) + (1 - beta) KL(p || m) with m = beta q + (1 - beta) p (GKD; Agarwal et al. 2024). Slope
    (1 - beta) p log(p / m). Bounded; near beta 0 it is beta times the forward KL, near 1 (1 - beta) times the reverse.
    """
    beta = options.beta
    mixture_CB = torch.logaddexp(teacher_CB + math.log(beta), student_CB + math.log1p(-beta))
    slope_CB = student_CB.exp().mul_(student_CB - mixture_CB).mul_(1.0 - beta)
    from_teacher_C = (teacher_CB.exp() * (teacher_CB - mixture_CB)).sum(dim=1)
    return Bucketed(beta * from_teacher_C + slope_CB.sum(dim=1), slope_CB)


def multi_sample(student_CB: Tensor, teacher_CB: Tensor, options: MultiSample, *, uniform_CS: Tensor) -> Bucketed:
    """Reverse KL from S tokens drawn at each position from the student: the mean of log p_b - log q_b over their
    buckets b (a token that the teacher did not send is a draw of the tail). Slope: the same, each bucket with its share
    of the draws, so that the gradient is mean (log p_b - log q_b) * grad log p_b. Value and gradient have those of
    `reverse_kl` as their expectation, and 1/S of the variance of one draw.

    No leave-one-out baseline: it takes the mean of the costs, KL, out of the variance, and brings in that of S - 1
    draws, which is more where the two distributions are near each other. Raises ValueError for a `uniform_CS` without a
    column per sample."""
    if uniform_CS.shape[1] != options.samples:
        raise ValueError(
            f"multi_sample has {uniform_CS.shape[1]} numbers per position to draw by, expected {options.samples}"
        )
    up_to_CB = student_CB.double().exp().cumsum(dim=1)
    sought_CS = uniform_CS.double() * up_to_CB[:, -1:]  # which rounding leaves a little off 1
    drawn_CS = torch.searchsorted(up_to_CB, sought_CS, right=True).clamp_(max=student_CB.shape[1] - 1)
    draws_CB = torch.zeros_like(student_CB).scatter_add_(1, drawn_CS, torch.ones_like(sought_CS).to(student_CB.dtype))
    slope_CB = draws_CB.div_(uniform_CS.shape[1]).mul_(student_CB - teacher_CB)
    return Bucketed(slope_CB.sum(dim=1), slope_CB)


def by_autograd(divergence: Callable[[Tensor, Tensor, Any], Tensor]) -> DistributionFn:
    """Make a member from a differentiable function of the same arguments that returns the divergence [C]."""

    def member(student_CB: Tensor, teacher_CB: Tensor, options: Any) -> Bucketed:
        with torch.enable_grad():
            free_CB = student_CB.detach().requires_grad_()
            divergence_C = divergence(free_CB, teacher_CB, options)
            (slope_CB,) = torch.autograd.grad(divergence_C.sum(), free_CB)
        return Bucketed(divergence_C.detach(), slope_CB)

    return member


def mean_cost(student_CB: Tensor, teacher_CB: Tensor, cost: CostFn) -> Tensor:
    """[C] sum p cost(log p, log q): the mean cost of a sampled token over the student's distribution. For k1 it is
    `reverse_kl`. A token outside of a top-k set counts with the cost of the tail as one bucket."""
    return (student_CB.exp() * cost(student_CB, teacher_CB)).sum(dim=1)


def log_tail(logprobs_CK: Tensor) -> Tensor:
    """[C] log1p(-sum p): the log-mass outside a teacher's top-k set, at least LOG_TAIL_FLOOR. In float64, because the
    sum is usually near 1."""
    mass_C = torch.logsumexp(logprobs_CK.double(), dim=1).clamp(max=0.0)
    tail_C = torch.where(mass_C > -math.log(2.0), (-torch.expm1(mass_C)).log(), torch.log1p(-mass_C.exp()))
    return tail_C.clamp(min=LOG_TAIL_FLOOR).to(logprobs_CK.dtype)


def uniforms(
    seed: int, step: int, rollout_id: str, teacher: str, offsets: npt.NDArray[np.int64], n_each: int
) -> npt.NDArray[np.float64]:
    """[R, n_each] numbers in [0, 1) for the tokens at R offsets of a rollout.

    They depend on the arguments alone; no generator keeps a state. So a resumed or replayed run draws the same numbers,
    and neither packing, nor the order of a batch, nor a second pass over it changes them. A rollout that is trained in
    parts gets the numbers of the whole."""
    if not len(offsets) or not n_each:
        return np.zeros((len(offsets), n_each))
    key = hashlib.blake2b(json.dumps([seed, step, rollout_id, teacher]).encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
    return generator.random((int(offsets.max()) + 1, n_each))[offsets]


class _Parts(NamedTuple):
    """What a gradient by the logits needs beside the buckets."""

    ids_CK: Tensor
    valid_CK: Tensor
    top_CK: Tensor
    """The student's log-probs of the set."""
    outside_CV: Tensor
    """exp of its shifted logits; 0 in the set."""
    outside_C1: Tensor
    total_C1: Tensor


@dataclass(frozen=True)
class TopKTeacher:
    """A teacher's likeliest tokens and the mass of all others. Rows may hold different numbers of tokens.

    Raises ValueError for impossible numbers: they are refused on arrival, before they can enter an average."""

    ids_TK: Tensor
    """int64, distinct within a row's first `counts_T` columns; the columns after those are ignored."""
    logprobs_TK: Tensor
    tail_T: Tensor
    """log(1 - sum of the row's probabilities); -inf only where the row holds the whole vocabulary."""
    counts_T: Tensor
    """int64, at least 1."""
    agreement_T3: Tensor = field(init=False, repr=False, compare=False)
    """float64: the teacher's probability of its set, the student's, and the share of the student's likeliest tokens
    that are in the set: as many as the set has, at most LIKELIEST. Filled in by `buckets` and `compare`."""

    def __post_init__(self) -> None:
        n_tokens, k = self.ids_TK.shape
        object.__setattr__(self, "agreement_T3", self.tail_T.new_zeros((n_tokens, 3), dtype=torch.float64))
        if self.logprobs_TK.shape != (n_tokens, k) or not self.tail_T.shape == self.counts_T.shape == (n_tokens,):
            raise ValueError(
                f"ids {tuple(self.ids_TK.shape)}, log-probs {tuple(self.logprobs_TK.shape)}, tail "
                f"{tuple(self.tail_T.shape)}, counts {tuple(self.counts_T.shape)}; expected [T, K] twice and [T] twice"
            )
        if n_tokens and not 1 <= int(self.counts_T.min()) <= int(self.counts_T.max()) <= k:
            raise ValueError(f"counts from {int(self.counts_T.min())} to {int(self.counts_T.max())}; expected 1 to {k}")
        mass_T = self._filled(self.logprobs_TK, -torch.inf).exp().sum(dim=1, dtype=torch.float64)
        # NaN and inf are in the mass, and make it no number that is small enough; -inf is not.
        lowest_T = self._filled(self.logprobs_TK, 0.0).amin(dim=1)
        fine_T = (lowest_T > -torch.inf) & (mass_T <= 1.0 + MASS_ROUNDING) & (self.tail_T <= MASS_ROUNDING)
        if not bool(fine_T.all()):
            raise ValueError(
                f"the teacher's log-probs at {int((~fine_T).sum())} positions (first: {int((~fine_T).int().argmax())}) "
                "are not finite, or their probabilities sum to more than 1; they are not used"
            )

    @classmethod
    def of(cls, rows: TopRows, vocab_tokens: int, device: torch.device) -> TopKTeacher:
        """Checked on the host, then uploaded: on a GPU each check would make the host wait. Raises ValueError."""
        arrays = (rows.ids_RK, rows.logprobs_RK, rows.tail_R, rows.counts_R)
        teacher = cls(*(torch.from_numpy(np.require(array, requirements="W")) for array in arrays))
        teacher.check(vocab_tokens)
        moved = copy.copy(teacher)  # without __post_init__
        for name in ("ids_TK", "logprobs_TK", "tail_T", "counts_T", "agreement_T3"):
            object.__setattr__(moved, name, upload(getattr(teacher, name), device))
        return moved

    def check(self, vocab_tokens: int) -> None:
        """Raises ValueError for rows that do not fit a vocabulary of `vocab_tokens`."""
        if not len(self.counts_T):
            return
        smallest, largest = (int(end) for end in self._filled(self.ids_TK, self.ids_TK[:, :1]).aminmax())
        if largest >= vocab_tokens or smallest < 0:
            raise ValueError(
                f"a teacher's token id is outside the vocabulary of {vocab_tokens} tokens: got {smallest} to "
                f"{largest}; student and teacher need the same token-to-id map"
            )
        if self._names_one_twice():
            raise ValueError("a teacher's top-k set names a token twice")
        no_tail_T = torch.isneginf(self.tail_T) & (self.counts_T < vocab_tokens)
        if bool(no_tail_T.any()):
            raise ValueError(
                f"{int(no_tail_T.sum())} positions have a tail of no mass, but not all {vocab_tokens} tokens; expected "
                f"the mass of the others, at least exp({LOG_TAIL_FLOOR:.1f})"
            )

    def compare(
        self, z_CV: Tensor, place: slice, divergence: Between, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(divergence [C], its gradient by the logits [C, V]) of the student's logits at the rows `place`.
        May overwrite `z_CV`. Raises ValueError for a temperature other than 1."""
        if temperature != 1.0:
            raise ValueError(
                f"a top-k set at temperature {temperature}: what its tail is there is not known; expected 1"
            )
        sides, parts = self._bucketed(z_CV, place)
        divergence_C, slope_CB = divergence(*sides)
        total_slope_C1 = slope_CB.sum(dim=1, keepdim=True)
        # of the others: p_v * (h_tail / p_tail - sum h), with p_v / p_tail = exp_v / outside
        slope_outside_C1 = slope_CB[:, -1:] / parts.outside_C1 - total_slope_C1 / parts.total_C1
        grad_CV = parts.outside_CV.mul_(slope_outside_C1)
        own_CK = slope_CB[:, :-1] - parts.top_CK.exp() * total_slope_C1
        return divergence_C, grad_CV.scatter_add_(1, parts.ids_CK, torch.where(parts.valid_CK, own_CK, 0.0))

    def buckets(self, z_CV: Tensor, place: slice) -> Buckets:
        """The two sides that `compare` compares. May overwrite `z_CV`."""
        return self._bucketed(z_CV, place)[0]

    def log_ratio(self, z_CV: Tensor, place: slice, token_C: Tensor) -> Tensor:
        """[C] log p - log q of the bucket that these tokens are in. May overwrite `z_CV`."""
        student_CB, teacher_CB = self.buckets(z_CV, place)
        is_it_CK = self._valid(place) & (self.ids_TK[place] == token_C[:, None])
        bucket_C1 = torch.where(is_it_CK.any(dim=1), is_it_CK.int().argmax(dim=1), is_it_CK.shape[1])[:, None]
        return (student_CB.gather(1, bucket_C1) - teacher_CB.gather(1, bucket_C1)).squeeze(1)

    def _bucketed(self, z_CV: Tensor, place: slice) -> tuple[Buckets, _Parts]:
        valid_CK, first_C1 = self._valid(place), self.ids_TK[place, :1]
        ids_CK = torch.where(valid_CK, self.ids_TK[place], first_C1)  # a repeated token does no harm below
        tail_C1 = self.tail_T[place, None].to(z_CV.dtype)
        has_tail_C1 = ~torch.isneginf(tail_C1)
        likeliest_CL = z_CV.topk(min(LIKELIEST, z_CV.shape[1]), dim=1).values
        largest_C1 = likeliest_CL[:, :1]
        top_z_CK = z_CV.gather(1, ids_CK)
        exp_CV = z_CV.sub_(largest_C1).exp_()
        total_C1 = exp_CV.sum(dim=1, keepdim=True)
        normaliser_C1 = largest_C1 + total_C1.log()
        outside_CV = exp_CV.scatter_(1, ids_CK, 0.0)  # so that the tail is a sum, and not 1 minus something near 1
        outside_C1 = outside_CV.sum(dim=1, keepdim=True).clamp(min=torch.finfo(z_CV.dtype).tiny)
        top_CK = top_z_CK - normaliser_C1
        self.agreement_T3[place] = self._agreement(top_z_CK, likeliest_CL, top_CK, valid_CK, place)
        student_CB = _padded(top_CK, outside_C1.log() - total_C1.log(), valid_CK, has_tail_C1)
        teacher_CB = _padded(self.logprobs_TK[place].to(z_CV.dtype), tail_C1, valid_CK, has_tail_C1)
        parts = _Parts(ids_CK, valid_CK, top_CK, outside_CV, outside_C1, total_C1)
        return Buckets(student_CB, teacher_CB), parts

    def _agreement(
        self, top_z_CK: Tensor, likeliest_CL: Tensor, top_CK: Tensor, valid_CK: Tensor, place: slice
    ) -> Tensor:
        """[C, 3], as in `agreement_T3`, from the student's logits and log-probs of the set, and its largest logits."""
        student_C = torch.where(valid_CK, top_CK, -torch.inf).double().exp().sum(dim=1)
        teacher_C = 1.0 - self.tail_T[place].double().exp()
        n_C = self.counts_T[place].clamp(max=likeliest_CL.shape[1])
        inside_CK = valid_CK & (top_z_CK >= likeliest_CL.gather(1, n_C[:, None] - 1))
        inside_C = inside_CK.sum(dim=1).clamp(max=n_C)  # more where logits are equal
        return torch.stack([teacher_C, student_C, inside_C.double() / n_C], dim=1)

    def _names_one_twice(self) -> bool:
        """Sorts only where ids do not ascend, as they do in payloads."""
        ascends_TK = self.ids_TK[:, 1:] > self.ids_TK[:, :-1]
        if not self._full:
            ascends_TK |= ~self._valid(slice(None))[:, 1:]
        if bool(ascends_TK.all()):
            return False
        sorted_TK = self._filled(self.ids_TK, -1).sort(dim=1).values
        return bool(((sorted_TK[:, 1:] == sorted_TK[:, :-1]) & (sorted_TK[:, 1:] >= 0)).any())

    @property
    def _full(self) -> bool:
        """No row has padding."""
        return not len(self.counts_T) or int(self.counts_T.min()) == self.ids_TK.shape[1]

    def _filled(self, values_TK: Tensor, padding: Tensor | float) -> Tensor:
        """With this in place of what is in the padding."""
        return values_TK if self._full else torch.where(self._valid(slice(None)), values_TK, padding)

    def _valid(self, place: slice) -> Tensor:
        columns_K = torch.arange(self.ids_TK.shape[1], device=self.ids_TK.device)
        return columns_K < self.counts_T[place, None]


class WholeTeacher:
    """A teacher's last hidden states and its output head: its distribution over the whole vocabulary, made a chunk at a
    time. Normalised over the tokens of the vocabulary, without padding rows of the head."""

    def __init__(self, rows: HiddenRows, head: LmHead, vocab_tokens: int, *, sampled_T: Tensor, sent_T: Tensor) -> None:
        """`sampled_T`: the token at each position; `sent_T`: the log-prob of it that the teacher sent. Raises
        ValueError for a head that does not fit."""
        n_rows, hidden_size = head.weight_VH.shape
        if rows.states_RH.shape[1] != hidden_size or n_rows < vocab_tokens:
            raise ValueError(
                f"teacher {rows.teacher!r}: hidden states of {rows.states_RH.shape[1]} numbers for an output head of "
                f"{n_rows} rows of {hidden_size}; expected the head of its own model, with a row for each of the "
                f"{vocab_tokens} tokens: models.teacher, pools.NAME.model"
            )
        if rows.head and head.identity not in (0, rows.head):
            raise ValueError(
                f"teacher {rows.teacher!r}: its hidden states belong to the output head {rows.head:016x}, the learner "
                f"has {head.identity:016x}; expected the head of the model that gave the states: models.teacher, "
                "pools.NAME.model"
            )
        device = head.weight_VH.device
        bits = upload(np.ascontiguousarray(rows.states_RH.astype(np.uint16, copy=False)).view(np.int16), device)
        self.states_TH = bits.view(torch.bfloat16)
        self.error_T = torch.zeros_like(sent_T)
        """How far its log-prob of the sampled token is from the one that was sent. Filled in by `buckets`."""
        self._head, self._vocab_tokens = head, vocab_tokens
        self._sampled_T, self._sent_T = sampled_T, sent_T

    def compare(
        self, z_CV: Tensor, place: slice, divergence: Between, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """As `TopKTeacher.compare`, with a bucket for each token, at `temperature`."""
        student_CV, teacher_CV = self.buckets(z_CV, place, temperature)
        divergence_C, slope_CV = divergence(student_CV, teacher_CV)
        total_C1 = slope_CV.sum(dim=1, keepdim=True)
        grad_CV = slope_CV.sub_(student_CV.exp_().mul_(total_C1))
        return divergence_C, grad_CV if temperature == 1.0 else grad_CV.div_(temperature)

    def buckets(self, z_CV: Tensor, place: slice, temperature: float = 1.0) -> Buckets:
        """As `TopKTeacher.buckets`, at `temperature`. Fills in `error_T`, which is at temperature 1."""
        logits_CV = self._head.logits(self.states_TH[place].to(self._head.weight_VH.dtype))
        teacher_CV = torch.log_softmax(logits_CV[:, : self._vocab_tokens].to(z_CV.dtype), dim=1)
        chosen_C = teacher_CV.gather(1, self._sampled_T[place, None]).squeeze(1)
        self.error_T[place] = (chosen_C - self._sent_T[place]).abs().to(self.error_T.dtype)
        if temperature != 1.0:
            z_CV, teacher_CV = z_CV / temperature, torch.log_softmax(teacher_CV / temperature, dim=1)
        return Buckets(torch.log_softmax(z_CV, dim=1), teacher_CV)


def _padded(top_CK: Tensor, tail_C1: Tensor, valid_CK: Tensor, has_tail_C1: Tensor) -> Tensor:
    """[C, K + 1] log-probs of the buckets, PADDING where there is none."""
    top_CK = torch.where(valid_CK, top_CK, PADDING)
    return torch.cat([top_CK, torch.where(has_tail_C1, tail_C1, PADDING)], dim=1)
