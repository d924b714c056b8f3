"""A short fixed prompt that the learner scores with every version it sends: servers must think of it alike."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.logprobs import lm_head, token_scores
from models.packed import packed_hidden
from models.precision import products
from weights.checks import Canary
from weights.publish_choices import SentDtype

TOKENS: Final = 32
_STRIDE: Final = 7919
"""A prime, so that the prompt's tokens are from all over the vocabulary."""


class LearnerCanary:
    """`score` is the training thread's, `told` anybody's."""

    def __init__(self, model: PreTrainedModel, *, vocab_tokens: int, bfloat16: bool, sent: SentDtype) -> None:
        """`model`: the student that is trained, loaded with attention="packed". `vocab_tokens`: ids that the tokenizer
        has. `bfloat16`: of the learner's matrix products. `sent`: dtype of the weights that go out."""
        self._model = model
        self._ids = tuple((11 + _STRIDE * i) % vocab_tokens for i in range(TOKENS))
        self._bfloat16 = bfloat16
        self._exact = model.device.type == "cpu" and not bfloat16 and sent in ("keep", "float32")

    @torch.no_grad()
    def score(self) -> Tensor:
        """Log-probs of the prompt's tokens but the first under the student as it is now, [TOKENS - 1], on its device;
        on a GPU only queued."""
        device = self._model.device
        ids_T = torch.tensor(self._ids, device=device)
        with products(device.type, bfloat16=self._bfloat16):
            hidden_TH = packed_hidden(self._model, ids_T, [TOKENS])
        return token_scores(lm_head(self._model), hidden_TH[:-1].float(), ids_T[1:]).logprobs_T

    def told(self, scores: Tensor) -> Canary:
        """What members are told; waits for a GPU."""
        return Canary(self._ids, tuple(scores.tolist()), self._exact)
