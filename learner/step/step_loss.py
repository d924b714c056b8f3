"""The loss of one microbatch and its gradients, in one pass over chunks of its trained tokens (models.one_pass).

    z     the student's logits, C positions at a time
    s     log-prob of the sampled token     -> slope = d loss / d s       learner.objectives.losses
    D_m   between softmax(z) and teacher m  -> its gradient by z          learner.objectives.distributions

    loss  = sum_t slope_t * s_t + sum_m weight_mt * D_mt       dz = slope (onehot - softmax(z)) + sum_m weight_m dD_m/dz

`make_step_loss` picks the parts once, from the configuration. If the weight of a token depends on that token alone, it
is computed with its logits; if it depends on the whole rollout, a pass without gradient comes first. No [N, V] tensor
ever exists.

Legend: N trained tokens of a microbatch, C those of a chunk, V rows of the head, M teachers, R rows of one teacher, S
draws per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.batch import Microbatch, TrainItem, UnreadableScores
from learner.objectives.config import ObjectiveConfig
from learner.objectives.distributions import Bucketed, DistributionFn, TopKTeacher, WholeTeacher, uniforms
from learner.objectives.importance import TOKEN_LOCAL, context_weights
from learner.objectives.losses import LossTerms, Objective, TokenInputs, make_objective, token_loss
from learner.objectives.options import Distributions, MultiSample
from learner.objectives.registry import DIVERGENCE
from learner.payloads import PayloadError, Rows, TopRows, read_payloads
from learner.step.teacher_heads import HeadOf, no_heads
from models.logprobs import LmHead, token_scores
from models.one_pass import one_pass_loss
from models.transfer import upload


class Rollouts(NamedTuple):
    """The trained tokens of whole rollouts, where this rank has some of them: weights may depend on the others."""

    inputs: TokenInputs
    own_N: Tensor
    """int64: which of them are this rank's."""
    gather: Callable[[Tensor], Tensor]
    """Numbers of all of them, from those of each rank. All ranks that have some must call it at the same time."""


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
    error_R: Tensor | None = None
    """How far the teacher's log-probs of the sampled tokens, computed from its hidden states, are from those that it
    sent; None for a teacher that sent top-k sets."""


ChunkParts: TypeAlias = Callable[[Tensor, slice], list[ChunkPart]]
"""(logits of a chunk, its slice of N) -> parts to add. Must not change the logits."""


class Between:
    """Divergences between distributions. This base class is the case without any."""

    @property
    def needs_logprobs(self) -> bool:
        """True if the weights depend on the log-probs of the whole rollout."""
        return False

    def read(self, items: Sequence[TrainItem], step: int) -> Sequence[TrainItem]:
        """Decode the items' payloads, and draw the random numbers of `step`. Raises UnreadableScores."""
        return items

    def prepare(self, inputs: TokenInputs, microbatch: Microbatch, ahead: Ahead | None, divisor: int) -> ChunkParts:
        """Prepare one microbatch. `ahead`: if `needs_logprobs`."""
        return lambda z_CV, place: []


