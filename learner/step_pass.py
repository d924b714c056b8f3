"""What the forward pass of one microbatch leaves for the step: its loss, what of it is not finite, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from learner.critic import ValueTerms
from learner.losses import TokenInputs
from learner.nonfinite import NonFiniteError, refuse_nonfinite
from learner.packing import Microbatch, TrainItem
from learner.step_loss import MicrobatchTerms
from learner.step_metrics import StepSums


class StepPass(NamedTuple):
    inputs: TokenInputs
    student: MicrobatchTerms
    value: ValueTerms

    @property
    def loss(self) -> Tensor:
        """With its gradient: the student's and the value function's."""
        return self.student.loss + self.value.loss

    def refuse_nonfinite(self, microbatch: Microbatch, items: Sequence[TrainItem], *, update: str) -> None:
        """Raises NonFiniteError naming the rollouts. `update`: which it is."""
        terms = self.student.terms
        refuse_nonfinite(terms.student_N, microbatch, items, update=update, what="student log-prob")
        if bool(torch.isfinite(self.loss)):
            return
        per_token_N = terms.slope_N * terms.student_N + terms.divergence_N
        refuse_nonfinite(per_token_N, microbatch, items, update=update, what="loss")
        refuse_nonfinite(self.value.error_N, microbatch, items, update=update, what="value loss")
        raise NonFiniteError(f"{update}: the sum of the losses overflows; it was not made")

    def measure(self) -> StepSums:
        terms = self.student.terms
        graded_N = self.inputs.routed_MN.any(dim=0)
        ratio_N = (terms.student_N - self.inputs.behaviour_N).double().exp()
        sums = torch.stack(
            [
                self.student.loss.detach().double(),
                terms.divergence_N.double().sum(),
                terms.reverse_kl_N.double().sum(),
                graded_N.double().sum(),
                ratio_N.sum(),
                ratio_N.square().sum(),
                terms.cut_N.double().sum(),
                terms.weights_N.double().sum(),
                self.student.entropy_N.double().sum(),
                terms.student_N.double().sum(),
                terms.advantage_N.double().sum(),
                self.value.error_N.double().sum(),
                ratio_N.max(),
            ]
        ).tolist()  # one transfer from the device for all of them
        return StepSums(terms.student_N.shape[0], *sums)
