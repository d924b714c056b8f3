"""Which students SGLang servers can be sent, and when they have to prove that they have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from weights.canary import LearnerCanary
from weights.checks import Canary
from weights.config import WeightsConfig
from weights.control_messages import Check
from weights.members import CheckBy, Members
from weights.snapshot import SnapshotKeeper
from weights.staged_weights import Merged, StagedWeights, Weight

_NAMES_IN_ERROR: Final = 4


class NamesError(ValueError):
    """Servers would not know the names under which this student's weights are sent."""


def check_names(model: PreTrainedModel, weights: Iterable[tuple[str, Weight]]) -> None:
    """A server loads weights by the names that checkpoints have, and passes over all others in silence. So what is sent
    has to be, name for name and tensor for tensor, what `save_pretrained` would write. It is not where transformers
    joins tensors of a checkpoint into one when it loads them (mixtures of experts), or renames them. Raises NamesError.
    """
    sent: dict[str, Tensor] = {}
    for name, weight in weights:
        tensor = weight.base if isinstance(weight, Merged) else weight
        sent[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    saved = revert_weight_conversion(model, dict(sent))
    unknown = [name for name in sent if saved.get(name) is not sent[name]]
    if unknown:
        written = [name for name in saved if saved[name] is not sent.get(name)]
        raise NamesError(
            f"SGLang servers cannot be sent this student ({model.config.model_type}): {len(unknown)} of its "
            f"{len(sent)} weights are not in checkpoints as they are here: {_some(unknown)}; a checkpoint has "
            f"{_some(written)}. A server would pass over names that it does not know, and keep its old weights. "
            "Use actors with the embedded engine: --actor.engine torch"
        )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_IN_ERROR
    return ", ".join(names[:_NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")


class Due(NamedTuple):
    """What members have to prove with the next version."""

    checksums: CheckBy
    canary: bool


class CheckSchedule:
    """With the first version of each plan: checksums, which go over all weights, and a canary. Then the canary with
    every so many versions."""

    def __init__(self, members: Members, every: int) -> None:
        """`every`: 0 = only the first of each plan."""
        self._by: CheckBy = members.check_by
        self._every = every
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
        """A version is with all of them, and they proved what was due (`checked`)."""
        self._n_since = 0 if checked else self._n_since + 1
        if checked:
            self._checked_plan = plan


class VersionChecks:
    """What members are asked to prove with each version of one publisher."""

    def __init__(
        self, members: Members, config: WeightsConfig, canary: LearnerCanary | None, snapshots: SnapshotKeeper
    ) -> None:
        self._schedule = CheckSchedule(members, config.verify_every)
        self._required = config.verify != "auto"
        self._canary = canary
        self._snapshots = snapshots

    def of(self, plan: int, newest: StagedWeights) -> Check | None:
        """With this version, whose copies are made. A snapshot that cannot be written is owed with the next one."""
        due = self._schedule.due(plan)
        canary = canary_of(self._canary, newest) if due.canary else None
        ref = self._snapshots.write(newest) if due.checksums == "reload" else None
        weights = ref if ref is not None and ref.version == newest.version else None
        if weights is None and canary is None:
            return None
        return Check(weights, required=self._required, canary=canary)

    def passed(self, plan: int, check: Check | None) -> None:
        """Every member has the version, and has proved what `check` says."""
        whole = check is not None and check.is_whole(self._schedule.due(plan).checksums == "reload")
        self._schedule.sent(plan, checked=whole)


def canary_of(canary: LearnerCanary | None, weights: StagedWeights) -> Canary | None:
    """The prompt with the learner's scores under these weights; waits for a GPU."""
    return canary.told(weights.canary) if canary is not None and weights.canary is not None else None
