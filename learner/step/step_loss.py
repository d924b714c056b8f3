"""The loss of one microbatch and its gradients, in one pass over chunks of its trained tokens (models.one_pass).

    z     the student's logits, C positions at a time
    s     log-prob of the sampled token     -> slope = d loss / d s       learner.objectives.losses
    D_m   between softmax(z) and teacher m  -> its gradient by z          learner.objectives.distributions
          if the divergence of its pool is one between distributions; the others have a cost, which is in slope

    B_m   mean cost over softmax(z), if the sampled tokens' costs have a baseline         learner.step.between

    H     entropy of softmax(z), over all rows of the head

Where a token was sampled from a part of the vocabulary (top-k, top-p, min-p), s is its log-prob renormalised over that
part, and softmax(z) in the first term of dz is 0 outside of it.

    loss  = sum_t slope_t * s_t + sum_m weight_mt * D_mt - entropy_coef * share_t / divisor * H_t
    dz    = slope (onehot - softmax(z)) + sum_m weight_m dD_m/dz - entropy_coef * share / divisor * dH/dz

`make_step_loss` picks the parts once, from the configuration. If the weight of a token depends on that token alone, it
is computed with its logits; if it depends on the whole rollout, a pass without gradient comes first. No [N, V] tensor
ever exists.

Legend: N trained tokens of a microbatch, C those of a chunk, V rows of the head, M teachers, R rows of one teacher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from stillhouse.learner.batch import Microbatch
from stillhouse.learner.objectives.config import ObjectiveConfig
from stillhouse.learner.objectives.losses import LossTerms, Objective, TokenInputs, make_objective, token_loss
from stillhouse.learner.step.between import Ahead, Between, ChunkDivergences, ChunkKnown, ChunkParts, PayloadSums
from stillhouse.learner.step.teacher_heads import HeadOf, no_heads
from stillhouse.models.logprobs import LmHead
from stillhouse.models.one_pass import one_pass_loss
from stillhouse.models.transfer import upload
from stillhouse.protocol.messages import ExpertShape


class Rollouts(NamedTuple):
    """The trained tokens of whole rollouts, where this rank has some of them: weights may depend on the others."""

    inputs: TokenInputs
    own_N: Tensor
    """int64: which of them are this rank's."""
    gather: Callable[[Tensor], Tensor]
    """Numbers of all of them, from those of each rank. All ranks that have some must call it at the same time."""


class MicrobatchTerms(NamedTuple):
    """`loss` is differentiable in hidden states and head; the rest is for the metrics."""

    loss: Tensor
    terms: LossTerms
    entropy_N: Tensor
    """Entropy of the student at each position, nats, over all rows of the head."""
    payloads: PayloadSums


