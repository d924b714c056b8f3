"""The learner's side of proofs by SGLang servers: the canary prompt, and when a server must prove that it has the
weights that were sent. `weights.checks` has the servers' side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from stillhouse.models.logprobs import lm_head, token_scores
from stillhouse.models.packed import packed_hidden
from stillhouse.models.precision import products
from stillhouse.weights.checks import Canary
from stillhouse.weights.config import SentDtype, WeightsConfig
from stillhouse.weights.control_messages import WeightCheck
from stillhouse.weights.roster import CheckBy, GroupMembers
from stillhouse.weights.snapshot import SnapshotKeeper
from stillhouse.weights.staged_weights import StagedVersion

TOKENS: Final = 32
_STRIDE: Final = 7919
"""A prime, so that the prompt's tokens are spread over the whole vocabulary."""


class LearnerCanary:
    """A short fixed prompt that the learner scores with every version it sends. A server with the same weights gives
    the same log-probs. `score` is for the training thread only, `canary` for any."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_tokens: int,
        bfloat16: bool,
        sent: SentDtype,
        logprobs: Callable[[Sequence[int]], Tensor] | None = None,
    ) -> None:
        """`model`: the student in training, loaded with attention="packed". `vocab_tokens`: number of ids of the
        tokenizer. `bfloat16`: whether the learner's matrix products use it. `sent`: dtype of the weights sent.
        `logprobs` computes the prompt's log-probs; default: `prompt_logprobs` of `model`."""
        self._ids = tuple((11 + _STRIDE * i) % vocab_tokens for i in range(TOKENS))
        self._logprobs = partial(prompt_logprobs, model, bfloat16=bfloat16) if logprobs is None else logprobs
        self._exact = model.device.type == "cpu" and not bfloat16 and sent in ("keep", "float32")

    def score(self) -> Tensor:
        """Log-probs of the prompt's tokens after the first under the present student, [TOKENS - 1], on its device. On a
        GPU the computation is only queued."""
        return self._logprobs(self._ids)

    def canary(self, scores: Tensor) -> Canary:
        """The prompt and `scores` as they are sent to members; waits for a GPU."""
        return Canary(self._ids, tuple(scores.tolist()), self._exact)


@torch.no_grad()
def prompt_logprobs(model: PreTrainedModel, ids: Sequence[int], *, bfloat16: bool) -> Tensor:
    """[T - 1] log-probs of a prompt's tokens after the first, by a model with packed attention."""
    ids_T = torch.tensor(ids, device=model.device)
    with products(model.device.type, bfloat16=bfloat16):
        hidden_TH = packed_hidden(model, ids_T, [len(ids)])
    return token_scores(lm_head(model), hidden_TH[:-1].float(), ids_T[1:]).logprobs_T


class Due(NamedTuple):
    """The proofs that are due with the next version."""

    checksums: CheckBy
    canary: bool


class CheckSchedule:
    """With the first version of each plan: checksums over all weights, and the canary. Then the canary with every n-th
    version; for adapters with every one, because it stops nothing there."""

    def __init__(self, members: GroupMembers, every: int) -> None:
        """`every`: 0 = only the first of each plan."""
        self._by: CheckBy = members.check_by
        self._every = 1 if members.kind == "adapters" else every
        self._n_since = 0
        self._checked_plan: int | None = None

    def due(self, plan: int) -> Due:
        """`plan`: the group's epoch."""
        if self._by == "off":
            return Due("off", canary=False)
        if plan != self._checked_plan:
            return Due(self._by, canary=True)
        return Due("off", canary=self._every > 0 and self._n_since + 1 >= self._every)

    def sent(self, plan: int, *, checked: bool) -> None:
        """Record that all members have a version; `checked`: they also gave the proofs that were due."""
        self._n_since = 0 if checked else self._n_since + 1
        if checked:
            self._checked_plan = plan


class VersionChecks:
    """Chooses the proofs that one publisher asks for with each version."""

    def __init__(
        self, members: GroupMembers, config: WeightsConfig, canary: LearnerCanary | None, snapshots: SnapshotKeeper
    ) -> None:
        self._schedule = CheckSchedule(members, config.verify_every)
        self._required = config.verify != "auto"
        self._canary = canary
        self._snapshots = snapshots

    def of(self, plan: int, newest: StagedVersion) -> WeightCheck | None:
        """The proofs for this version, whose copies are made. If its snapshot cannot be written, that proof stays
        due."""
        due = self._schedule.due(plan)
        canary = canary_of(self._canary, newest) if due.canary else None
        ref = self._snapshots.write(newest) if due.checksums == "reload" else None
        if ref is None and canary is None:
            return None
        return WeightCheck(ref, required=self._required, canary=canary)

    def passed(self, plan: int, check: WeightCheck | None) -> None:
        """Record that every member has the version and gave the proofs of `check`."""
        whole = check is not None and check.is_whole(self._schedule.due(plan).checksums == "reload")
        self._schedule.sent(plan, checked=whole)


def canary_of(canary: LearnerCanary | None, weights: StagedVersion) -> Canary | None:
    """The prompt with the learner's log-probs under these weights; waits for a GPU."""
    return canary.canary(weights.canary) if canary is not None and weights.canary is not None else None
