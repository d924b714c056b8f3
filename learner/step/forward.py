"""Forward passes of a step: the student over one packed microbatch, the inputs of its loss, and what a pass leaves
behind.

Figures are not read from the device one by one: they stay there until a step reads those of all its microbatches in one
transfer. The tokens themselves are read only if a figure is not finite, to trace it to the rollouts that caused it.

Legend: T input tokens of a microbatch, N trained tokens of it (or of a part of the batch), H hidden size, V rows of the
head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.learner.batch import BatchError, Microbatch, NonFiniteError, PackedBatch, TrainItem, divide, pack_share
from stillhouse.learner.objectives.advantages import ValueTargets
from stillhouse.learner.objectives.batch_terms import BatchTerms, teacher_coefs
from stillhouse.learner.objectives.losses import TokenInputs
from stillhouse.learner.ranks.group import Ranks
from stillhouse.learner.reports.step_metrics import SUMS, StepSums
from stillhouse.learner.step.critic import Critic, ValueTerms
from stillhouse.learner.step.step_loss import MicrobatchTerms, Rollouts, StepLoss
from stillhouse.models.divided import DividedLayout, RankGroup
from stillhouse.models.logprobs import LmHead, lm_head
from stillhouse.models.packed import divided_hidden, packed_hidden
from stillhouse.models.precision import products
from stillhouse.models.routing import Replay
from stillhouse.models.transfer import read, upload
from stillhouse.protocol.messages import ExpertShape


class States(NamedTuple):
    head: LmHead
    """bfloat16 if matrix products are."""
    hidden_NH: Tensor
    """Input of the product with `head`."""
    exact_NH: Tensor
    """The same states, not rounded to the dtype of products."""
    experts: Replay | None
    """What the routers were given; None: nothing."""


def predictor_states(
    model: PreTrainedModel,
    microbatch: Microbatch,
    *,
    bfloat16: bool,
    group: RankGroup | None = None,
    shape: ExpertShape | None = None,
) -> States:
    """Hidden states that predict the trained tokens. `bfloat16` is for matrix products; parameters are not changed.
    `group`: has the other parts of a microbatch that is divided. `shape`: of the routers that `models.routing.prepare`
    has prepared."""
    head = lm_head(model)
    device = head.weight_VH.device
    with products(device.type, bfloat16=bfloat16):
        ids_T, experts = upload(microbatch.ids_T, device), _given_experts(microbatch, shape, device)
        if microbatch.shared is None or group is None:
            hidden_TH = packed_hidden(model, ids_T, microbatch.lengths, experts=experts)
        else:
            hidden_TH = divided_hidden(model, ids_T, DividedLayout(microbatch.shared.part, group), experts)
    exact_NH = hidden_TH.index_select(0, upload(microbatch.predictor_N, device))
    if not bfloat16:
        return States(head, exact_NH, exact_NH, experts)
    bias_V = None if head.bias_V is None else head.bias_V.bfloat16()
    head = LmHead(head.weight_VH.bfloat16(), bias_V, head.scale, head.softcap)
    return States(head, exact_NH.bfloat16(), exact_NH, experts)


def _given_experts(microbatch: Microbatch, shape: ExpertShape | None, device: torch.device) -> Replay | None:
    if microbatch.experts is None or shape is None:
        return None
    ids_TLK, given_T = microbatch.experts
    return Replay(shape, upload(ids_TLK.astype(np.int64), device), upload(given_T, device))


def refuse_nonfinite(
    value_N: Tensor, microbatch: Microbatch, items: Sequence[TrainItem], *, update: str, what: str
) -> None:
    """Raises NonFiniteError naming the rollouts. `update` and `what` name the update and the values in the message."""
    finite_N = torch.isfinite(value_N)
    if bool(finite_N.all()):
        return
    wrong = np.unique(microbatch.item_N[~finite_N.cpu().numpy()])
    culprits = [items[int(i)].item.rollout_id for i in wrong]
    raise NonFiniteError(
        f"{update}: the {what} of {int((~finite_N).sum())} tokens is not finite, in the rollouts {culprits}; it was "
        "not made (weights that have diverged give this for every rollout)",
        culprits,
    )


@dataclass
class BatchPart:
    """Items of a batch that share one loss. All updates of a step use it."""

    items: Sequence[TrainItem]
    batch: PackedBatch
    whole: BatchTerms
    """Terms of the whole batch, reduced to these items."""
    loss: StepLoss
    proximal_N: Tensor | None = None
    """The student's log-probs at the first update, of the tokens of this rank; None before it, and if there is only one
    update."""

    def inputs(self, microbatch: Microbatch, device: torch.device) -> TokenInputs:
        whole, item_N = self.whole, upload(microbatch.item_N, device)
        token_N = torch.from_numpy(microbatch.token_N)
        return TokenInputs(
            behaviour_N=upload(microbatch.behaviour_N, device),
            teacher_MN=upload(microbatch.teacher_MN, device),
            routed_MN=upload(microbatch.routed_MN, device),
            teachers=self.batch.teachers,
            coef_M=upload(teacher_coefs(self.batch.teachers, self.loss.objective, whole.teacher_scales), device),
            reward_advantage_N=upload(whole.reward_advantage_N[token_N], device),
            share_N=upload(whole.share_N[token_N], device),
            sequence_N=item_N,
            n_sequences=len(whole.tokens_R),
            cost_scale_N=upload(whole.cost_scale_R, device)[item_N],
            proximal_N=None if self.proximal_N is None else self.proximal_N[upload(token_N, device)],
            before_N=upload(microbatch.before_N, device) if self.loss.objective.cost_discount else None,
            divergence_weight_N=(
                None if whole.divergence_weight_N is None else upload(whole.divergence_weight_N[token_N], device)
            ),
            span_N=None if microbatch.span_N is None else upload(microbatch.span_N, device),
            rest_MN=self._rest(microbatch, device),
        )

    def _rest(self, microbatch: Microbatch, device: torch.device) -> Tensor | None:
        """`TokenInputs.rest_MN`: of teachers whose divergence reads the sets."""
        if microbatch.rest_MN is None:
            return None
        divergences = self.loss.objective.divergences
        reads_M1 = np.array([[divergences.of(name).between is not None] for name in self.batch.teachers])
        rest_MN = microbatch.rest_MN & reads_M1
        return upload(rest_MN, device) if rest_MN.any() else None

    def rollouts(self, microbatch: Microbatch, device: torch.device, group: RankGroup | None) -> Rollouts | None:
        """The whole rollouts of a microbatch of which this rank has a part; None if it has all of it."""
        if microbatch.shared is None or group is None:
            return None
        whole, _, trained, own_N = microbatch.shared
        places_N = own_N if len(own_N) else np.zeros(1, np.int64)
        return Rollouts(self.inputs(whole, device), upload(places_N, device), partial(trained.gather, group=group))

    def values(self, microbatch: Microbatch) -> ValueTargets | None:
        """None without a value function."""
        return None if self.whole.values is None else self.whole.values.at(torch.from_numpy(microbatch.token_N))

    def keep_proximal(self, student_N: Sequence[Tensor], device: torch.device) -> None:
        """Keep the student's log-probs, given as one tensor per microbatch."""
        dtype = student_N[0].dtype if student_N else torch.float32
        self.proximal_N = torch.zeros(self.batch.n_trained, dtype=dtype, device=device)
        for microbatch, own_N in zip(self.batch.counted, student_N, strict=True):
            self.proximal_N[upload(microbatch.token_N, device)] = own_N

    def alone(self, index: int, pack_tokens: int, step: int, group: RankGroup | None) -> BatchPart:
        """A part with only item `index`, with its share of the batch, for all ranks. `step`: see `StepLoss.read`.
        `group`: those among which a microbatch is divided."""
        begins, ends = (int(self.whole.tokens_R[:r].sum()) for r in (index, index + 1))
        items = self.loss.read([self.items[index]], step)  # another rank's are not decoded here
        proximal_N = None if self.proximal_N is None else self.proximal_N[begins:ends]
        packed = pack_share(items, divide(items, pack_tokens), 0, group)
        return BatchPart(items, packed, self.whole.of(index), self.loss, proximal_N)


