"""Items of a batch that one loss is for, and what that loss is told of the tokens of each of their microbatches.

Legend: N trained tokens (of a microbatch where one is given, else of the part, in the order of its items).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from learner.batch.packing import Microbatch, PackedBatch, TrainItem, pack
from learner.objectives.batch_terms import BatchTerms, coefficients
from learner.objectives.losses import TokenInputs
from learner.objectives.reward_signal import ValueTargets
from learner.step.step_loss import StepLoss
from models.transfer import upload


@dataclass
class BatchPart:
    """One update after the other is made of it."""

    items: Sequence[TrainItem]
    batch: PackedBatch
    whole: BatchTerms
    """Of the whole batch, as these items see it."""
    loss: StepLoss
    proximal_N: Tensor | None = None
    """The student's log-probs at the first update; None until it is made, and where there is only one."""

    def inputs(self, microbatch: Microbatch, device: torch.device) -> TokenInputs:
        whole, item_N = self.whole, upload(microbatch.item_N, device)
        token_N = torch.from_numpy(microbatch.token_N)
        return TokenInputs(
            behaviour_N=upload(microbatch.behaviour_N, device),
            teacher_MN=upload(microbatch.teacher_MN, device),
            routed_MN=upload(microbatch.routed_MN, device),
            coef_M=upload(coefficients(self.batch.teachers, self.loss.objective), device),
            reward_advantage_N=upload(whole.reward_advantage_N[token_N], device),
            share_N=upload(whole.share_R, device)[item_N],
            sequence_N=item_N,
            n_sequences=len(whole.share_R),
            cost_scale_N=upload(whole.cost_scale_R, device)[item_N],
            proximal_N=None if self.proximal_N is None else self.proximal_N[upload(token_N, device)],
        )

    def values(self, microbatch: Microbatch) -> ValueTargets | None:
        """None: no value function is trained."""
        return None if self.whole.values is None else self.whole.values.at(torch.from_numpy(microbatch.token_N))

    def keep_proximal(self, student_N: Sequence[Tensor]) -> None:
        """`student_N`: log-probs, one tensor per microbatch."""
        token_N = torch.cat([torch.from_numpy(microbatch.token_N) for microbatch in self.batch.microbatches])
        joined_N = torch.cat(list(student_N))
        self.proximal_N = torch.empty_like(joined_N)
        self.proximal_N[upload(token_N, joined_N.device)] = joined_N

    def alone(self, index: int, pack_tokens: int) -> BatchPart:
        """Item `index` by itself, with its share of the batch."""
        begins, ends = (int(self.whole.tokens_R[:r].sum()) for r in (index, index + 1))
        item = self.items[index]
        proximal_N = None if self.proximal_N is None else self.proximal_N[begins:ends]
        return BatchPart([item], pack([item], pack_tokens), self.whole.of(index), self.loss, proximal_N)