@dataclass(frozen=True)
class BetweenDistributions(Between):
    """sum over the token's teachers of coef * share * w * D / divisor. D depends on the context alone, so w
    corrects the context (`learner.objectives.importance.context_weights`) and not the token."""

    divergence: DistributionFn
    options: Distributions
    vocab_tokens: int
    """Number of token ids. Rows of the head past them are padding, and in neither distribution."""
    seed: int
    head_of: HeadOf = no_heads

    @property
    def needs_logprobs(self) -> bool:
        return self.options.context_cap > 0

    @property
    def samples(self) -> int:
        """S; 0 for a divergence without draws."""
        return self.options.samples if isinstance(self.options, MultiSample) else 0

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
            if self.samples:
                top = {name: self._with_draws(rows, step, train_item, name, trained) for name, rows in top.items()}
            ready.append(replace(train_item, top=top))
        return ready

    def _with_draws(
        self, rows: Rows, step: int, train_item: TrainItem, teacher: str, trained: npt.NDArray[np.int64]
    ) -> Rows:
        rollout_id = train_item.item.rollout_id
        return replace(rows, uniform_RS=uniforms(self.seed, step, rollout_id, teacher, trained, self.samples))

    def prepare(self, inputs: TokenInputs, microbatch: Microbatch, ahead: Ahead | None, divisor: int) -> ChunkParts:
        device = inputs.behaviour_N.device
        weight_N = inputs.share_N.double() / divisor
        if inputs.divergence_weight_N is not None:
            weight_N = weight_N * inputs.divergence_weight_N.double()
        if self.needs_logprobs and ahead is not None:
            context_N = context_weights(ahead.inputs.ratios(ahead.student_N), self.options.context_cap)
            weight_N = weight_N * context_N[ahead.own_N].double()
        uniforms_M = [upload(rows.uniform_RS, device) for rows in microbatch.top]
        # Row ranges are computed on the host: reading them from a GPU would make the host wait for each chunk.
        places_M = [np.flatnonzero(routed_N) for routed_N in microbatch.routed_MN]
        rows_M = [upload(places_R, device) for places_R in places_M]
        teachers = [self._teacher(microbatch, m, places_R, device) for m, places_R in enumerate(places_M)]

        def parts(z_CV: Tensor, place: slice) -> list[ChunkPart]:
            found: list[ChunkPart] = []
            each = zip(teachers, uniforms_M, places_M, rows_M, inputs.coef_M, strict=True)
            for teacher, uniform_RS, places_R, rows_R, coef in each:
                first, last = (int(np.searchsorted(places_R, end)) for end in (place.start, place.stop))
                if first == last:
                    continue
                own_R = rows_R[first:last]
                student_RV = z_CV.index_select(0, own_R - place.start)[:, : self.vocab_tokens]
                between = self._given(uniform_RS[first:last])
                divergence_R, grad_RV = teacher.compare(student_RV, slice(first, last), between)
                weight_R = (coef * weight_N[own_R]).to(z_CV.dtype)
                grad_RV.mul_(weight_R[:, None])
                error_R = teacher.error_T[first:last] if isinstance(teacher, WholeTeacher) else None
                found.append(ChunkPart(own_R - place.start, divergence_R, weight_R, grad_RV, error_R))
            return found

        return parts

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

    def _given(self, uniform_CS: Tensor) -> Callable[[Tensor, Tensor], Bucketed]:
        """The divergence with its options and draws bound."""
        draws: dict[str, Tensor] = {"uniform_CS": uniform_CS} if self.samples else {}
        return partial(self.divergence, options=self.options, **draws)


class MicrobatchTerms(NamedTuple):
    """`loss` is differentiable in hidden states and head; the rest is for the metrics."""

    loss: Tensor
    terms: LossTerms
    entropy_N: Tensor
    """Entropy of the student at each position, nats, over all rows of the head."""
    hidden_error: Tensor
    """Sum of `ChunkPart.error_R`."""
    hidden_scores: int
    """Number of its terms: pairs of a token and a teacher that sent its hidden state."""


class StepLoss:
    """The loss of an objective: sampled tokens and divergences between distributions in one pass."""

    def __init__(self, objective: Objective, between: Between, *, chunk_tokens: int) -> None:
        self.objective = objective
        self.read = between.read
        self._between = between
        self._chunk_tokens = chunk_tokens
        ahead = between.needs_logprobs or objective.importance not in TOKEN_LOCAL
        self._logprobs: Callable[[LmHead, Tensor, Tensor], Tensor | None] = self._made_ahead if ahead else _not_made

    def __call__(
        self,
        head: LmHead,
        hidden_NH: Tensor,
        targets_N: Tensor,
        inputs: TokenInputs,
        microbatch: Microbatch,
        divisor: int,
        rollouts: Rollouts | None = None,
    ) -> MicrobatchTerms:
        """`divisor` is that of the whole batch. `rollouts`: if the microbatch has parts of rollouts."""
        student_N = self._logprobs(head, hidden_NH, targets_N)
        ahead = None
        if student_N is not None:
            ahead = Ahead(student_N, inputs)
            if rollouts is not None:
                ahead = Ahead(rollouts.gather(student_N), rollouts.inputs, rollouts.own_N)
        parts = self._between.prepare(inputs, microbatch, ahead, divisor)
        whole = None
        if ahead is not None:
            whole = token_loss(ahead.student_N, ahead.inputs, self.objective, divisor).at(ahead.own_N)
        chunks = _Chunks(targets_N, inputs, self.objective, divisor, whole, parts)
        loss = one_pass_loss(head, hidden_NH, chunks, chunk_tokens=self._chunk_tokens)
        error_R = torch.cat([inputs.behaviour_N.new_zeros(0), *chunks.hidden_errors])
        entropy_N = torch.cat(chunks.entropies)
        return MicrobatchTerms(loss, LossTerms.joined(chunks.terms), entropy_N, error_R.sum(), len(error_R))

    def _made_ahead(self, head: LmHead, hidden_NH: Tensor, targets_N: Tensor) -> Tensor | None:
        with torch.no_grad():
            return token_scores(head, hidden_NH, targets_N, chunk_tokens=self._chunk_tokens).logprobs_T


