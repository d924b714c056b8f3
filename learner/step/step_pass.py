"""What the forward pass of one microbatch leaves for the step: its loss, its figures, and what of it is not finite.

Nothing here is read from the device one by one: `figures` stay there, and a step reads those of all its microbatches in
one transfer. Only when that says that a number is not finite are the tokens looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from learner.batch.packing import Microbatch, TrainItem
from learner.objectives.losses import TokenInputs
from learner.reports.step_metrics import SUMS, StepSums
from learner.step.critic import ValueTerms
from learner.step.nonfinite import NonFiniteError, refuse_nonfinite
from learner.step.step_loss import MicrobatchTerms

N_FIGURES: Final = len(SUMS) + 2
"""Sums for the metrics, and at the end whether the student's log-probs and the loss are finite (1.0)."""


class StepPass(NamedTuple):
    inputs: TokenInputs
    student: MicrobatchTerms
    value: ValueTerms

    @property
    def loss(self) -> Tensor:
        """With its gradient: the student's and the value function's."""
        return self.student.loss + self.value.loss

    def left(self, microbatch: Microbatch) -> PassLeft:
        """Without the graph of the forward pass."""
        terms = self.student.terms
        graded_N = self.inputs.routed_MN.any(dim=0)
        ratio_N = (terms.student_N - self.inputs.behaviour_N).double().exp()
        sums = {
            "loss": self.student.loss.detach(),
            "divergence": terms.divergence_N.double().sum(),
            "reverse_kl": terms.reverse_kl_N.double().sum(),
            "graded": graded_N.double().sum(),
            "ratio": ratio_N.sum(),
            "ratio_squared": ratio_N.square().sum(),
            "cut": terms.cut_N.double().sum(),
            "weight": terms.weights_N.double().sum(),
            "entropy": self.student.entropy_N.double().sum(),
            "logprob": terms.student_N.double().sum(),
            "advantage": terms.advantage_N.double().sum(),
            "value_error": self.value.error_N.double().sum(),
            "ratio_max": ratio_N.max(),
        }
        finite = [torch.isfinite(terms.student_N).all(), torch.isfinite(self.loss.detach())]
        figures = torch.stack([one.double() for one in (*(sums[name] for name in SUMS), *finite)])
        per_token_N = terms.slope_N * terms.student_N + terms.divergence_N
        return PassLeft(microbatch, figures, terms.student_N, per_token_N, self.value.error_N)


class PassLeft(NamedTuple):
    """All on the device."""

    microbatch: Microbatch
    figures: Tensor
    """[N_FIGURES] float64."""
    student_N: Tensor
    per_token_N: Tensor
    """What the student's loss is made of."""
    value_error_N: Tensor

    def sums(self, figures: Sequence[float], items: Sequence[TrainItem], *, update: str) -> StepSums:
        """`figures`: as read. Raises NonFiniteError naming the rollouts; `update`: which it is."""
        *sums, finite_logprobs, finite_loss = figures
        if not finite_logprobs:
            self._refuse(self.student_N, items, update, "student log-prob")
        if not finite_loss:
            self._refuse(self.per_token_N, items, update, "loss")
            self._refuse(self.value_error_N, items, update, "value loss")
            raise NonFiniteError(f"{update}: the sum of the losses overflows; it was not made")
        return StepSums(tokens=len(self.student_N), **dict(zip(SUMS, sums, strict=True)))

    def _refuse(self, value_N: Tensor, items: Sequence[TrainItem], update: str, what: str) -> None:
        refuse_nonfinite(value_N, self.microbatch, items, update=update, what=what)