class StepLoss:
    """The loss of an objective: sampled tokens and divergences between distributions in one pass."""

    def __init__(self, objective: Objective, between: Between, *, chunk_tokens: int) -> None:
        self.objective = objective
        self.read = between.read
        self._between = between
        self._chunk_tokens = chunk_tokens
        self._needs_ahead = between.needs_logprobs or not objective.by_token

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
        known, ahead = self._between.known(inputs, microbatch), None
        chunks = _Chunks(targets_N, inputs, self.objective, divisor, known)
        if microbatch.kept is not None:
            chunks.kept = _Kept(*(upload(array, hidden_NH.device) for array in microbatch.kept))
        of_spans = microbatch.span_N if microbatch.shared is None else microbatch.shared.whole.span_N
        if self._needs_ahead or of_spans is not None:
            ahead = self._ahead(head, hidden_NH, chunks, rollouts)
            chunks.whole = token_loss(ahead.student_N, ahead.inputs, self.objective, divisor).at(ahead.own_N)
        chunks.parts = self._between.prepare(inputs, microbatch, ahead, divisor)
        loss = one_pass_loss(head, hidden_NH, chunks, chunk_tokens=self._chunk_tokens)
        payloads = functools.reduce(PayloadSums.plus, chunks.payloads, PayloadSums.zero(inputs.behaviour_N.device))
        return MicrobatchTerms(loss, LossTerms.joined(chunks.terms), torch.cat(chunks.entropies), payloads)

    def _ahead(self, head: LmHead, hidden_NH: Tensor, chunks: _Chunks, rollouts: Rollouts | None) -> Ahead:
        """Log-probs and baselines of all tokens, by a pass over the same chunks without a gradient."""
        known: list[tuple[Tensor, TokenInputs]] = []
        with torch.no_grad():
            for start in range(0, len(hidden_NH), self._chunk_tokens):
                place = slice(start, min(start + self._chunk_tokens, len(hidden_NH)))
                z_CV = head.logits(hidden_NH[place])
                inputs = chunks.inputs_at(z_CV, place)
                chosen_C = z_CV.gather(1, chunks.targets_N[place, None]).squeeze(1)
                total_C = torch.logsumexp(z_CV, dim=1)
                if chunks.kept is not None:
                    total_C = chunks.kept.part(z_CV, total_C[:, None], place).log_total_C1.squeeze(1)
                known.append((chosen_C - total_C, inputs))
        student_N = torch.cat([student_C for student_C, _ in known])
        of_logits: dict[str, Tensor] = {}
        for name in ("baseline_MN", "first_MN"):
            found = [one for _, inputs in known if (one := getattr(inputs, name)) is not None]
            if found:
                of_logits[name] = torch.cat(found, dim=1)
        if rollouts is None:
            return Ahead(student_N, replace(chunks.inputs, **of_logits))
        for name, x_MN in of_logits.items():
            of_logits[name] = torch.stack([rollouts.gather(x_N) for x_N in x_MN])
        proximal_N = chunks.inputs.proximal_N
        if proximal_N is not None:
            proximal_N = rollouts.gather(proximal_N.to(student_N.dtype))
        inputs = replace(rollouts.inputs, proximal_N=proximal_N, **of_logits)
        return Ahead(rollouts.gather(student_N), inputs, rollouts.own_N)


def make_step_loss(
    config: ObjectiveConfig,
    *,
    max_new_tokens: int,
    chunk_tokens: int,
    vocab_tokens: int,
    rows: int,
    seed: int,
    head_of: HeadOf = no_heads,
    experts: ExpertShape | None = None,
) -> StepLoss:
    """`rows`: of the student's head. `seed`: the run's. `head_of`: for teachers that send hidden states. `experts`: of
    the routers that are given the engine's choices. Raises
    ValueError for names that cannot be loaded, and for a divergence between distributions if the head has fewer rows
    than there are tokens."""
    objective = make_objective(config, max_new_tokens=max_new_tokens)
    divergences = objective.divergences
    if any(one.reads_payloads for one in divergences.every) and not 1 <= vocab_tokens <= rows:
        raise ValueError(f"{vocab_tokens} tokens in the vocabulary, {rows} rows in the student's head")
    between = Between(divergences=divergences, vocab_tokens=vocab_tokens, seed=seed, head_of=head_of, experts=experts)
    return StepLoss(objective, between, chunk_tokens=chunk_tokens)


class _KeptPart(NamedTuple):
    """What the tokens of one chunk were sampled from."""

    cut_C1: Tensor
    """bool: the token was sampled from a part of the vocabulary."""
    log_total_C1: Tensor
    """Log of the sum of exp(z) over what it was sampled from."""
    ids_CK: Tensor
    probs_CK: Tensor
    """The probabilities of `ids_CK`, renormalised; 0 in columns that are none, and where nothing is cut."""


class _Kept(NamedTuple):
    """What each token was sampled from (`learner.payloads.KeptRows`)."""

    ids_NK: Tensor
    counts_N: Tensor

    def part(self, z_CV: Tensor, whole_C1: Tensor, place: slice) -> _KeptPart:
        """`whole_C1`: log of the sum of exp(z) over the vocabulary."""
        ids_CK, counts_C1 = self.ids_NK[place].long(), self.counts_N[place, None]
        inside_CK = torch.arange(ids_CK.shape[1], device=z_CV.device) < counts_C1
        kept_CK = torch.where(inside_CK, z_CV.gather(1, ids_CK), -torch.inf)
        cut_C1 = counts_C1 > 0
        log_total_C1 = torch.where(cut_C1, kept_CK.logsumexp(dim=1, keepdim=True), whole_C1)
        return _KeptPart(cut_C1, log_total_C1, ids_CK, (kept_CK - log_total_C1).exp())


