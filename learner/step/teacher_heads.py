"""Output heads of the teachers that send hidden states (teacher.payload). The learner reads nothing else of a teacher's
model, and never changes it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeAlias

from stillhouse.learner.run_config import LearnerRunConfig, pools_with_heads
from stillhouse.models.description import DtypeName, resolve_dtype
from stillhouse.models.head_file import load_head
from stillhouse.models.loading import resolve_device
from stillhouse.models.logprobs import LmHead

HeadOf: TypeAlias = Callable[[str], LmHead]
"""Name of a teacher pool -> the head of its model, on the learner's device, in the dtype of its matrix products."""

log = logging.getLogger(__name__)


def no_heads(pool: str) -> LmHead:
    """Raises ValueError."""
    raise ValueError(f"teacher {pool!r} sent hidden states, but this learner has no teacher's output head")


class TeacherHeads:
    """A `HeadOf` that loads each head when it is first asked for."""

    def __init__(self, models: Mapping[str, str], other: str, *, device: str, dtype: DtypeName) -> None:
        """`models`: the models of pools that have their own; all others have `other`."""
        self._models = dict(models)
        self._other = other
        self._device = device
        self._dtype: DtypeName = dtype
        self._heads: dict[str, LmHead] = {}
        """By model."""

    def __call__(self, pool: str) -> LmHead:
        model = self._models.get(pool, self._other)
        if model not in self._heads:
            self._heads[model] = head = load_head(model, device=self._device, dtype=self._dtype)
            mib = head.weight_VH.nbytes / 2**20
            log.info("the output head of %s, for the hidden states of teacher %r: %.1f MiB", model, pool, mib)
        return self._heads[model]


def teacher_heads(config: LearnerRunConfig) -> TeacherHeads:
    """For the run's teachers. Heads that its objective will need are loaded now, so that a missing file is found before
    the first batch. Raises what `models.head_file.load_head` does."""
    learner = config.learner
    device = resolve_device(learner.device)
    heads = TeacherHeads(
        {name: pool.model for name, pool in config.pools.items() if pool.model},
        config.models.teacher,
        device=device,
        dtype=resolve_dtype(learner.dtype, device),
    )
    for name in () if learner.frozen else pools_with_heads(config, learner.objective):
        heads(name)
    return heads