def make_step_loss(
    config: ObjectiveConfig,
    *,
    max_new_tokens: int,
    chunk_tokens: int,
    vocab_tokens: int,
    rows: int,
    seed: int,
    head_of: HeadOf = no_heads,
) -> StepLoss:
    """`rows`: of the student's head. `seed`: the run's. `head_of`: for teachers that send hidden states. Raises
    ValueError for names that cannot be loaded, and for a divergence between distributions if the head has fewer rows
    than there are tokens."""
    objective = make_objective(config, max_new_tokens=max_new_tokens)
    between = Between()
    if config.needs_top_k:
        if not 1 <= vocab_tokens <= rows:
            raise ValueError(f"{vocab_tokens} tokens in the vocabulary, {rows} rows in the student's head")
        divergence, options, _ = DIVERGENCE.load(config.divergence)
        between = BetweenDistributions(divergence, cast(Distributions, options), vocab_tokens, seed, head_of)
    return StepLoss(objective, between, chunk_tokens=chunk_tokens)


def _not_made(head: LmHead, hidden_NH: Tensor, targets_N: Tensor) -> Tensor | None:
    return None


@dataclass(slots=True)
class _Chunks:
    """The chunk loss for `one_pass_loss`. Keeps terms and entropies for the metrics."""

    targets_N: Tensor
    inputs: TokenInputs
    objective: Objective
    divisor: int
    whole: LossTerms | None
    """Terms of the whole microbatch, if the log-probs are already known."""
    parts: ChunkParts
    terms: list[LossTerms] = field(default_factory=list[LossTerms])
    entropies: list[Tensor] = field(default_factory=list[Tensor])
    hidden_errors: list[Tensor] = field(default_factory=list[Tensor])

    def __call__(self, z_CV: Tensor, place: slice) -> tuple[Tensor, Tensor]:
        parts = self.parts(z_CV, place)
        targets_C1 = self.targets_N[place, None]
        z_CV.sub_(z_CV.amax(dim=1, keepdim=True))
        chosen_C1 = z_CV.gather(1, targets_C1)
        exp_CV = z_CV.exp()
        total_C1 = exp_CV.sum(dim=1, keepdim=True)
        log_total_C1 = total_C1.log()
        entropy_C1 = log_total_C1 - z_CV.mul_(exp_CV).sum(dim=1, keepdim=True) / total_C1
        if self.whole is None:
            logprobs_C = (chosen_C1 - log_total_C1).squeeze(1)
            terms = token_loss(logprobs_C, self.inputs.at(place), self.objective, self.divisor)
        else:
            terms = self.whole.at(place)
        slope_C1 = terms.slope_N.to(exp_CV.dtype)[:, None]
        loss_C = terms.slope_N * terms.student_N
        grad_CV = exp_CV.mul_(-slope_C1 / total_C1).scatter_add_(1, targets_C1, slope_C1)
        divergence_C = terms.divergence_N.clone()
        for part in parts:
            loss_C = loss_C.index_add(0, part.rows_R, (part.weight_R * part.divergence_R).to(loss_C.dtype))
            divergence_C.index_add_(0, part.rows_R, part.divergence_R.to(divergence_C.dtype))
            grad_CV[:, : part.grad_RV.shape[1]].index_add_(0, part.rows_R, part.grad_RV)
            if part.error_R is not None:
                self.hidden_errors.append(part.error_R)
        self.terms.append(replace(terms, divergence_N=divergence_C))
        self.entropies.append(entropy_C1.squeeze(1))
        return loss_C, grad_CV