N_FIGURES: Final = len(SUMS) + 2
"""Figures of a pass before those of pools: the sums for the metrics, then two flags (1.0 if log-probs and loss are
finite)."""


TWICE: Final = math.log(2.0)
LARGEST_ERROR_SHARE: Final = 0.25
"""Largest mean error of scores from hidden states, as a share of the mean s - q of these tokens..."""
ERROR_NATS: Final = (0.05, 0.5)
"""...but never less or more than this. bfloat16 gave 0.027 at most (docs/teachers.md); other heads give 0.1 to nats."""


class StepPass(NamedTuple):
    inputs: TokenInputs
    student: MicrobatchTerms
    value: ValueTerms
    compared: tuple[str, ...]
    """Pools whose divergence the loss has; none with the null teacher."""
    routers_differ: Tensor | None
    """`Replay.differing`; None: the routers were given nothing."""

    @property
    def loss(self) -> Tensor:
        """The differentiable loss of student and value function."""
        return self.student.loss + self.value.loss

    def left(self, microbatch: Microbatch, items: Sequence[TrainItem]) -> PassLeft:
        """Results of this pass for the step, without its graph. `items`: of the batch."""
        terms, payloads, routed_MN = self.student.terms, self.student.payloads, self.inputs.routed_MN
        of_teachers_M = terms.divergence_MN.double().sum(dim=1)
        gap_MN = terms.student_N - self.inputs.teacher_MN
        scored_N = self.inputs.routed_MN.any(dim=0)
        heads, heads_X3 = self._heads(microbatch, items)
        ratio_N = (terms.student_N - self.inputs.behaviour_N).double().exp()
        sums = {
            "loss": self.student.loss.detach(),
            "divergence": of_teachers_M.sum(),
            "reverse_kl": terms.reverse_kl_N.double().sum(),
            "scored": scored_N.double().sum(),
            "ratio_mean": ratio_N.sum(),
            "ratio_squared": ratio_N.square().sum(),
            "truncated_fraction": terms.cut_N.double().sum(),
            "rejected_fraction": terms.rejected_N.double().sum(),
            "weight_mean": terms.weights_N.double().sum(),
            "entropy": self.student.entropy_N.double().sum(),
            "logprob": terms.student_N.double().sum(),
            "advantage_mean": terms.advantage_N.double().sum(),
            "value_error": self.value.error_N.double().sum(),
            "hidden_error": heads_X3[:, 0].sum(),
            "scores": routed_MN.double().sum(),
            "excess_share": (routed_MN & (gap_MN > TWICE)).double().sum(),
            "deficit_share": (routed_MN & (gap_MN < -TWICE)).double().sum(),
            "set_teacher_mass": payloads.sets_3[0],
            "set_student_mass": payloads.sets_3[1],
            "set_overlap": payloads.sets_3[2],
            "ratio_max": ratio_N.max(),
        } | self._routers(microbatch, ratio_N)
        finite = [torch.isfinite(terms.student_N).all(), torch.isfinite(self.loss.detach())]
        figures = torch.stack([one.double() for one in (*(sums[name] for name in SUMS), *finite)])
        n_scores = dict(zip(self.compared, microbatch.routed_MN.sum(axis=1).tolist(), strict=False))
        per_token_N = terms.slope_N * terms.student_N + terms.divergence_MN.sum(dim=0)
        return PassLeft(
            microbatch,
            torch.cat([figures, of_teachers_M[: len(n_scores)], heads_X3.flatten()]),
            n_scores,
            heads,
            terms.student_N,
            per_token_N,
            self.value.error_N,
            payloads.hidden_scores,
            payloads.set_scores,
        )

    def _routers(self, microbatch: Microbatch, like: Tensor) -> dict[str, Tensor]:
        """Sums over the input tokens; all 0 where routers were given nothing."""
        names = ("routers_given", "routers_free_trained", "routers_free_context", "routed_inputs")
        if microbatch.experts is None or self.routers_differ is None:
            return dict.fromkeys(("routers_differ", *names), like.new_zeros(()))
        ids_TLK, given_T = microbatch.experts
        trained_T = np.zeros_like(given_T)
        trained_T[microbatch.predictor_N] = True
        counts = (
            given_T.sum() * ids_TLK.shape[1],
            *(~given_T & which for which in (trained_T, ~trained_T)),
            given_T.size,
        )
        sums = {name: like.new_tensor(float(np.sum(n))) for name, n in zip(names, counts, strict=True)}
        return {"routers_differ": self.routers_differ, **sums}

    def _heads(self, microbatch: Microbatch, items: Sequence[TrainItem]) -> tuple[list[str], Tensor]:
        """X pairs of a teacher with hidden states and a tag, and for each the sums of `StepSums.heads`, [X, 3]."""
        errors, student_N = self.student.payloads.errors, self.student.terms.student_N
        tags = sorted({one.item.tag for one in items}) if errors else []
        of_item = np.array([tags.index(one.item.tag) for one in items]) if errors else np.zeros(0, np.int64)
        sums_X3 = torch.zeros((len(self.inputs.teachers) * len(tags), 3), dtype=torch.float64, device=student_N.device)
        tag_N = upload(of_item[microbatch.item_N], student_N.device) if errors else student_N
        for m, rows_R, error_R in errors:
            gap_R = (student_N.detach() - self.inputs.teacher_MN[m])[rows_R]
            each_R3 = torch.stack([error_R, gap_R, torch.ones_like(error_R)], dim=1).double()
            sums_X3.index_add_(0, m * len(tags) + tag_N[rows_R], each_R3)
        return [f"teacher {name!r}, tag {tag!r}" for name in self.inputs.teachers for tag in tags], sums_X3


