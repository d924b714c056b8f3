"""What teachers' distributions add to the loss of a step: divergences from the student's, or the mean of a cost over
the student's. Both are made from the logits of a chunk, which are there anyway.

Legend: N trained tokens of a microbatch, C those of a chunk, V rows of the head, M teachers, R rows of one teacher, S
draws per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.batch import Microbatch, TrainItem, UnreadableScores
from learner.objectives.distributions import Bucketed, DistributionFn, TopKTeacher, WholeTeacher, mean_cost, uniforms
from learner.objectives.importance import context_weights
from learner.objectives.losses import TokenInputs
from learner.objectives.options import Distributions, MultiSample
from learner.objectives.sampled import CostFn
from learner.payloads import PayloadError, Rows, TopRows, read_payloads
from learner.step.teacher_heads import HeadOf, no_heads
from models.transfer import upload


class Ahead(NamedTuple):
    """What is known before the pass with a gradient, where a weight depends on whole rollouts."""

    student_N: Tensor
    """s, without gradient."""
    inputs: TokenInputs
    own_N: slice | Tensor = slice(None)
    """Which of these tokens are in the microbatch."""


class ChunkPart(NamedTuple):
    """One teacher's divergence at the positions `rows_R` of a chunk. Its columns are the vocabulary, without
    padding."""

    rows_R: Tensor
    divergence_R: Tensor
    weight_R: Tensor
    grad_RV: Tensor
    """Gradient of weight * divergence by the logits."""


class PayloadSums(NamedTuple):
    """Figures of the payloads of a chunk or of a microbatch, for the metrics."""

    error: Tensor
    """Sum over the scores from hidden states: how far the teacher's log-prob of the sampled token, computed from its
    hidden state, is from the one that it sent."""
    hidden_scores: int
    """Number of its terms: pairs of a token and a teacher that sent its hidden state."""
    sets_3: Tensor
    """Sums of `TopKTeacher.agreement_T3`."""
    set_scores: int
    """Number of their terms: pairs of a token and a teacher that sent a top-k set."""

    @classmethod
    def zero(cls, device: torch.device) -> PayloadSums:
        zeros = torch.zeros(4, dtype=torch.float64, device=device)
        return cls(zeros[0], 0, zeros[1:], 0)

    def plus(self, other: PayloadSums) -> PayloadSums:
        return PayloadSums(
            self.error + other.error,
            self.hidden_scores + other.hidden_scores,
            self.sets_3 + other.sets_3,
            self.set_scores + other.set_scores,
        )


class ChunkDivergences(NamedTuple):
    parts: list[ChunkPart]
    sums: PayloadSums | None = None


ChunkParts: TypeAlias = Callable[[Tensor, slice], ChunkDivergences]
"""(logits of a chunk, its slice of N) -> parts to add. Must not change the logits."""


class MeanCosts(NamedTuple):
    mean_MC: Tensor
    """Mean cost of each teacher; 0 where it has no score."""
    sums: PayloadSums


ChunkMeans: TypeAlias = Callable[[Tensor, slice], MeanCosts]
"""(logits of a chunk, its slice of N) -> the mean costs there. Must not change the logits."""


class Between:
    """What is computed from teachers' distributions. This base class is the case without any."""

    @property
    def needs_logprobs(self) -> bool:
        """True if the weights depend on the log-probs of the whole rollout."""
        return False

    def read(self, items: Sequence[TrainItem], step: int) -> Sequence[TrainItem]:
        """Decode the items' payloads, and draw the random numbers of `step`. Raises UnreadableScores."""
        return items

    def means(self, inputs: TokenInputs, microbatch: Microbatch) -> ChunkMeans | None:
        """The baselines of the costs of sampled tokens, prepared for one microbatch; None if there are none."""
        return None

    def prepare(self, inputs: TokenInputs, microbatch: Microbatch, ahead: Ahead | None, divisor: int) -> ChunkParts:
        """Prepare one microbatch. `ahead`: if `needs_logprobs`."""
        return lambda z_CV, place: ChunkDivergences([])


