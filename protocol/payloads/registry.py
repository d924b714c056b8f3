"""The kinds of payload that teachers send (docs/decisions/payloads.md)."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from stillhouse.protocol.payloads.aligned import AlignedScores, AlignedSets
from stillhouse.protocol.payloads.hidden import HiddenStates
from stillhouse.protocol.payloads.kind import Packed, PayloadKind, PayloadOptions
from stillhouse.protocol.payloads.sampled import SampledOnly
from stillhouse.protocol.payloads.student_sets import StudentSets
from stillhouse.protocol.payloads.top_k import TopKSets

PayloadName: TypeAlias = Literal["top_k", "hidden"]
"""Values of teacher.payload."""
KINDS: Final[tuple[type[PayloadKind], ...]] = (
    AlignedScores,
    AlignedSets,
    SampledOnly,
    TopKSets,
    StudentSets,
    HiddenStates,
)
"""Kinds with the same bytes: the first one reads them."""
OF_BYTES: Final = {kind.magic: kind for kind in reversed(KINDS) if kind.magic}


def kind_of(options: PayloadOptions) -> PayloadKind:
    """What teachers with these options send. Raises ValueError for options that do not fit one another."""
    for kind in KINDS:
        if mistake := kind.mistake(options):
            raise ValueError(mistake)
    return next(kind(options) for kind in KINDS if kind.chosen_by(options))


def kind_of_bytes(payload: Packed) -> type[PayloadKind]:
    """The kind that reads a payload. Unknown bytes are for the sets to refuse."""
    return OF_BYTES.get(bytes(payload[:2]), TopKSets)


def needs_head(payload: str) -> bool:
    """Whether the learner needs the output head of teachers with this teacher.payload."""
    return any(kind.needs_head for kind in KINDS if kind.payload == payload)