def refuse_other_head(sums: StepSums, *, update: str) -> None:
    """Raise BatchError for hidden states that, under the learner's head, do not give the scores that their teacher
    sent, on average over the batch, for any teacher and tag."""
    for name, (error, gap, terms) in sums.heads.items():
        kl, mean = abs(gap) / terms, error / terms
        allowed = min(max(LARGEST_ERROR_SHARE * kl, ERROR_NATS[0]), ERROR_NATS[1])
        if not mean <= allowed:
            raise BatchError(
                f"{update}: log-probs from hidden states ({name}) differ by {mean:.2g} nats on average from those that "
                f"the teacher sent, beside a reverse KL of {kl:.2g}; expected at most {allowed:.2g}: the learner must "
                "read the output head of the model that the teachers have (models.teacher, pools.NAME.model)"
            )


class PassLeft(NamedTuple):
    """Results of a pass, on the device."""

    microbatch: Microbatch
    figures: Tensor
    """[N_FIGURES + pools in `n_scores` + 3 x `heads`] float64."""
    n_scores: dict[str, int]
    """Pool -> number of tokens that it scores here."""
    heads: list[str]
    """Names of the pairs in `StepSums.heads`."""
    student_N: Tensor
    per_token_N: Tensor
    """Contribution of each token to the student's loss."""
    value_error_N: Tensor
    hidden_scores: int
    """Number of scores that were computed from teachers' hidden states."""
    set_scores: int
    """Number of scores that came with a top-k set."""

    def sums(self, figures: Sequence[float], items: Sequence[TrainItem], *, update: str) -> StepSums:
        """Sums from the figures read. Raises NonFiniteError naming the rollouts."""
        *sums, finite_logprobs, finite_loss = figures[:N_FIGURES]
        if not finite_logprobs:
            self._refuse(self.student_N, items, update, "student log-prob")
        if not finite_loss:
            self._refuse(self.per_token_N, items, update, "loss")
            self._refuse(self.value_error_N, items, update, "value loss")
            raise NonFiniteError(f"{update}: the sum of the losses overflows; it was not made")
        pools, heads = figures[N_FIGURES:][: len(self.n_scores)], figures[N_FIGURES + len(self.n_scores) :]
        of_pools = zip(self.n_scores.items(), pools, strict=True)
        return StepSums(
            tokens=len(self.student_N),
            sums=dict(zip(SUMS, sums, strict=True)),
            hidden_scores=self.hidden_scores,
            set_scores=self.set_scores,
            pools={pool: (divergence, n) for (pool, n), divergence in of_pools},
            heads={
                name: (a, b, n)
                for name, a, b, n in zip(self.heads, heads[::3], heads[1::3], heads[2::3], strict=True)
                if n
            },
        )

    def _refuse(self, value_N: Tensor, items: Sequence[TrainItem], update: str, what: str) -> None:
        refuse_nonfinite(value_N, self.microbatch, items, update=update, what=what)


