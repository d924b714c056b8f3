"""What teachers' distributions add to the loss of a step: divergences from the student's, or the mean of a cost over
the student's, by the divergence of each teacher's pool. Both are made from the logits of a chunk, which are there
anyway.

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

from stillhouse.learner.batch import Microbatch, TrainItem, UnreadableScores
from stillhouse.learner.objectives.distributions import Bucketed, TopKTeacher, WholeTeacher, mean_cost, uniforms
from stillhouse.learner.objectives.divergences import Compared, Divergences
from stillhouse.learner.objectives.importance import context_weights
from stillhouse.learner.objectives.losses import TokenInputs
from stillhouse.learner.objectives.options import Distributions, MultiSample
from stillhouse.learner.payloads import aligned_teachers, expert_rows, kept_rows, read_payloads
from stillhouse.learner.step.teacher_heads import HeadOf, no_heads
from stillhouse.models.transfer import upload
from stillhouse.protocol.messages import ExpertShape
from stillhouse.protocol.payloads.hidden import HiddenRows
from stillhouse.protocol.payloads.kind import PayloadError
from stillhouse.protocol.payloads.top_k import TopRows


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

    m: int
    rows_R: Tensor
    divergence_R: Tensor
    weight_R: Tensor
    grad_RV: Tensor
    """Gradient of weight * divergence by the logits."""


class HiddenErrors(NamedTuple):
    """How far one teacher's log-prob of the sampled token, computed from its hidden state, is from the one that it
    sent, nats, at the positions `rows_R`."""

    m: int
    rows_R: Tensor
    error_R: Tensor


class PayloadSums(NamedTuple):
    """Figures of the payloads of a chunk or of a microbatch, for the metrics."""

    errors: tuple[HiddenErrors, ...]
    hidden_scores: int
    """Pairs of a token and a teacher that sent its hidden state."""
    sets_3: Tensor
    """Sums of `TopKTeacher.agreement_T3`."""
    set_scores: int
    """Number of their terms: pairs of a token and a teacher that sent a top-k set."""

    @classmethod
    def zero(cls, device: torch.device) -> PayloadSums:
        return cls((), 0, torch.zeros(3, dtype=torch.float64, device=device), 0)

    def plus(self, other: PayloadSums) -> PayloadSums:
        return PayloadSums(
            self.errors + other.errors,
            self.hidden_scores + other.hidden_scores,
            self.sets_3 + other.sets_3,
            self.set_scores + other.set_scores,
        )


class ChunkDivergences(NamedTuple):
    parts: list[ChunkPart]
    sums: PayloadSums | None = None


ChunkParts: TypeAlias = Callable[[Tensor, slice], ChunkDivergences]
"""(logits of a chunk, its slice of N) -> parts to add. Must not change the logits."""


class Known(NamedTuple):
    """Beside the log-prob of the sampled token, what its cost depends on."""

    mean_MC: Tensor | None
    """Mean cost of each teacher, 0 where it has no score; None: no cost has a baseline."""
    first_MC: Tensor | None
    """`TokenInputs.first_MN`; None: nothing is compared with a teacher of another tokenizer."""
    sums: PayloadSums


ChunkKnown: TypeAlias = Callable[[Tensor, slice], Known]
"""(logits of a chunk, its slice of N) -> Known. Must not change the logits."""


class _TeacherRows(NamedTuple):
    m: int
    teacher: TopKTeacher | WholeTeacher
    rows_R: Tensor
    """Their positions in the microbatch."""
    own: slice
    """Which rows of the teacher they are."""


_ChunkRows: TypeAlias = Callable[[slice], Iterator[_TeacherRows]]


@dataclass(frozen=True, kw_only=True)
class Between:
    """Reads what teachers send beside their log-probs, where their divergence needs it, and what actors do.

    Of teachers whose divergence is between distributions, the loss has

        sum over the token's teachers of coef * share * w * D / divisor

    D depends on the context alone, so w corrects the context (`learner.objectives.importance.context_weights`) and not
    the token. With another tokenizer, D is at the first token of a span, and a cost of the span has the rest
    (docs/objectives.md). Others may have a baseline: the mean of their cost over the student's distribution
    (`learner.objectives.distributions.mean_cost`)."""

    divergences: Divergences
    vocab_tokens: int
    """Number of token ids. Rows of the head past them are padding, and in neither distribution."""
    seed: int
    head_of: HeadOf = no_heads
    experts: ExpertShape | None = None
    """The routers that are given the engine's choices; None: all choose freely."""

    @property
    def needs_logprobs(self) -> bool:
        """True if the weights depend on the log-probs of the whole rollout."""
        return any(one.between is not None and one.between.options.context_cap > 0 for one in self.divergences.every)

    def read(self, items: Sequence[TrainItem], step: int) -> Sequence[TrainItem]:
        """Decode the items' payloads that are needed, and draw the random numbers of `step`. Raises
        UnreadableScores."""
        return [self._read(train_item, step) for train_item in items]

    def _read(self, train_item: TrainItem, step: int) -> TrainItem:
        item, trained = train_item.item, np.flatnonzero(train_item.train_mask_L)
        teachers = {name for name in item.teachers if self.divergences.of(name).reads_payloads}
        teachers |= aligned_teachers(item, train_item.payloads)
        if not (teachers or item.top_k or self.experts) or not len(trained):
            return train_item
        try:
            kept = kept_rows(item, train_item.payloads, train_item.tokens_L, trained, self.vocab_tokens)
            top = read_payloads(item, train_item.payloads, trained, self.vocab_tokens, teachers=teachers)
            experts = None if self.experts is None else expert_rows(item, train_item.payloads, self.experts)
        except PayloadError as error:
            raise UnreadableScores(f"rollout {item.rollout_id!r}: {error}", [item.rollout_id]) from error
        for name in teachers:
            if n := _draws(self.divergences.of(name).between):
                drawn = uniforms(self.seed, step, item.rollout_id, name, trained, n)
                top[name] = replace(top[name], uniform_RS=drawn)
        return replace(train_item, top=top, kept=kept, experts=experts)

    def known(self, inputs: TokenInputs, microbatch: Microbatch) -> ChunkKnown | None:
        """What costs of sampled tokens depend on, prepared for one microbatch; None if on nothing."""
        own = [self.divergences.of(name) for name in inputs.teachers]
        with_mean = [m for m, one in enumerate(own) if one.has_baseline]
        # the same on all ranks that divide a microbatch
        rest_MN = (microbatch if microbatch.shared is None else microbatch.shared.whole).rest_MN
        with_first = [m for m, one in enumerate(own) if rest_MN is not None and one.between and rest_MN[m].any()]
        if not with_mean and not with_first:
            return None
        rows = self._rows(microbatch, inputs, with_mean + with_first)
        target_N = upload(microbatch.target_N, inputs.behaviour_N.device)

        def known(z_CV: Tensor, place: slice) -> Known:
            mean_MC, first_MC = (z_CV.new_zeros((len(inputs.coef_M), z_CV.shape[0])) for _ in range(2))
            sums = PayloadSums.zero(z_CV.device)
            for m, teacher, rows_R, part in rows(place):
                logits_RV = self._logits(z_CV, place, rows_R)
                if m in with_mean:
                    mean_R = mean_cost(*teacher.buckets(logits_RV, part), own[m].cost)
                    sums = sums.plus(_sums(m, teacher, rows_R, part))
                    mean_MC[m].index_copy_(0, rows_R - place.start, mean_R)
                elif isinstance(teacher, TopKTeacher):
                    first_R = teacher.log_ratio(logits_RV, part, target_N[rows_R])
                    first_MC[m].index_copy_(0, rows_R - place.start, first_R)
            return Known(mean_MC if with_mean else None, first_MC if with_first else None, sums)

        return known

    def prepare(self, inputs: TokenInputs, microbatch: Microbatch, ahead: Ahead | None, divisor: int) -> ChunkParts:
        """Prepare the divergences between distributions for one microbatch. `ahead`: if `needs_logprobs`."""
        between = [self.divergences.of(name).between for name in inputs.teachers]
        compared = {m: one for m, one in enumerate(between) if one is not None}
        if not compared:
            return lambda z_CV, place: ChunkDivergences([])
        device = inputs.behaviour_N.device
        weights = {m: _weights(inputs, ahead, microbatch, divisor, one.options) for m, one in compared.items()}
        uniforms_M = {m: upload(microbatch.top[m].uniform_RS, device) for m in compared}
        rows = self._rows(microbatch, inputs, list(compared))

        def parts(z_CV: Tensor, place: slice) -> ChunkDivergences:
            found, sums = list[ChunkPart](), PayloadSums.zero(device)
            for m, teacher, rows_R, own in rows(place):
                student_RV, given = self._logits(z_CV, place, rows_R), _given(compared[m], uniforms_M[m][own])
                divergence_R, grad_RV = teacher.compare(student_RV, own, given, compared[m].options.temperature)
                sums = sums.plus(_sums(m, teacher, rows_R, own))
                weight_R = (inputs.coef_M[m] * weights[m][rows_R]).to(z_CV.dtype)
                grad_RV.mul_(weight_R[:, None])
                found.append(ChunkPart(m, rows_R - place.start, divergence_R, weight_R, grad_RV))
            return ChunkDivergences(found, sums)

        return parts

    def _rows(self, microbatch: Microbatch, inputs: TokenInputs, chosen: Sequence[int]) -> _ChunkRows:
        # Row ranges are computed on the host: reading them from a GPU would make the host wait for each chunk.
        device = inputs.behaviour_N.device
        places = {m: microbatch.rows_at(m) for m in chosen}
        of_teacher = {
            m: (self._teacher(microbatch, m, at_R, device), upload(at_R, device)) for m, at_R in places.items()
        }

        def of(place: slice) -> Iterator[_TeacherRows]:
            for m, (teacher, rows_R) in of_teacher.items():
                first, last = (int(np.searchsorted(places[m], end)) for end in (place.start, place.stop))
                if first < last:
                    yield _TeacherRows(m, teacher, rows_R[first:last], slice(first, last))

        return of

    def _teacher(
        self, microbatch: Microbatch, m: int, places_R: npt.NDArray[np.int64], device: torch.device
    ) -> TopKTeacher | WholeTeacher:
        rows = microbatch.top[m]
        match rows:
            case TopRows():
                return TopKTeacher.of(rows, self.vocab_tokens, device)
            case HiddenRows():
                head, sampled_R = self.head_of(rows.teacher), upload(microbatch.target_N[places_R], device)
                sent_R = upload(microbatch.teacher_MN[m, places_R], device)
                return WholeTeacher(rows, head, self.vocab_tokens, sampled_T=sampled_R, sent_T=sent_R)
            case _:
                raise TypeError(f"no divergence compares {type(rows).__name__}")

    def _logits(self, z_CV: Tensor, place: slice, rows_R: Tensor) -> Tensor:
        """A copy of the logits at some positions, without padding."""
        return z_CV.index_select(0, rows_R - place.start)[:, : self.vocab_tokens]


