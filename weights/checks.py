"""Checks that a server has the weights that were sent: checksums of its tensors, and log-probs of a canary, which is a
short fixed prompt that learner and server both score. No I/O, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

import msgspec

Checksums: TypeAlias = list[dict[str, str]]
"""One dict per tensor-parallel rank: tensor names of the server -> checksums in hexadecimal."""

Precision: TypeAlias = Literal["float32", "float16", "bfloat16", "quantized"]
"""Precision with which a server computes. TF32 products of a GPU count as float16, which has as many bits."""

_TOLERANCE: Final[dict[Precision, float]] = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.25, "quantized": 0.75}
"""Largest mean difference over the tokens of a canary, in nats. In float32 on a CPU both sides agree to 1e-4. In
bfloat16, with 8 bits, the logits themselves, of ten to thirty, are rounded by 0.03 to 0.06; float16 has 11 bits."""
_STILL: Final = 0.1
"""A server stands still if its log-probs move by less than this share of the learner's movement, provided that the
learner moves by more than this share of the tolerance."""


class Canary(msgspec.Struct, frozen=True):
    """A prompt, and the learner's log-probs of it under the weights that were sent."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probs of token_ids[1:]."""
    exact: bool
    """Computed and sent in float32, on a CPU."""


class CanaryWatch:
    """Compares the canaries of one server over its versions. A server is wrong

    if its log-probs differ from the learner's by more than rounding explains, or
    if they stand still while the learner's move, which reveals missing weights long before the difference does.
    """

    def __init__(self) -> None:
        self._first: tuple[Sequence[float], Sequence[float]] | None = None

    def why_wrong(self, canary: Canary, said: Sequence[float], precision: Precision) -> str | None:
        """The error, or None. `said`: the server's log-probs of token_ids[1:]."""
        tolerance = _TOLERANCE[precision if canary.exact or precision == "quantized" else "bfloat16"]
        apart = _apart(canary.logprobs, said)
        if not apart <= tolerance:  # nor NaN
            return (
                f"{len(said)} log-probs of a canary prompt are {apart:.2g} nats from the learner's on average; "
                f"expected at most {tolerance:g}"
            )
        self._first = self._first or (canary.logprobs, said)
        learner_moved, server_moved = _apart(self._first[0], canary.logprobs), _apart(self._first[1], said)
        if learner_moved > _STILL * tolerance and server_moved < _STILL * learner_moved:
            return (
                f"log-probs of a canary prompt moved by {server_moved:.2g} nats on average since its first weights, "
                f"the learner's by {learner_moved:.2g}: the server does not use the weights that are sent"
            )
        return None


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


class _Rank(msgspec.Struct, frozen=True):
    checksums: dict[str, str]


class _Said(msgspec.Struct, frozen=True):
    ranks: list[_Rank]


def parse_checksums(text: bytes) -> Checksums | None:
    """The checksums in a reply of /weights_checker; None if it has none."""
    try:
        said = msgspec.json.decode(text, type=_Said)
    except msgspec.DecodeError:
        return None
    return [rank.checksums for rank in said.ranks]


def differences(before: Checksums, after: Checksums) -> list[str]:
    """Names of the tensors whose checksums differ, rank by rank."""
    if len(before) != len(after):
        return [f"{len(before)} ranks, then {len(after)}"]
    return [
        name
        for first, second in zip(before, after, strict=True)
        for name in sorted(first.keys() | second.keys())
        if first.get(name) != second.get(name)
    ]