class _TeacherRows(NamedTuple):
    """One teacher's rows in a chunk."""

    m: int
    teacher: TopKTeacher | WholeTeacher
    rows_R: Tensor
    """Their positions in the microbatch."""
    own: slice
    """Which rows of the teacher they are."""


_ChunkRows: TypeAlias = Callable[[slice], Iterator[_TeacherRows]]


@dataclass(frozen=True, kw_only=True)
class _WithPayloads(Between):
    """Reads what teachers send beside their log-probs."""

    vocab_tokens: int
    """Number of token ids. Rows of the head past them are padding, and in neither distribution."""
    head_of: HeadOf = no_heads

    def read(self, items: Sequence[TrainItem], step: int) -> Sequence[TrainItem]:
        ready: list[TrainItem] = []
        for train_item in items:
            trained = np.flatnonzero(train_item.train_mask_L)
            if not len(trained):
                ready.append(train_item)
                continue
            try:
                top = read_payloads(train_item.item, train_item.payloads, trained, self.vocab_tokens)
            except PayloadError as error:
                rollout_id = train_item.item.rollout_id
                raise UnreadableScores(f"rollout {rollout_id!r}: {error}", [rollout_id]) from error
            ready.append(replace(train_item, top=self._with_draws(top, step, train_item, trained)))
        return ready

    def _with_draws(
        self, top: dict[str, Rows], step: int, train_item: TrainItem, trained: npt.NDArray[np.int64]
    ) -> dict[str, Rows]:
        return top

    def _rows(self, microbatch: Microbatch, device: torch.device) -> _ChunkRows:
        # Row ranges are computed on the host: reading them from a GPU would make the host wait for each chunk.
        places_M = [np.flatnonzero(routed_N) for routed_N in microbatch.routed_MN]
        rows_M = [upload(places_R, device) for places_R in places_M]
        teachers = [self._teacher(microbatch, m, places_R, device) for m, places_R in enumerate(places_M)]

        def of(place: slice) -> Iterator[_TeacherRows]:
            for m, (teacher, places_R, rows_R) in enumerate(zip(teachers, places_M, rows_M, strict=True)):
                first, last = (int(np.searchsorted(places_R, end)) for end in (place.start, place.stop))
                if first < last:
                    yield _TeacherRows(m, teacher, rows_R[first:last], slice(first, last))

        return of

    def _teacher(
        self, microbatch: Microbatch, m: int, places_R: npt.NDArray[np.int64], device: torch.device
    ) -> TopKTeacher | WholeTeacher:
        """The distributions of teacher `m` at its tokens."""
        rows = microbatch.top[m]
        if isinstance(rows, TopRows):
            return TopKTeacher.of(rows, self.vocab_tokens, device)
        sampled_R = upload(microbatch.target_N[places_R], device)
        sent_R = upload(microbatch.teacher_MN[m, places_R], device)
        return WholeTeacher(rows, self.head_of(rows.teacher), self.vocab_tokens, sampled_T=sampled_R, sent_T=sent_R)

    def _logits(self, z_CV: Tensor, place: slice, rows_R: Tensor) -> Tensor:
        """A copy of the logits at some positions, without padding."""
        return z_CV.index_select(0, rows_R - place.start)[:, : self.vocab_tokens]


def _sums(teacher: TopKTeacher | WholeTeacher, own: slice) -> PayloadSums:
    """`own`: the teacher's rows, which have been compared already."""
    n = own.stop - own.start
    if isinstance(teacher, WholeTeacher):
        error_T = teacher.error_T
        return PayloadSums.zero(error_T.device)._replace(error=error_T[own].double().sum(), hidden_scores=n)
    agreement_T3 = teacher.agreement_T3
    return PayloadSums.zero(agreement_T3.device)._replace(sets_3=agreement_T3[own].sum(dim=0), set_scores=n)