def _weights(
    inputs: TokenInputs, ahead: Ahead | None, microbatch: Microbatch, divisor: int, options: Distributions
) -> Tensor:
    """[N] float64: share * w / divisor."""
    weight_N = inputs.share_N.double() / divisor
    if inputs.divergence_weight_N is not None:
        weight_N = weight_N * inputs.divergence_weight_N.double()
    if options.context_cap > 0 and ahead is not None:
        whole = microbatch if microbatch.shared is None else microbatch.shared.whole
        before_N = upload(whole.before_N, inputs.behaviour_N.device)
        context_N = context_weights(ahead.inputs.ratios(ahead.student_N), before_N, options.context_cap)
        weight_N = weight_N * context_N[ahead.own_N].double()
    return weight_N


def _draws(compared: Compared | None) -> int:
    """S; 0 for a divergence without draws."""
    return compared.options.samples if compared is not None and isinstance(compared.options, MultiSample) else 0


def _given(compared: Compared, uniform_CS: Tensor) -> Callable[[Tensor, Tensor], Bucketed]:
    """The divergence with its options and draws bound."""
    draws: dict[str, Tensor] = {"uniform_CS": uniform_CS} if _draws(compared) else {}
    return partial(compared.function, options=compared.options, **draws)


def _sums(m: int, teacher: TopKTeacher | WholeTeacher, rows_R: Tensor, own: slice) -> PayloadSums:
    """`own`: the teacher's rows, which have been compared already."""
    n = own.stop - own.start
    if isinstance(teacher, WholeTeacher):
        errors = (HiddenErrors(m, rows_R, teacher.error_T[own]),)
        return PayloadSums.zero(rows_R.device)._replace(errors=errors, hidden_scores=n)
    agreement_T3 = teacher.agreement_T3
    return PayloadSums.zero(agreement_T3.device)._replace(sets_3=agreement_T3[own].sum(dim=0), set_scores=n)