@dataclass(slots=True)
class _Chunks:
    """The chunk loss for `one_pass_loss`. Keeps terms and entropies for the metrics."""

    targets_N: Tensor
    inputs: TokenInputs
    objective: Objective
    divisor: int
    known: ChunkKnown | None
    kept: _Kept | None = None
    """What the tokens were sampled from, if not all were from the whole vocabulary."""
    whole: LossTerms | None = None
    """Terms of the whole microbatch, if the log-probs are already known."""
    parts: ChunkParts = lambda z_CV, place: ChunkDivergences([])
    terms: list[LossTerms] = field(default_factory=list[LossTerms])
    entropies: list[Tensor] = field(default_factory=list[Tensor])
    payloads: list[PayloadSums] = field(default_factory=list[PayloadSums])

    def inputs_at(self, z_CV: Tensor, place: slice) -> TokenInputs:
        """The inputs of a chunk, with what its logits give."""
        inputs = self.inputs.at(place)
        if self.known is None:
            return inputs
        known = self.known(z_CV, place)
        self.payloads.append(known.sums)
        return replace(inputs, baseline_MN=known.mean_MC, first_MN=known.first_MC)

    def __call__(self, z_CV: Tensor, place: slice) -> tuple[Tensor, Tensor]:
        parts, sums = self.parts(z_CV, place)
        if sums is not None:
            self.payloads.append(sums)
        inputs = self.inputs_at(z_CV, place) if self.whole is None else self.inputs
        targets_C1 = self.targets_N[place, None]
        z_CV.sub_(z_CV.amax(dim=1, keepdim=True))
        chosen_C1 = z_CV.gather(1, targets_C1)
        exp_CV = z_CV.exp()
        total_C1 = exp_CV.sum(dim=1, keepdim=True)
        log_total_C1 = total_C1.log()
        kept = None if self.kept is None else self.kept.part(z_CV, log_total_C1, place)
        entropy_C1 = log_total_C1 - z_CV.mul_(exp_CV).sum(dim=1, keepdim=True) / total_C1
        if self.whole is None:
            sampled_total_C1 = log_total_C1 if kept is None else kept.log_total_C1
            logprobs_C = (chosen_C1 - sampled_total_C1).squeeze(1)
            terms = token_loss(logprobs_C, inputs, self.objective, self.divisor)
        else:
            terms = self.whole.at(place)
        slope_C1 = terms.slope_N.to(exp_CV.dtype)[:, None]
        loss_C = terms.slope_N * terms.student_N
        factor_C1 = -slope_C1 if kept is None else torch.where(kept.cut_C1, 0.0, -slope_C1)
        if self.objective.entropy_coef:
            bonus_C = self.objective.entropy_coef * self.inputs.share_N[place].to(loss_C.dtype) / self.divisor
            loss_C = loss_C - bonus_C * entropy_C1.squeeze(1)
            # d(-H)/dz = p (log p + H), and z_CV is z * exp now
            factor_C1 = factor_C1 + bonus_C[:, None] * (entropy_C1 - log_total_C1)
            z_CV.mul_(bonus_C[:, None] / total_C1)
        grad_CV = exp_CV.mul_(factor_C1 / total_C1).scatter_add_(1, targets_C1, slope_C1)
        if kept is not None:
            grad_CV.scatter_add_(1, kept.ids_CK, kept.probs_CK * -slope_C1)
        if self.objective.entropy_coef:
            grad_CV.add_(z_CV)
        divergence_MC = terms.divergence_MN.clone()
        for part in parts:
            loss_C = loss_C.index_add(0, part.rows_R, (part.weight_R * part.divergence_R).to(loss_C.dtype))
            divergence_MC[part.m].index_add_(0, part.rows_R, part.divergence_R.to(divergence_MC.dtype))
            grad_CV[:, : part.grad_RV.shape[1]].index_add_(0, part.rows_R, part.grad_RV)
        self.terms.append(replace(terms, divergence_MN=divergence_MC))
        self.entropies.append(entropy_C1.squeeze(1))
        return loss_C, grad_CV