def batch_values(
    critic: Critic,
    states_of: Callable[[Microbatch], Tensor],
    batch: PackedBatch,
    items: Sequence[TrainItem],
    *,
    update: str,
    ranks: Ranks,
) -> Tensor:
    """Values of all trained tokens, in the order of the items, [N] float64 on the CPU. It is one forward pass without
    gradient and without the head. Raises NonFiniteError: one NaN value would spread to the advantage of every
    token."""

    def values_of(microbatch: Microbatch) -> Tensor:
        return critic.values(states_of(microbatch))

    made: list[Tensor] = []
    with torch.no_grad():
        for microbatch, counts in batch.passes:
            values_N = ranks.forward(partial(values_of, microbatch))
            if counts:
                made.append(values_N)

    def own() -> list[tuple[list[int], list[float]]]:
        """(tokens, values) of each microbatch."""
        known = read(torch.cat(made)).split(list(map(len, made))) if made else ()
        for microbatch, own_N in zip(batch.counted, known, strict=True):
            refuse_nonfinite(own_N, microbatch, items, update=update, what="value")
        return [(one.token_N.tolist(), own_N.tolist()) for one, own_N in zip(batch.counted, known, strict=True)]

    value_N = torch.empty(batch.n_trained, dtype=torch.float64)
    for of_rank in ranks.all_gather(own, list[tuple[list[int], list[float]]]):
        for token_N, own_N in of_rank:
            value_N[torch.tensor(token_N)] = torch.tensor(own_N, dtype=torch.float64)
    return value_N