@dataclass(frozen=True, kw_only=True)
class BetweenDistributions(_WithPayloads):
    """sum over the token's teachers of coef * share * w * D / divisor. D depends on the context alone, so w
    corrects the context (`learner.objectives.importance.context_weights`) and not the token."""

    divergence: DistributionFn
    options: Distributions
    seed: int

    @property
    def needs_logprobs(self) -> bool:
        return self.options.context_cap > 0

    @property
    def samples(self) -> int:
        """S; 0 for a divergence without draws."""
        return self.options.samples if isinstance(self.options, MultiSample) else 0

    def _with_draws(
        self, top: dict[str, Rows], step: int, train_item: TrainItem, trained: npt.NDArray[np.int64]
    ) -> dict[str, Rows]:
        if not self.samples:
            return top
        rollout_id = train_item.item.rollout_id

        def drawn(teacher: str) -> npt.NDArray[np.float64]:
            return uniforms(self.seed, step, rollout_id, teacher, trained, self.samples)

        return {teacher: replace(rows, uniform_RS=drawn(teacher)) for teacher, rows in top.items()}

    def prepare(self, inputs: TokenInputs, microbatch: Microbatch, ahead: Ahead | None, divisor: int) -> ChunkParts:
        device = inputs.behaviour_N.device
        weight_N = inputs.share_N.double() / divisor
        if inputs.divergence_weight_N is not None:
            weight_N = weight_N * inputs.divergence_weight_N.double()
        if self.needs_logprobs and ahead is not None:
            context_N = context_weights(ahead.inputs.ratios(ahead.student_N), self.options.context_cap)
            weight_N = weight_N * context_N[ahead.own_N].double()
        uniforms_M = [upload(rows.uniform_RS, device) for rows in microbatch.top]
        rows = self._rows(microbatch, device)

        def parts(z_CV: Tensor, place: slice) -> ChunkDivergences:
            found, sums = list[ChunkPart](), PayloadSums.zero(device)
            for m, teacher, rows_R, own in rows(place):
                student_RV, between = self._logits(z_CV, place, rows_R), self._given(uniforms_M[m][own])
                divergence_R, grad_RV = teacher.compare(student_RV, own, between)
                sums = sums.plus(_sums(teacher, own))
                weight_R = (inputs.coef_M[m] * weight_N[rows_R]).to(z_CV.dtype)
                grad_RV.mul_(weight_R[:, None])
                found.append(ChunkPart(rows_R - place.start, divergence_R, weight_R, grad_RV))
            return ChunkDivergences(found, sums)

        return parts

    def _given(self, uniform_CS: Tensor) -> Callable[[Tensor, Tensor], Bucketed]:
        """The divergence with its options and draws bound."""
        draws: dict[str, Tensor] = {"uniform_CS": uniform_CS} if self.samples else {}
        return partial(self.divergence, options=self.options, **draws)


@dataclass(frozen=True, kw_only=True)
class ExpectedCosts(_WithPayloads):
    """The baseline of a cost of sampled tokens: its mean over the student's distribution
    (`learner.objectives.distributions.mean_cost`)."""

    cost: CostFn

    def means(self, inputs: TokenInputs, microbatch: Microbatch) -> ChunkMeans | None:
        rows = self._rows(microbatch, inputs.behaviour_N.device)

        def means(z_CV: Tensor, place: slice) -> MeanCosts:
            mean_MC = z_CV.new_zeros((len(inputs.coef_M), z_CV.shape[0]))
            sums = PayloadSums.zero(z_CV.device)
            for m, teacher, rows_R, own in rows(place):
                mean_R = mean_cost(*teacher.buckets(self._logits(z_CV, place, rows_R), own), self.cost)
                sums = sums.plus(_sums(teacher, own))
                mean_MC[m].index_copy_(0, rows_R - place.start, mean_R)
            return MeanCosts(mean_MC, sums)

        return means
