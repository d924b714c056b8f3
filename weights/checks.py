"""Has a server the weights that were sent? Checksums of its tensors, and log-probs of a canary: a short fixed prompt
that learner and server both score. Pure: no I/O, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec

Checksums: TypeAlias = list[dict[str, str]]
"""Per tensor-parallel rank: the server's names of its tensors, with their checksums in hexadecimal."""

Precision: TypeAlias = Literal["float32", "half", "quantized"]
"""Of what a server computes with. TF32 products of a GPU count as `half`."""

_TOLERANCE: Final[dict[Precision, float]] = {"float32": 2e-3, "half": 0.25, "quantized": 0.75}
"""Nats, mean over the tokens of a canary. In float32 on a CPU they agree to 1e-4. In 16 bits the logits themselves, of
ten to thirty, are rounded by 0.03 to 0.06."""
_STILL: Final = 0.1
"""A server stands still when it moves by less than this share of what the learner moves, and that by more than this
share of the tolerance."""


class Canary(msgspec.Struct, frozen=True):
    """A prompt, and what the learner thinks of it under the weights that were sent."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of token_ids[1:]."""
    exact: bool
    """Computed and sent in float32, on a CPU."""


class CanaryWatch:
    """Of one server, over its versions. A server is wrong

    when the log-probs differ by more than rounding explains, or
    when they stand still while the learner's move: weights that never arrive show long before the difference does
    """

    def __init__(self) -> None:
        self._first: tuple[Sequence[float], Sequence[float]] | None = None

    def why_wrong(self, canary: Canary, said: Sequence[float], precision: Precision) -> str | None:
        """`said`: by the server, of token_ids[1:]."""
        tolerance = _TOLERANCE[precision if canary.exact or precision == "quantized" else "half"]
        apart = _apart(canary.logprobs, said)
        if not apart <= tolerance:  # nor NaN
            return (
                f"{len(said)} log-probs of a canary prompt are {apart:.2g} nats from the learner's in the mean; "
                f"expected at most {tolerance:g}"
            )
        self._first = self._first or (canary.logprobs, said)
        learner_moved, server_moved = _apart(self._first[0], canary.logprobs), _apart(self._first[1], said)
        if learner_moved > _STILL * tolerance and server_moved < _STILL * learner_moved:
            return (
                f"log-probs of a canary prompt moved by {server_moved:.2g} nats in the mean since its first weights, "
                f"the learner's by {learner_moved:.2g}: what is sent does not change what it computes with"
            )
        return None


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


class _Rank(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


class _Said(msgspec.Struct, frozen=True):
    ranks: list[_Rank]


def parse_checksums(text: bytes) -> Checksums | None:
    """Of a reply of /weights_checker; None for one without checksums."""
    try:
        said = msgspec.json.decode(text, type=_Said)
    except msgspec.DecodeError:
        return None
    return [rank.checksums for rank in said.ranks]


def differences(before: Checksums, after: Checksums) -> list[str]:
    """Names whose checksums are not the same, rank by rank."""
    if len(before) != len(after):
        return [f"{len(before)} ranks, then {len(after)}"]
    return [
        name
        for first, second in zip(before, after, strict=True)
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    ]
