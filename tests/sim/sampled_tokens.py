"""The simplest chunk loss for `models.one_pass`: of the sampled token of each position.

Legend: T positions, V rows of the head, C positions of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class SampledTokens:
    """Chunk loss of sampled tokens: sum_t loss_t(s_t), s_t the log-prob of token t. Keeps s for the metrics."""

    def __init__(self, targets_T: Tensor, loss: Callable[[Tensor, slice], tuple[Tensor, Tensor]]) -> None:
        """`loss`: (log-probs [C], their slice of T) -> (loss [C], d loss / d s [C]); each token's loss depends only on
        its own log-prob."""
        self._targets_T = targets_T
        self._loss = loss
        self.logprobs: list[Tensor] = []
        """One [C] per chunk."""

    def __call__(self, z_CV: Tensor, place: slice) -> tuple[Tensor, Tensor]:
        targets_C1 = self._targets_T[place, None]
        largest_C1 = z_CV.amax(dim=1, keepdim=True)
        chosen_C1 = z_CV.gather(1, targets_C1) - largest_C1
        exp_CV = z_CV.sub_(largest_C1).exp_()
        total_C1 = exp_CV.sum(dim=1, keepdim=True)
        logprobs_C = (chosen_C1 - total_C1.log()).squeeze(1)
        loss_C, slope_C = self._loss(logprobs_C, place)
        self.logprobs.append(logprobs_C)
        slope_C1 = slope_C[:, None]
        return loss_C, exp_CV.mul_(-slope_C1 / total_C1).scatter_add_(1, targets_C1, slope_C1)
